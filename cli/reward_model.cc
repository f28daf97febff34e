// `stretto reward-model`: trains a model, in this process, to score completions so that the
// preferred one of a pair is above the other (rl/reward_model.cc), and writes it as transformers'
// …ForSequenceClassification with one label. It begins with a model that writes, and a head of
// zeros, or with a reward model.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/flag_checks.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/pair_training.h"
#include "engine/training/critic.h"

namespace stretto::cli {
namespace {
struct RewardModelFlags {
  FinetuneFlags common;
  rl::PairOptions pairs;
};

absl::StatusOr<engine::ModelFiles> OpenWithHead(const FinetuneFlags& flags) {
  ASSIGN_OR_RETURN(engine::ModelFiles files, engine::OpenModelOfAnyHead(flags.model));
  files.config = engine::WithValueHead(files.config);
  files.tensors = engine::CriticTensors(files.tensors, files.config.hidden_size);
  return files;
}

// What decides the result beside the flags that all fine-tuning has.
std::string SettingsJson(const RewardModelFlags& flags) {
  return nlohmann::json{{"command", "reward-model"}, {"center-coef", flags.pairs.center_coef}}
      .dump();
}

absl::Status TrainRewardModel(const RewardModelFlags& flags) {
  RETURN_IF_ERROR(CheckOut(flags.common));
  ASSIGN_OR_RETURN(const auto objective, rl::MakePairObjective("reward_model", flags.pairs));
  ASSIGN_OR_RETURN(FinetuneSession session,
                   FinetuneSession::Open(flags.common, SettingsJson(flags)));
  ASSIGN_OR_RETURN(const auto files, OpenWithHead(flags.common));
  ASSIGN_OR_RETURN(const auto prompts, engine::PromptEncoder::Open(files, flags.common.prompts));
  ASSIGN_OR_RETURN(const PairData data, ReadPairs(*prompts, flags.common, PairScore::kLastValue));
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({.num_threads = flags.common.threads}));
  ASSIGN_OR_RETURN(const auto trainer,
                   CreateTrainer(*device, files, flags.common, data.micro_batch_tokens));
  const PairStepOptions options{.score = PairScore::kLastValue};
  RETURN_IF_ERROR(TrainOnPairs(options, objective, data, *trainer, session));
  RETURN_IF_ERROR(ExportTrained(flags.common, files, *prompts, *trainer));
  return session.RemoveCheckpoints();
}
}  // namespace

void AddRewardModelCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<RewardModelFlags>();
  flags->common.lr = 1e-5;
  CLI::App* command =
      app.add_subcommand("reward-model", "Trains a model to score completions, on preferences.");
  command
      ->add_option("--model", flags->common.model,
                   "Hugging Face folder or GGUF file of a model that writes, or of a reward model")
      ->required();
  AddFinetuneFlags(*command,
                   "JSONL: `prompt` or `messages`, `chosen` and `rejected`, texts or lists of "
                   "messages; `margin`: by how much chosen is better",
                   "Pairs a step", &flags->common);
  command
      ->add_option("--center-coef", flags->pairs.center_coef,
                   "Weight of the squared sum of a pair's scores, which keeps them around 0")
      ->capture_default_str()
      ->check(NumberIn({.low = 0, .high = 1e6}));
  command->callback(
      [flags, chosen] { *chosen = [flags] { return Finish(TrainRewardModel(*flags)); }; });
}
}  // namespace stretto::cli
