// `stretto sft`: supervised training in this process: cross-entropy on the answers of a dataset,
// from a model or from random weights. It made the tiny model of the demo, and serves as a warm
// start.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/conversation.h"
#include "cli/finetune_session.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
using engine::SupervisedSequence;

// A dataset line: a prompt (as in RL datasets) and `completion`, the text to imitate.
absl::StatusOr<SupervisedSequence> EncodeExample(const engine::PromptEncoder& prompts,
                                                 int64_t max_length, const std::string& line) {
  ASSIGN_OR_RETURN(const std::string plain, PlainLine(line, {"completion"}));
  const Json json = Json::parse(plain);
  ASSIGN_OR_RETURN(auto ids, prompts.EncodeLine(plain));
  const auto loss_begin = static_cast<int64_t>(ids.size());
  ASSIGN_OR_RETURN(const auto completion,
                   EncodeCompletion(prompts, json["completion"].get<std::string>()));
  ids.insert(ids.end(), completion.begin(), completion.end());
  if (static_cast<int64_t>(ids.size()) > max_length) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt and completion: expected at most ", max_length,
                     " tokens (--max-sequence-length), found ", ids.size(),
                     "; shorten the line or leave it out, or give more"));
  }
  return SupervisedSequence{std::move(ids), loss_begin};
}

absl::Status Sft(const FinetuneFlags& flags) {
  RETURN_IF_ERROR(CheckOut(flags));
  ASSIGN_OR_RETURN(FinetuneSession session, FinetuneSession::Open(flags, R"({"command": "sft"})"));
  ASSIGN_OR_RETURN(const auto files, OpenStart(flags));
  ASSIGN_OR_RETURN(const auto prompts, engine::PromptEncoder::Open(files, flags.prompts));
  std::vector<SupervisedSequence> examples;
  RETURN_IF_ERROR(ReadExamples(flags.data, [&](const std::string& line) {
    ASSIGN_OR_RETURN(auto example, EncodeExample(*prompts, flags.max_sequence_length, line));
    examples.push_back(std::move(example));
    return absl::OkStatus();
  }));
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({.num_threads = flags.threads}));
  ASSIGN_OR_RETURN(const auto trainer, CreateTrainer(*device, files, flags));
  const auto take = [&](int64_t, absl::Span<const size_t> batch) -> absl::StatusOr<FinetuneStep> {
    std::vector<SupervisedSequence> sequences;
    for (const size_t example : batch) sequences.push_back(examples[example]);
    ASSIGN_OR_RETURN(auto result, trainer->SupervisedStep(sequences));
    return FinetuneStep{std::move(result), ""};
  };
  RETURN_IF_ERROR(session.Run(examples.size(), *trainer, take));
  RETURN_IF_ERROR(ExportTrained(flags, files, *prompts, *trainer));
  return session.RemoveCheckpoints();
}
}  // namespace

void AddSftCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<FinetuneFlags>();
  CLI::App* command = app.add_subcommand("sft", "Trains a model on given completions.");
  auto* start = command->add_option_group("start", "What training starts from");
  start->add_option("--model", flags->model, "Hugging Face folder or GGUF file");
  start->add_option("--config", flags->config, "A config.json: starts from random weights");
  start->require_option(1);
  command->add_option("--tokenizer", flags->tokenizer,
                      "With --config: the folder with tokenizer.json");
  AddFinetuneFlags(
      *command,
      "JSONL: `prompt` or `messages`, and `completion`; or `messages` alone, of which the "
      "last is imitated",
      "Sequences a step", flags.get());
  AddLoraFlags(*command, flags.get());
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Sft(*flags)); }; });
}
}  // namespace stretto::cli
