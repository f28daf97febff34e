// `stretto sft`: supervised training in this process: cross-entropy on the answers of a dataset,
// from a model or from random weights. It made the tiny model of the demo, and serves as a warm
// start.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/philox.h"
#include "base/status.h"
#include "cli/commands.h"
#include "engine/formats/export_hf.h"
#include "engine/formats/model_files.h"
#include "engine/prompt/prompt_encoder.h"
#include "engine/training/trainer_engine.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
using engine::SupervisedSequence;

struct SftFlags {
  std::string model, config, tokenizer, data, out, dtype = "bf16";
  engine::PromptOptions prompts;
  int64_t steps = 200, batch = 32, max_sequence_length = 512, warmup = 20;
  double lr = 1e-4, weight_decay = 0;
  uint64_t seed = 1;
  int threads = 0;
  bool overwrite = false;
};

// The model to start from: files and, unless it starts from random weights, tensors.
absl::StatusOr<engine::ModelFiles> OpenStart(const SftFlags& flags) {
  if (!flags.model.empty()) return engine::OpenModel(flags.model);
  engine::ModelFiles files;
  files.path = flags.tokenizer;
  ASSIGN_OR_RETURN(const std::string json, Files::Real().ReadAll(flags.config));
  ASSIGN_OR_RETURN(files.config, engine::ParseHfConfig(flags.config, json));
  return files;
}

// A dataset line: a prompt (as in RL datasets) and `completion`, the text to imitate.
absl::StatusOr<SupervisedSequence> EncodeExample(const engine::PromptEncoder& prompts,
                                                 const std::string& line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("completion") || !json["completion"].is_string()) {
    return absl::InvalidArgumentError(
        "expected a JSON object with `completion` (text) and `prompt` or `messages`");
  }
  ASSIGN_OR_RETURN(auto ids, prompts.EncodeLine(line));
  const auto loss_begin = static_cast<int64_t>(ids.size());
  ASSIGN_OR_RETURN(
      const auto completion,
      prompts.tokenizer().Encode(json["completion"].get<std::string>(),
                                 {.add_special_tokens = false, .parse_special = false}));
  ids.insert(ids.end(), completion.begin(), completion.end());
  if (!prompts.stop_ids().empty()) ids.push_back(prompts.stop_ids().front());
  return SupervisedSequence{std::move(ids), loss_begin};
}

absl::StatusOr<std::vector<SupervisedSequence>> ReadExamples(const engine::PromptEncoder& prompts,
                                                             const std::string& path) {
  ASSIGN_OR_RETURN(const std::string content, Files::Real().ReadAll(path));
  std::vector<SupervisedSequence> examples;
  size_t begin = 0;
  for (int64_t number = 1; begin < content.size(); ++number) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    if (end > begin) {
      auto example = EncodeExample(prompts, content.substr(begin, end - begin));
      if (!example.ok()) return Annotate(example.status(), absl::StrCat(path, ":", number));
      examples.push_back(*std::move(example));
    }
    begin = end + 1;
  }
  if (examples.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": no examples"));
  return examples;
}

engine::TrainerOptions MakeOptions(const SftFlags& flags) {
  engine::TrainerOptions options;
  options.dtype = flags.dtype == "f32" ? DType::kF32 : DType::kBF16;
  options.max_sequence_length = flags.max_sequence_length;
  options.schedule = {.kind = engine::LrSchedule::Kind::kCosine,
                      .lr = flags.lr,
                      .warmup_steps = flags.warmup,
                      .total_steps = flags.steps};
  options.weight_decay = flags.weight_decay;
  return options;
}

absl::Status RunSteps(const SftFlags& flags, const std::vector<SupervisedSequence>& examples,
                      engine::TrainerEngine& trainer) {
  std::vector<size_t> order(examples.size());
  std::iota(order.begin(), order.end(), size_t{0});
  PhiloxStream shuffle(flags.seed);
  size_t cursor = order.size();
  const double start = Clock::Real().NowSeconds();
  for (int64_t step = 1; step <= flags.steps; ++step) {
    std::vector<SupervisedSequence> batch;
    while (static_cast<int64_t>(batch.size()) < flags.batch) {
      if (cursor == order.size()) {
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[shuffle.Below(i)]);
        cursor = 0;
      }
      batch.push_back(examples[order[cursor++]]);
    }
    ASSIGN_OR_RETURN(const auto result, trainer.SupervisedStep(batch));
    if (step % 20 == 0 || step == flags.steps) {
      std::printf("step %lld/%lld  loss %.4f  grad norm %.3f  %.1f s\n",
                  static_cast<long long>(step), static_cast<long long>(flags.steps), result.loss,
                  result.grad_norm, Clock::Real().NowSeconds() - start);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

absl::Status Sft(const SftFlags& flags) {
  if (!flags.overwrite && Files::Real().Exists(flags.out)) {  // said before the work, not after
    return absl::AlreadyExistsError(
        absl::StrCat(flags.out, ": exists already; --overwrite replaces it"));
  }
  RETURN_IF_ERROR(engine::CheckReplaceable(Files::Real(), flags.out));
  ASSIGN_OR_RETURN(const auto files, OpenStart(flags));
  ASSIGN_OR_RETURN(const auto prompts, engine::PromptEncoder::Open(files, flags.prompts));
  ASSIGN_OR_RETURN(const auto examples, ReadExamples(*prompts, flags.data));
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({.num_threads = flags.threads}));
  ASSIGN_OR_RETURN(auto trainer,
                   engine::TrainerEngine::Create(*device, files.config, MakeOptions(flags)));
  if (files.tensors != nullptr) {
    RETURN_IF_ERROR(trainer->LoadModel(*files.tensors));
  } else {
    RETURN_IF_ERROR(trainer->InitRandom(flags.seed));
  }
  RETURN_IF_ERROR(RunSteps(flags, examples, *trainer));
  engine::ExportOptions options;
  options.path = flags.out;
  options.config = files.config;
  options.generation = files.generation;
  options.overwrite = flags.overwrite;
  options.tokenizer_files = {
      {"tokenizer.json", prompts->tokenizer().ToTokenizerJson()},
      {"tokenizer_config.json", prompts->tokenizer().ToTokenizerConfigJson()}};
  return engine::ExportHf(Files::Real(), options,
                          [&trainer](const engine::TensorSpec& tensor, int64_t begin, int64_t end,
                                     DType type, void* dst) {
                            return trainer->ReadRows(*trainer->layout().Find(tensor.name), begin,
                                                     end, type, dst);
                          });
}
}  // namespace

void AddSftCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<SftFlags>();
  CLI::App* command = app.add_subcommand("sft", "Trains a model on given completions.");
  auto* start = command->add_option_group("start", "What training starts from");
  start->add_option("--model", flags->model, "Hugging Face folder or GGUF file");
  start->add_option("--config", flags->config, "A config.json: starts from random weights");
  start->require_option(1);
  command->add_option("--tokenizer", flags->tokenizer,
                      "With --config: the folder with tokenizer.json");
  command->add_option("--data", flags->data, "JSONL: `prompt` or `messages`, and `completion`")
      ->required();
  command->add_option("--out", flags->out, "The Hugging Face folder to write")->required();
  command->add_flag("--overwrite", flags->overwrite);
  command->add_option("--steps", flags->steps)->check(CLI::PositiveNumber);
  command->add_option("--batch", flags->batch, "Sequences a step")->check(CLI::PositiveNumber);
  command->add_option("--lr", flags->lr)->check(CLI::PositiveNumber);
  command->add_option("--warmup", flags->warmup)->check(CLI::NonNegativeNumber);
  command->add_option("--weight-decay", flags->weight_decay)->check(CLI::NonNegativeNumber);
  command->add_option("--max-sequence-length", flags->max_sequence_length)
      ->check(CLI::PositiveNumber);
  command->add_option("--dtype", flags->dtype)->check(CLI::IsMember({"bf16", "f32"}));
  command->add_option("--chat-format", flags->prompts.chat_format);
  command->add_option("--system", flags->prompts.system_prompt);
  command->add_option("--seed", flags->seed);
  command->add_option("--threads", flags->threads);
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Sft(*flags)); }; });
}
}  // namespace stretto::cli
