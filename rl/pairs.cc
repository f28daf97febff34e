#include "rl/pairs.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"
#include "rl/pair_terms.h"

namespace stretto::rl {
struct PairObjective::Kind {
  PairLoss* loss;
  bool has_reference;  // else margins
};

namespace {
const std::map<std::string, PairObjective::Kind>& Registry() {
  static const auto* registry = new std::map<std::string, PairObjective::Kind>{
      {"dpo", {.loss = DpoLoss, .has_reference = true}},
      {"reward_model", {.loss = RewardModelLoss, .has_reference = false}},
  };
  return *registry;
}

absl::Status CheckFinite(const PairInputs& in) {
  const std::pair<const char*, absl::Span<const double>> spans[] = {
      {"chosen", in.chosen_P},
      {"rejected", in.rejected_P},
      {"reference of chosen", in.reference_chosen_P},
      {"reference of rejected", in.reference_rejected_P},
      {"margin", in.margins_P},
  };
  for (const auto& [what, values_P] : spans) {
    for (size_t p = 0; p < values_P.size(); ++p) {
      if (std::isfinite(values_P[p])) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("pair ", in.first_id + static_cast<int64_t>(p), ": ", what,
                       ": expected a finite number, found ", values_P[p]));
    }
  }
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<PreferenceLoss> PreferenceLossByName(absl::string_view name) {
  if (name == "sigmoid") return PreferenceLoss::kSigmoid;
  if (name == "ipo") return PreferenceLoss::kIpo;
  return absl::InvalidArgumentError(
      absl::StrCat("preference loss: expected one of sigmoid, ipo, found '", name, "'"));
}

void PairSums::Merge(const PairSums& other) {
  loss += other.loss;
  chosen_reward += other.chosen_reward;
  rejected_reward += other.rejected_reward;
  num_pairs += other.num_pairs;
  num_right += other.num_right;
}

std::map<std::string, double> PairSums::Metrics() const {
  const double count = static_cast<double>(std::max<int64_t>(num_pairs, 1));
  return {{"loss", loss},
          {"accuracy", static_cast<double>(num_right) / count},
          {"chosen_reward", chosen_reward / count},
          {"rejected_reward", rejected_reward / count},
          {"reward_margin", (chosen_reward - rejected_reward) / count}};
}

absl::StatusOr<PairSums> PairObjective::Evaluate(const PairInputs& in, int64_t step_pairs,
                                                 const PairGradients& out) const {
  const size_t num_pairs = in.chosen_P.size();
  const auto is_optional = [&](auto span) { return span.empty() || span.size() == num_pairs; };
  STRETTO_CHECK(in.rejected_P.size() == num_pairs);
  STRETTO_CHECK(out.d_chosen_P.size() == num_pairs && out.d_rejected_P.size() == num_pairs);
  STRETTO_CHECK(is_optional(in.reference_chosen_P) && is_optional(in.reference_rejected_P));
  STRETTO_CHECK(is_optional(in.margins_P));
  PairSums sums;
  if (num_pairs == 0) return sums;
  STRETTO_CHECK(step_pairs > 0);
  RETURN_IF_ERROR(CheckFinite(in));
  const bool uses_reference = kind_->has_reference && !options_.reference_free;
  if (uses_reference && (in.reference_chosen_P.empty() || in.reference_rejected_P.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat("pair ", in.first_id, ": expected the reference's log-probs"));
  }
  const double weight = 1.0 / static_cast<double>(step_pairs);
  for (size_t p = 0; p < num_pairs; ++p) {
    Pair pair{.chosen = in.chosen_P[p], .rejected = in.rejected_P[p]};
    if (uses_reference) {
      pair.reference_chosen = in.reference_chosen_P[p];
      pair.reference_rejected = in.reference_rejected_P[p];
    }
    if (!kind_->has_reference && !in.margins_P.empty()) pair.margin = in.margins_P[p];
    const PairTerm term = kind_->loss(options_, pair);
    out.d_chosen_P[p] = weight * term.d_chosen;
    out.d_rejected_P[p] = weight * term.d_rejected;
    sums.Merge({.loss = weight * term.loss,
                .chosen_reward = term.chosen_reward,
                .rejected_reward = term.rejected_reward,
                .num_pairs = 1,
                .num_right = term.chosen_reward > term.rejected_reward ? 1 : 0});
  }
  return sums;
}

absl::StatusOr<PairObjective> MakePairObjective(const std::string& name,
                                                const PairOptions& options) {
  const auto it = Registry().find(name);
  if (it == Registry().end()) {
    return absl::InvalidArgumentError(absl::StrCat("objective on pairs: expected one of ",
                                                   absl::StrJoin(PairObjectiveNames(), ", "),
                                                   ", found '", name, "'"));
  }
  if (!(options.beta > 0) || !std::isfinite(options.beta)) {
    return absl::InvalidArgumentError(
        absl::StrCat("objective: beta: expected a positive number, found ", options.beta));
  }
  if (!(options.label_smoothing >= 0 && options.label_smoothing < 0.5)) {
    return absl::InvalidArgumentError(
        absl::StrCat("objective: label_smoothing: expected at least 0 and below 0.5, found ",
                     options.label_smoothing));
  }
  if (!(options.center_coef >= 0) || !std::isfinite(options.center_coef)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "objective: center_coef: expected a number of at least 0, found ", options.center_coef));
  }
  return PairObjective(&it->second, options);
}

std::vector<std::string> PairObjectiveNames() {
  std::vector<std::string> names;
  for (const auto& entry : Registry()) names.push_back(entry.first);
  return names;
}

Logistic LogisticLoss(double x) {
  const double tail = std::exp(-std::abs(x));  // at most 1
  return {.loss = std::max(-x, 0.0) + std::log1p(tail),
          .d_x = x >= 0 ? -tail / (1 + tail) : -1 / (1 + tail)};
}

SequenceScore ScoreSequence(PreferenceLoss loss, absl::Span<const float> logprobs_T) {
  SequenceScore score{.value = 0, .d_logprob = 1};
  for (const float logprob : logprobs_T) score.value += logprob;
  if (loss == PreferenceLoss::kIpo && !logprobs_T.empty()) {
    score.d_logprob = 1 / static_cast<double>(logprobs_T.size());
    score.value *= score.d_logprob;
  }
  return score;
}
}  // namespace stretto::rl
