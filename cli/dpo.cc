// `stretto dpo`: trains a model, in this process, to prefer one completion of a prompt over another
// (direct preference optimization, rl/dpo.cc). The reference is the model that training starts
// from: its log-probs of all pairs are computed once, before the first step.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/flag_checks.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/conversation.h"
#include "cli/finetune_session.h"
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

// A dataset line is a group of two: `chosen` and `rejected`, in this order.
absl::StatusOr<TrainGroup> EncodePair(const engine::PromptEncoder& prompts,
                                      const FinetuneFlags& flags, const std::string& line) {
  ASSIGN_OR_RETURN(const std::string plain, PlainLine(line, {"chosen", "rejected"}));
  const Json json = Json::parse(plain);
  if (json["chosen"] == json["rejected"]) {
    return absl::InvalidArgumentError(
        "`chosen` and `rejected` are the same text: nothing is preferred");
  }
  TrainGroup group;
  for (const char* key : {"chosen", "rejected"}) {
    engine::TrainCompletion completion;
    ASSIGN_OR_RETURN(completion.ids, EncodeCompletion(prompts, json[key].get<std::string>()));
    if (completion.ids.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(key, ": expected a text with tokens"));
    }
    completion.advantage =
        group.completions.empty() ? 1 : -1;  // says that the group has a gradient
    group.completions.push_back(std::move(completion));
  }
  ASSIGN_OR_RETURN(group.prompt_ids, prompts.EncodeLine(plain));
  for (const auto& completion : group.completions) {
    const size_t length = group.prompt_ids.size() + completion.ids.size();
    if (static_cast<int64_t>(length) <= flags.max_sequence_length) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("prompt and completion: expected at most ", flags.max_sequence_length,
                     " tokens (--max-sequence-length), found ", length));
  }
  return group;
}

// What a group costs in a micro-batch; both its completions must come in one.
int64_t NumTokens(const TrainGroup& group) {
  size_t num_tokens = group.prompt_ids.size();
  for (const auto& completion : group.completions) num_tokens += completion.ids.size();
  return static_cast<int64_t>(num_tokens);
}

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

// One step's objective as the engine calls it. Not thread-safe.
class DpoStep final : public engine::Objective {
 public:
  DpoStep(const rl::PairObjective& objective, rl::PreferenceLoss loss)
      : objective_(objective), loss_(loss) {}

  void Evaluate(const engine::ObjectiveInput& input,
                engine::ObjectiveOutput& output) const override {
    STRETTO_CHECK(input.completions.size() % 2 == 0);
    for (size_t c = 0; c < input.completions.size(); c += 2) {
      STRETTO_CHECK(input.completions[c].group == input.completions[c + 1].group);
      const absl::StatusOr<rl::PairSums> sums = EvaluatePair(input, c, output);
      if (sums.ok()) {
        output.loss += sums->loss;
        state_.sums.Merge(*sums);
      } else {
        output.loss = std::nan("");  // the engine skips such a step
        if (state_.error.ok()) state_.error = sums.status();
      }
    }
  }
  const rl::PairSums& sums() const { return state_.sums; }
  const absl::Status& error() const { return state_.error; }

 private:
  struct State {
    rl::PairSums sums;
    absl::Status error;
  };

  absl::StatusOr<rl::PairSums> EvaluatePair(const engine::ObjectiveInput& input, size_t c,
                                            engine::ObjectiveOutput& output) const {
    rl::SequenceScore scores[2], references[2];
    for (size_t i = 0; i < 2; ++i) {
      scores[i] = rl::ScoreSequence(loss_, TokensOf(input, c + i, input.logprobs));
      references[i] = rl::ScoreSequence(loss_, TokensOf(input, c + i, input.reference_logprobs));
    }
    double d_chosen = 0, d_rejected = 0;
    ASSIGN_OR_RETURN(
        const rl::PairSums sums,
        objective_.Evaluate({.chosen_P = absl::MakeConstSpan(&scores[0].value, 1),
                             .rejected_P = absl::MakeConstSpan(&scores[1].value, 1),
                             .reference_chosen_P = absl::MakeConstSpan(&references[0].value, 1),
                             .reference_rejected_P = absl::MakeConstSpan(&references[1].value, 1),
                             .first_id = input.completions[c].group},
                            input.step_completions / 2,
                            {absl::MakeSpan(&d_chosen, 1), absl::MakeSpan(&d_rejected, 1)}));
    for (float& d : TokensOf(input, c, output.d_logprobs)) {
      d = static_cast<float>(d_chosen * scores[0].d_logprob);
    }
    for (float& d : TokensOf(input, c + 1, output.d_logprobs)) {
      d = static_cast<float>(d_rejected * scores[1].d_logprob);
    }
    return sums;
  }

  template <class T>
  static absl::Span<T> TokensOf(const engine::ObjectiveInput& input, size_t completion,
                                absl::Span<T> all) {
    if (all.empty()) return {};  // no reference
    const auto begin = static_cast<size_t>(input.completion_begin[completion]);
    return all.subspan(begin, static_cast<size_t>(input.completion_begin[completion + 1]) - begin);
  }

  const rl::PairObjective& objective_;
  const rl::PreferenceLoss loss_;
  mutable State state_;  // of the step under way
};

absl::StatusOr<FinetuneStep> TakeStep(const DpoFlags& flags, const rl::PairObjective& objective,
                                      engine::TrainerEngine& trainer, const TrainBatch& batch) {
  const DpoStep step(objective, flags.pairs.loss);
  FinetuneStep taken;
  ASSIGN_OR_RETURN(taken.result, trainer.Step(batch, step));
  RETURN_IF_ERROR(step.error());
  const auto metrics = step.sums().Metrics();
  taken.more = absl::StrFormat("  accuracy %.3f  margin %.3f", metrics.at("accuracy"),
                               metrics.at("reward_margin"));
  return taken;
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
  std::vector<TrainGroup> pairs;
  int64_t micro_batch_tokens = engine::TrainerOptions().micro_batch_tokens;
  RETURN_IF_ERROR(ReadExamples(flags.common.data, [&](const std::string& line) {
    ASSIGN_OR_RETURN(auto pair, EncodePair(*prompts, flags.common, line));
    micro_batch_tokens = std::max(micro_batch_tokens, NumTokens(pair));
    pairs.push_back(std::move(pair));
    return absl::OkStatus();
  }));
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({.num_threads = flags.common.threads}));
  ASSIGN_OR_RETURN(const auto trainer,
                   CreateTrainer(*device, files, flags.common, micro_batch_tokens));
  if (!flags.pairs.reference_free) RETURN_IF_ERROR(AddReference(*trainer, pairs));
  const auto take = [&](int64_t step, absl::Span<const size_t> examples) {
    TrainBatch batch;
    for (const size_t example : examples) batch.groups.push_back(pairs[example]);
    auto taken = TakeStep(flags, objective, *trainer, batch);
    if (!taken.ok()) taken = Annotate(taken.status(), absl::StrCat("step ", step));
    return taken;
  };
  RETURN_IF_ERROR(session.Run(pairs.size(), *trainer, take));
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
