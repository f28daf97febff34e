#include "cli/pair_training.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status.h"
#include "cli/conversation.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
using engine::TrainBatch;
using engine::TrainGroup;

// A dataset line is a group of two: `chosen` and `rejected`, in this order.
absl::StatusOr<TrainGroup> EncodePair(const engine::PromptEncoder& prompts,
                                      const FinetuneFlags& flags, PairScore score,
                                      const std::string& line) {
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
    if (score == PairScore::kLastValue) completion.ids.push_back(completion.ids.back());
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

// What a group costs in a micro-batch.
int64_t NumTokens(const TrainGroup& group) {
  size_t num_tokens = group.prompt_ids.size();
  for (const auto& completion : group.completions) num_tokens += completion.ids.size();
  return static_cast<int64_t>(num_tokens);
}

absl::StatusOr<double> MarginOf(const std::string& line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("margin") || json["margin"].is_null()) return 0.0;
  if (json["margin"].is_number() && std::isfinite(json["margin"].get<double>())) {
    return json["margin"].get<double>();
  }
  return absl::InvalidArgumentError("`margin`: expected a finite number");
}

// One step's objective as the engine calls it. Not thread-safe.
class PairStep final : public engine::Objective {
 public:
  // `margins`: one a group of the batch.
  PairStep(const PairStepOptions& options, const rl::PairObjective& objective,
           std::vector<double> margins)
      : options_(options), objective_(objective), margins_(std::move(margins)) {}

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
    return options_.score == PairScore::kLastValue ? CompareValues(input, c, output)
                                                   : CompareLogProbs(input, c, output);
  }

  absl::StatusOr<rl::PairSums> CompareValues(const engine::ObjectiveInput& input, size_t c,
                                             engine::ObjectiveOutput& output) const {
    const double chosen = TokensOf(input, c, input.logprobs).back();
    const double rejected = TokensOf(input, c + 1, input.logprobs).back();
    const auto group = static_cast<size_t>(input.completions[c].group);
    double d_chosen = 0, d_rejected = 0;
    ASSIGN_OR_RETURN(
        const rl::PairSums sums,
        objective_.Evaluate({.chosen_P = absl::MakeConstSpan(&chosen, 1),
                             .rejected_P = absl::MakeConstSpan(&rejected, 1),
                             .margins_P = absl::MakeConstSpan(&margins_[group], 1),
                             .first_id = input.completions[c].group},
                            input.step_completions / 2,
                            {absl::MakeSpan(&d_chosen, 1), absl::MakeSpan(&d_rejected, 1)}));
    TokensOf(input, c, output.d_logprobs).back() = static_cast<float>(d_chosen);
    TokensOf(input, c + 1, output.d_logprobs).back() = static_cast<float>(d_rejected);
    return sums;
  }

  absl::StatusOr<rl::PairSums> CompareLogProbs(const engine::ObjectiveInput& input, size_t c,
                                               engine::ObjectiveOutput& output) const {
    rl::SequenceScore scores[2], references[2];
    for (size_t i = 0; i < 2; ++i) {
      scores[i] = rl::ScoreSequence(options_.loss, TokensOf(input, c + i, input.logprobs));
      references[i] =
          rl::ScoreSequence(options_.loss, TokensOf(input, c + i, input.reference_logprobs));
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

  const PairStepOptions options_;
  const rl::PairObjective& objective_;
  const std::vector<double> margins_;
  mutable State state_;  // of the step under way
};

absl::StatusOr<FinetuneStep> TakePairStep(const PairStepOptions& options,
                                          const rl::PairObjective& objective,
                                          engine::TrainerEngine& trainer, const PairData& data,
                                          absl::Span<const size_t> examples) {
  TrainBatch batch;
  std::vector<double> margins;
  for (const size_t example : examples) {
    batch.groups.push_back(data.pairs[example]);
    margins.push_back(data.margins.empty() ? 0 : data.margins[example]);
  }
  const PairStep step(options, objective, std::move(margins));
  FinetuneStep taken;
  ASSIGN_OR_RETURN(taken.result, trainer.Step(batch, step));
  RETURN_IF_ERROR(step.error());
  const auto metrics = step.sums().Metrics();
  taken.more = absl::StrFormat("  accuracy %.3f  margin %.3f", metrics.at("accuracy"),
                               metrics.at("reward_margin"));
  return taken;
}
}  // namespace

absl::StatusOr<PairData> ReadPairs(const engine::PromptEncoder& prompts, const FinetuneFlags& flags,
                                   PairScore score) {
  PairData data;
  data.micro_batch_tokens = engine::TrainerOptions().micro_batch_tokens;
  RETURN_IF_ERROR(ReadExamples(flags.data, [&](const std::string& line) -> absl::Status {
    ASSIGN_OR_RETURN(auto pair, EncodePair(prompts, flags, score, line));
    if (score == PairScore::kLastValue) {
      ASSIGN_OR_RETURN(data.margins.emplace_back(), MarginOf(line));
    }
    data.micro_batch_tokens = std::max(data.micro_batch_tokens, NumTokens(pair));
    data.pairs.push_back(std::move(pair));
    return absl::OkStatus();
  }));
  return data;
}

absl::Status TrainOnPairs(const PairStepOptions& options, const rl::PairObjective& objective,
                          const PairData& data, engine::TrainerEngine& trainer,
                          FinetuneSession& session) {
  const auto take = [&](int64_t step, absl::Span<const size_t> examples) {
    auto taken = TakePairStep(options, objective, trainer, data, examples);
    if (!taken.ok()) taken = Annotate(taken.status(), absl::StrCat("step ", step));
    return taken;
  };
  return session.Run(data.pairs.size(), trainer, take);
}
}  // namespace stretto::cli
