// `stretto dpo`: trains a model, in this process, to prefer one completion of a prompt over another
// (direct preference optimization, rl/dpo.cc). The reference is the model that training starts
// from: its log-probs of all pairs are computed once, before the first step.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/flag_checks.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/pair_training.h"
#include "rl/pairs.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
using engine::TrainBatch;
using engine::TrainGroup;

struct DpoFlags {
  FinetuneFlags common;
  rl::PairOptions pairs;
  std::string loss = "sigmoid";
};

absl::Status AddReference(engine::TrainerEngine& trainer, std::vector<TrainGroup>& pairs) {
  constexpr size_t kPairsAtOnce = 64;
  constexpr int64_t kMaxSilenceNs = 10'000'000'000;
  int64_t told_ns = Clock::Real().NowNs();
  for (size_t begin = 0; begin < pairs.size(); begin += kPairsAtOnce) {
    const size_t end = std::min(begin + kPairsAtOnce, pairs.size());
    TrainBatch batch;
    batch.groups.assign(pairs.begin() + static_cast<std::ptrdiff_t>(begin),
                        pairs.begin() + static_cast<std::ptrdiff_t>(end));
    ASSIGN_OR_RETURN(engine::BatchLogProbs found, trainer.LogProbs(batch));
    for (size_t i = begin; i < end; ++i) {
      for (size_t c = 0; c < 2; ++c) {
        pairs[i].completions[c].reference_logprobs = std::move(found.logprobs[i - begin][c]);
      }
    }
    if (Clock::Real().NowNs() - told_ns < kMaxSilenceNs) continue;
    told_ns = Clock::Real().NowNs();
    std::printf("reference: %zu of %zu pairs\n", end, pairs.size());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

// What decides the result beside the flags that all fine-tuning has.
std::string SettingsJson(const DpoFlags& flags) {
  return Json{{"command", "dpo"},
              {"beta", flags.pairs.beta},
              {"loss", flags.loss},
              {"label-smoothing", flags.pairs.label_smoothing},
              {"reference-free", flags.pairs.reference_free}}
      .dump();
}

absl::Status Dpo(DpoFlags flags) {
  RETURN_IF_ERROR(CheckOut(flags.common));
  ASSIGN_OR_RETURN(flags.pairs.loss, rl::PreferenceLossByName(flags.loss));
  ASSIGN_OR_RETURN(const auto objective, rl::MakePairObjective("dpo", flags.pairs));
  ASSIGN_OR_RETURN(FinetuneSession session,
                   FinetuneSession::Open(flags.common, SettingsJson(flags)));
  ASSIGN_OR_RETURN(const auto files, OpenStart(flags.common));
  ASSIGN_OR_RETURN(const auto prompts, engine::PromptEncoder::Open(files, flags.common.prompts));
  ASSIGN_OR_RETURN(PairData data, ReadPairs(*prompts, flags.common, PairScore::kLogProbs));
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({.num_threads = flags.common.threads}));
  ASSIGN_OR_RETURN(const auto trainer,
                   CreateTrainer(*device, files, flags.common, data.micro_batch_tokens));
  if (!flags.pairs.reference_free) RETURN_IF_ERROR(AddReference(*trainer, data.pairs));
  const PairStepOptions options{.score = PairScore::kLogProbs, .loss = flags.pairs.loss};
  RETURN_IF_ERROR(TrainOnPairs(options, objective, data, *trainer, session));
  RETURN_IF_ERROR(ExportTrained(flags.common, files, *prompts, *trainer));
  return session.RemoveCheckpoints();
}
}  // namespace

void AddDpoCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<DpoFlags>();
  flags->common.lr = 5e-7;
  flags->common.warmup = 50;
  flags->common.schedule = engine::LrSchedule::Kind::kLinear;
  CLI::App* command = app.add_subcommand("dpo", "Trains a model on preferences.");
  command->add_option("--model", flags->common.model, "Hugging Face folder or GGUF file")
      ->required();
  AddFinetuneFlags(
      *command,
      "JSONL: `prompt` or `messages`, `chosen` and `rejected`, texts or lists of messages",
      "Pairs a step", &flags->common);
  AddLoraFlags(*command, &flags->common);
  command->add_option("--beta", flags->pairs.beta, "Strength of the pull to the reference")
      ->capture_default_str()
      ->check(NumberIn({.low = 0, .high = 1e300, .without_low = true}));
  command->add_option("--loss", flags->loss, "DPO's (sigmoid), or IPO's")
      ->capture_default_str()
      ->check(CLI::IsMember({"sigmoid", "ipo"}));
  command
      ->add_option("--label-smoothing", flags->pairs.label_smoothing,
                   "How often a preference is wrong; below 0.5")
      ->capture_default_str()
      ->check(NumberIn({.low = 0, .high = 1}));
  command->add_flag("--reference-free", flags->pairs.reference_free,
                    "Compares with a uniform reference instead of the model at the start");
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Dpo(*flags)); }; });
}
}  // namespace stretto::cli
