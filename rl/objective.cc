#include "rl/objective.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"
#include "rl/terms.h"

namespace stretto::rl {
struct Objective::Kind {
  SequenceLoss* loss;
  bool needs_values = false;
};

namespace {
const std::map<std::string, Objective::Kind>& Registry() {
  static const auto* registry = new std::map<std::string, Objective::Kind>{
      {"grpo", {.loss = GrpoLoss}},
      {"ppo", {.loss = PpoLoss, .needs_values = true}},
      {"reinforce", {.loss = ReinforceLoss}},
      {"rloo", {.loss = RlooLoss}},
      {"supervised", {.loss = SupervisedLoss}},
  };
  return *registry;
}

absl::Status CheckOption(bool is_good, absl::string_view name, absl::string_view expected,
                         double found) {
  if (is_good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("objective: ", name, ": expected ", expected, ", found ", found));
}

absl::Status CheckOptions(const ObjectiveOptions& o) {
  RETURN_IF_ERROR(
      CheckOption(o.clip_low >= 0 && o.clip_low <= 1, "clip_low", "0 to 1", o.clip_low));
  const auto not_negative = [](absl::string_view name, double value) {
    return CheckOption(value >= 0 && std::isfinite(value), name, "a number of at least 0", value);
  };
  RETURN_IF_ERROR(not_negative("clip_high", o.clip_high));
  RETURN_IF_ERROR(not_negative("kl_coef", o.kl_coef));
  RETURN_IF_ERROR(not_negative("entropy_coef", o.entropy_coef));
  RETURN_IF_ERROR(not_negative("importance_cap", o.importance_cap));
  RETURN_IF_ERROR(not_negative("value_coef", o.value_coef));
  RETURN_IF_ERROR(not_negative("value_clip", o.value_clip));
  RETURN_IF_ERROR(CheckOption(o.dual_clip == 0 || o.dual_clip >= 1 + o.clip_high, "dual_clip",
                              "0 or at least 1 + clip_high", o.dual_clip));
  return CheckOption(o.denominator != LossDenominator::kConstant || o.constant_length > 0,
                     "constant_length", "a positive number", o.constant_length);
}

// Aborts unless the spans have T or no entries as SequenceInputs says.
void CheckSizes(const SequenceInputs& in, const SequenceGradients& out) {
  const size_t num_tokens = in.logprobs_T.size();
  const auto is_optional = [&](auto span) { return span.empty() || span.size() == num_tokens; };
  STRETTO_CHECK(in.behaviour_logprobs_T.size() == num_tokens);
  STRETTO_CHECK(out.d_logprobs_T.size() == num_tokens);
  STRETTO_CHECK(is_optional(out.d_entropies_T) && is_optional(out.d_values_T));
  for (const auto span : {in.reference_logprobs_T, in.entropies_T, in.proximal_logprobs_T,
                          in.advantages_T, in.values_T, in.old_values_T, in.returns_T}) {
    STRETTO_CHECK(is_optional(span));
  }
}

absl::Status CheckFinite(const SequenceInputs& in) {
  const std::pair<const char*, absl::Span<const float>> spans[] = {
      {"log-prob", in.logprobs_T},
      {"behaviour log-prob", in.behaviour_logprobs_T},
      {"reference log-prob", in.reference_logprobs_T},
      {"entropy", in.entropies_T},
      {"proximal log-prob", in.proximal_logprobs_T},
      {"advantage", in.advantages_T},
      {"value", in.values_T},
      {"old value", in.old_values_T},
      {"return", in.returns_T},
  };
  for (const auto& [what, values_T] : spans) {
    for (size_t t = 0; t < values_T.size(); ++t) {
      if (std::isfinite(values_T[t])) continue;
      return absl::InvalidArgumentError(absl::StrCat("sequence ", in.id, ", token ", t, ": ", what,
                                                     ": expected a finite number, found ",
                                                     values_T[t]));
    }
  }
  if (std::isfinite(in.advantage)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "sequence ", in.id, ": advantage: expected a finite number, found ", in.advantage));
}
}  // namespace

absl::StatusOr<LossDenominator> LossDenominatorByName(absl::string_view name) {
  if (name == "token_mean") return LossDenominator::kTokenMean;
  if (name == "sequence_mean") return LossDenominator::kSequenceMean;
  if (name == "constant") return LossDenominator::kConstant;
  if (name == "sequence_sum") return LossDenominator::kSequenceSum;
  return absl::InvalidArgumentError(
      absl::StrCat("loss denominator: expected one of token_mean, sequence_mean, constant, "
                   "sequence_sum, found '",
                   name, "'"));
}

absl::StatusOr<RatioLevel> RatioLevelByName(absl::string_view name) {
  if (name == "token") return RatioLevel::kToken;
  if (name == "sequence") return RatioLevel::kSequence;
  return absl::InvalidArgumentError(
      absl::StrCat("ratio level: expected one of token, sequence, found '", name, "'"));
}

void LossSums::Merge(const LossSums& other) {
  loss += other.loss;
  policy_loss += other.policy_loss;
  value_loss += other.value_loss;
  kl += other.kl;
  entropy += other.entropy;
  ratio += other.ratio;
  importance_weight += other.importance_weight;
  ratio_min = std::min(ratio_min, other.ratio_min);
  ratio_max = std::max(ratio_max, other.ratio_max);
  num_tokens += other.num_tokens;
  num_clipped_low += other.num_clipped_low;
  num_clipped_high += other.num_clipped_high;
  num_truncated += other.num_truncated;
  num_clipped_dual += other.num_clipped_dual;
  num_clipped_values += other.num_clipped_values;
  has_kl |= other.has_kl;
  has_entropy |= other.has_entropy;
  has_importance |= other.has_importance;
  has_dual |= other.has_dual;
  has_values |= other.has_values;
}

std::map<std::string, double> LossSums::Metrics() const {
  const double count = static_cast<double>(std::max<int64_t>(num_tokens, 1));
  const double low = static_cast<double>(num_clipped_low) / count;
  const double high = static_cast<double>(num_clipped_high) / count;
  std::map<std::string, double> metrics = {
      {"loss", loss},
      {"policy_loss", policy_loss},
      {"ratio_mean", ratio / count},
      {"ratio_min", ratio_min},
      {"ratio_max", ratio_max},
      {"clip_fraction", low + high},
      {"clip_fraction_low", low},
      {"clip_fraction_high", high},
  };
  if (has_kl) metrics["kl"] = kl / count;
  if (has_entropy) metrics["entropy"] = entropy / count;
  if (has_importance) {
    metrics["importance_weight_mean"] = importance_weight / count;
    metrics["truncated_fraction"] = static_cast<double>(num_truncated) / count;
  }
  if (has_dual) metrics["clip_fraction_dual"] = static_cast<double>(num_clipped_dual) / count;
  if (has_values) {
    metrics["value_loss"] = value_loss;
    metrics["value_clip_fraction"] = static_cast<double>(num_clipped_values) / count;
  }
  return metrics;
}

absl::StatusOr<LossSums> Objective::Evaluate(const SequenceInputs& in, const StepTotals& totals,
                                             const SequenceGradients& out) const {
  CheckSizes(in, out);
  if (in.logprobs_T.empty()) return LossSums();
  RETURN_IF_ERROR(CheckFinite(in));
  if (kind_->needs_values &&
      (in.values_T.empty() || in.old_values_T.empty() || in.returns_T.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", in.id, ": expected values, old values and returns of a critic"));
  }
  return kind_->loss(options_, in, totals, out);
}

absl::StatusOr<LossSums> EvaluateCritic(const ObjectiveOptions& options, const CriticInputs& in,
                                        const StepTotals& totals, absl::Span<float> d_values_T) {
  const size_t num_tokens = in.values_T.size();
  // The walk goes over log-probs, of which a critic has none.
  const std::vector<float> zeros(num_tokens, 0.0f);
  std::vector<float> d_logprobs(num_tokens);
  SequenceInputs walk;
  walk.logprobs_T = walk.behaviour_logprobs_T = zeros;
  walk.values_T = in.values_T;
  walk.old_values_T = in.old_values_T;
  walk.returns_T = in.returns_T;
  walk.id = in.id;
  const SequenceGradients out{
      .d_logprobs_T = absl::MakeSpan(d_logprobs), .d_entropies_T = {}, .d_values_T = d_values_T};
  CheckSizes(walk, out);
  STRETTO_CHECK(in.old_values_T.size() == num_tokens && in.returns_T.size() == num_tokens &&
                d_values_T.size() == num_tokens);
  if (num_tokens == 0) return LossSums();
  RETURN_IF_ERROR(CheckFinite(walk));
  return CriticLoss(options, walk, totals, out);
}

absl::StatusOr<Objective> MakeObjective(const std::string& name, const ObjectiveOptions& options) {
  const auto it = Registry().find(name);
  if (it == Registry().end()) {
    return absl::InvalidArgumentError(absl::StrCat("objective: expected one of ",
                                                   absl::StrJoin(ObjectiveNames(), ", "),
                                                   ", found '", name, "'"));
  }
  RETURN_IF_ERROR(CheckOptions(options));
  return Objective(&it->second, options);
}

std::vector<std::string> ObjectiveNames() {
  std::vector<std::string> names;
  for (const auto& entry : Registry()) names.push_back(entry.first);
  return names;
}
}  // namespace stretto::rl
