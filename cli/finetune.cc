#include "cli/finetune.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/flag_checks.h"
#include "base/status.h"
#include "engine/formats/export_hf.h"
#include "engine/training/checkpoint_adapter.h"

namespace stretto::cli {
namespace {
constexpr int64_t kMaxSteps = int64_t{1} << 40;
}  // namespace

void AddFinetuneFlags(CLI::App& command, const std::string& data, const std::string& batch,
                      FinetuneFlags* flags) {
  flags->prompts.chat_key = "--chat-format";
  command.add_option("--data", flags->data, data)->required();
  command.add_option("--out", flags->out, "The Hugging Face folder to write")->required();
  command.add_flag("--overwrite", flags->overwrite, "Replaces --out if it exists");
  command.add_option("--steps", flags->steps, "Updates of the weights")
      ->capture_default_str()
      ->check(IntegerIn(1, kMaxSteps));
  command.add_option("--batch", flags->batch, batch)
      ->capture_default_str()
      ->check(IntegerIn(1, 1 << 20));
  command.add_option("--lr", flags->lr, "Learning rate, at its highest")
      ->capture_default_str()
      ->check(NumberIn({.low = 0, .high = 1000, .without_low = true}));
  command.add_option("--warmup", flags->warmup, "Steps in which the learning rate rises")
      ->capture_default_str()
      ->check(IntegerIn(0, kMaxSteps));
  command.add_option("--weight-decay", flags->weight_decay, "AdamW's")
      ->capture_default_str()
      ->check(NumberIn({.low = 0, .high = 1000}));
  command
      .add_option("--max-sequence-length", flags->max_sequence_length,
                  "Tokens of a prompt and its completion, at most")
      ->capture_default_str()
      ->check(IntegerIn(2, 1 << 24));
  command.add_option("--dtype", flags->dtype, "Of computing; masters are f32")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "f32"}));
  command.add_option("--chat-format", flags->prompts.chat_format,
                     "How messages become a prompt: auto (the model's own way, the default) or a "
                     "format's name (docs/chat-formats.md)");
  command
      .add_option_function<std::string>(
          "--system", [flags](const std::string& text) { flags->prompts.system_prompt = text; },
          "A system message for every prompt without one; \"\": one without text. Default: the "
          "template's")
      ->type_name("TEXT");
  command.add_option("--seed", flags->seed, "Decides the order of examples")
      ->capture_default_str()
      ->check(IntegerIn(0, INT64_MAX));
  command
      .add_option("--checkpoint-every", flags->checkpoint_every,
                  "Steps between checkpoints in OUT.checkpoints, from which the same command goes "
                  "on; 0: only when interrupted")
      ->capture_default_str()
      ->check(IntegerIn(0, kMaxSteps));
  command
      .add_option("--optimizer-state", flags->optimizer_state,
                  "Adam's moments, 8 bytes a parameter or 2")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "8bit"}));
  command.add_flag("--offload-optimizer", flags->offload_optimizer,
                   "Keeps master weights and f32 moments in files beside OUT, not in memory");
  command.add_flag("--restart", flags->restart, "Begins anew where there are checkpoints");
  command.add_option("--threads", flags->threads, "Compute threads; 0: what the machine grants")
      ->capture_default_str()
      ->check(IntegerIn(0, 1024));
}

void AddLoraFlags(CLI::App& command, FinetuneFlags* flags) {
  command
      .add_option("--lora-rank", flags->lora_rank,
                  "Trains an adapter of this rank instead of the model's weights; 0: all weights")
      ->capture_default_str()
      ->check(IntegerIn(0, 65536));
  command.add_option("--lora-alpha", flags->lora_alpha, "Its scale is alpha / rank; 0: 2 · rank")
      ->capture_default_str()
      ->check(NumberIn({.low = 0, .high = 1e6}));
  command
      .add_option("--lora-targets", flags->lora_targets,
                  "Linear maps that are adapted (q_proj,v_proj,…); all unless given")
      ->delimiter(',');
  command.add_option("--lora-adapter", flags->lora_adapter,
                     "A PEFT folder to start from; default: none");
  command.add_option("--adapter-out", flags->adapter_out,
                     "Writes the adapter there as well, as a folder for PEFT; --out has it merged. "
                     "Default: not written");
}

std::string CheckpointsOf(const FinetuneFlags& flags) {
  std::string path = std::filesystem::path(flags.out).lexically_normal().string();
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path + ".checkpoints";
}

absl::Status CheckOut(const FinetuneFlags& flags) {
  if (!flags.overwrite && Files::Real().Exists(flags.out)) {
    return absl::AlreadyExistsError(
        absl::StrCat(flags.out, ": exists already; --overwrite replaces it"));
  }
  const bool adapts = flags.lora_rank > 0 || !flags.lora_adapter.empty();
  if (!adapts &&
      !(flags.adapter_out.empty() && flags.lora_alpha == 0 && flags.lora_targets.empty())) {
    return absl::InvalidArgumentError(
        "--adapter-out, --lora-alpha, --lora-targets: expected --lora-rank or --lora-adapter with "
        "them");
  }
  if (!flags.overwrite && !flags.adapter_out.empty() && Files::Real().Exists(flags.adapter_out)) {
    return absl::AlreadyExistsError(
        absl::StrCat(flags.adapter_out, ": exists already; --overwrite replaces it"));
  }
  return engine::CheckReplaceable(Files::Real(), flags.out);
}

absl::StatusOr<engine::ModelFiles> OpenStart(const FinetuneFlags& flags) {
  if (!flags.model.empty()) return engine::OpenModel(flags.model);
  engine::ModelFiles files;
  files.path = flags.tokenizer;
  ASSIGN_OR_RETURN(const std::string json, Files::Real().ReadAll(flags.config));
  ASSIGN_OR_RETURN(files.config, engine::ParseHfConfig(flags.config, json));
  return files;
}

absl::StatusOr<std::unique_ptr<engine::TrainerEngine>> CreateTrainer(
    engine::Device& device, const engine::ModelFiles& files, const FinetuneFlags& flags,
    int64_t micro_batch_tokens) {
  engine::TrainerOptions options;
  options.dtype = flags.dtype == "f32" ? DType::kF32 : DType::kBF16;
  options.max_sequence_length = flags.max_sequence_length;
  options.micro_batch_tokens = micro_batch_tokens;
  options.schedule = {.kind = flags.schedule,
                      .lr = flags.lr,
                      .warmup_steps = flags.warmup,
                      .total_steps = flags.steps};
  options.weight_decay = flags.weight_decay;
  options.storage.eight_bit_moments = flags.optimizer_state == "8bit";
  if (flags.offload_optimizer) options.storage.offload_folder = CheckpointsOf(flags) + "/offload";
  ASSIGN_OR_RETURN(
      const engine::PeftAdapter adapter,
      engine::ResolveLora(files.config, {flags.lora_rank, flags.lora_alpha, flags.lora_targets},
                          flags.lora_adapter));
  options.lora = adapter.lora;
  ASSIGN_OR_RETURN(auto trainer, engine::TrainerEngine::Create(device, files.config, options));
  if (files.tensors != nullptr) {
    RETURN_IF_ERROR(trainer->LoadModel(*files.tensors, flags.seed, adapter.tensors.get()));
  } else {
    RETURN_IF_ERROR(trainer->InitRandom(flags.seed));
  }
  return trainer;
}

absl::Status ExportTrained(const FinetuneFlags& flags, const engine::ModelFiles& files,
                           const engine::PromptEncoder& prompts, engine::TrainerEngine& trainer) {
  engine::ExportOptions options;
  options.path = flags.out;
  options.config = files.config;
  options.config.chat_format = prompts.named_format();
  options.generation = files.generation;
  options.overwrite = flags.overwrite;
  options.tokenizer_files = {
      {"tokenizer.json", prompts.tokenizer().ToTokenizerJson()},
      {"tokenizer_config.json", prompts.tokenizer().ToTokenizerConfigJson()}};
  RETURN_IF_ERROR(engine::ExportHf(Files::Real(), options,
                                   [&trainer](const engine::TensorSpec& tensor, int64_t begin,
                                              int64_t end, DType type, void* dst) {
                                     return trainer.ReadRows(*trainer.layout().Find(tensor.name),
                                                             begin, end, type, dst);
                                   }));
  std::printf("Wrote %s\n", flags.out.c_str());
  if (flags.adapter_out.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(engine::ExportEngineAdapter(Files::Real(), trainer,
                                              {flags.adapter_out, files.path, flags.overwrite}));
  std::printf("Wrote %s\n", flags.adapter_out.c_str());
  return absl::OkStatus();
}

absl::Status ReadExamples(const std::string& path,
                          absl::FunctionRef<absl::Status(const std::string& line)> read) {
  ASSIGN_OR_RETURN(const std::string content, Files::Real().ReadAll(path));
  bool found = false;
  size_t begin = 0;
  for (int64_t number = 1; begin < content.size(); ++number) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    if (end > begin) {
      found = true;
      const absl::Status status = read(content.substr(begin, end - begin));
      if (!status.ok()) return Annotate(status, absl::StrCat(path, ":", number));
    }
    begin = end + 1;
  }
  return found ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(path, ": no examples"));
}

absl::StatusOr<std::vector<int32_t>> EncodeCompletion(const engine::PromptEncoder& prompts,
                                                      const std::string& text) {
  ASSIGN_OR_RETURN(auto ids, prompts.tokenizer().Encode(
                                 text, {.add_special_tokens = false, .parse_special = false}));
  if (!prompts.stop_ids().empty()) ids.push_back(prompts.stop_ids().front());
  return ids;
}

EpochOrder::EpochOrder(size_t num_examples, uint64_t seed)
    : order_(num_examples), shuffle_(seed), cursor_(num_examples) {
  std::iota(order_.begin(), order_.end(), size_t{0});
}

size_t EpochOrder::Next() {
  if (cursor_ == order_.size()) {
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[shuffle_.Below(i)]);
    cursor_ = 0;
  }
  return order_[cursor_++];
}

absl::Status CheckFinite(int64_t step, const engine::StepResult& result) {
  if (std::isfinite(result.loss) && std::isfinite(result.grad_norm)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("step ", step, ": loss ", result.loss, ", gradient norm ", result.grad_norm,
                   ": no numbers to go on with; nothing was written. Try a lower --lr"));
}

void PrintStep(const FinetuneFlags& flags, int64_t step, const engine::StepResult& result,
               const std::string& more, double seconds) {
  std::printf("step %lld/%lld  loss %.4f  grad norm %.3f%s  %.1f s\n", static_cast<long long>(step),
              static_cast<long long>(flags.steps), result.loss, result.grad_norm, more.c_str(),
              seconds);
  std::fflush(stdout);
}
}  // namespace stretto::cli
