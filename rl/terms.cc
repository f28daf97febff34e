#include "rl/terms.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace stretto::rl {
namespace {
// The weight of each token of this sequence in the step's loss.
double TokenWeight(const ObjectiveOptions& options, const StepTotals& totals, size_t num_tokens) {
  STRETTO_CHECK(totals.num_tokens > 0 && totals.num_sequences > 0);
  const double num_sequences = static_cast<double>(totals.num_sequences);
  switch (options.denominator) {
    case LossDenominator::kTokenMean:
      return 1.0 / static_cast<double>(totals.num_tokens);
    case LossDenominator::kSequenceMean:
      return 1.0 / (num_sequences * static_cast<double>(num_tokens));
    case LossDenominator::kConstant:
      return 1.0 / (num_sequences * options.constant_length);
    case LossDenominator::kSequenceSum:
      break;
  }
  return 1.0 / num_sequences;
}

void AddToken(const ObjectiveOptions& options, const SequenceInputs& in, size_t t, double weight,
              const TokenTerm& term, const SequenceGradients& out, LossSums& sums) {
  double loss = term.loss;
  double d_logprob = term.d_logprob;
  if (!in.reference_logprobs_T.empty()) {
    const KlTerm kl =
        EstimateKl(options.kl_estimator, in.logprobs_T[t], in.reference_logprobs_T[t]);
    sums.has_kl = true;
    sums.kl += kl.value;
    loss += options.kl_coef * kl.value;
    d_logprob += options.kl_coef * kl.d_logprob;
  }
  if (!in.entropies_T.empty()) {
    sums.has_entropy = true;
    sums.entropy += in.entropies_T[t];
    loss -= options.entropy_coef * in.entropies_T[t];
  }
  loss += term.value_loss;
  sums.loss += weight * loss;
  sums.policy_loss += weight * term.loss;
  sums.value_loss += weight * term.value_loss;
  sums.num_tokens += 1;
  out.d_logprobs_T[t] = static_cast<float>(weight * d_logprob);
  if (!out.d_entropies_T.empty()) {
    out.d_entropies_T[t] =
        in.entropies_T.empty() ? 0.0f : static_cast<float>(-weight * options.entropy_coef);
  }
  if (!out.d_values_T.empty()) out.d_values_T[t] = static_cast<float>(weight * term.d_value);
}
}  // namespace

LossSums WalkTokens(const ObjectiveOptions& options, const SequenceInputs& in,
                    const StepTotals& totals, const SequenceGradients& out, TermOfToken term) {
  LossSums sums;
  const double weight = TokenWeight(options, totals, in.logprobs_T.size());
  for (size_t t = 0; t < in.logprobs_T.size(); ++t) {
    AddToken(options, in, t, weight, term(t, sums), out, sums);
  }
  return sums;
}

Ratio ExpOfDifference(double logprob, double old_logprob) {
  constexpr double kLimit = 20;
  const double x = logprob - old_logprob;
  if (x > kLimit) return {.value = std::exp(kLimit), .clamped = true};
  if (x < -kLimit) return {.value = std::exp(-kLimit), .clamped = true};
  return {.value = std::exp(x), .clamped = false};
}

void CountRatio(double ratio, LossSums& sums) {
  sums.ratio += ratio;
  sums.ratio_min = std::min(sums.ratio_min, ratio);
  sums.ratio_max = std::max(sums.ratio_max, ratio);
}

double OldLogprob(const ObjectiveOptions& options, const SequenceInputs& in, size_t t) {
  if (options.importance_cap <= 0) return in.behaviour_logprobs_T[t];
  return in.proximal_logprobs_T.empty() ? in.logprobs_T[t] : in.proximal_logprobs_T[t];
}

double ImportanceWeight(const ObjectiveOptions& options, double log_weight, LossSums& sums) {
  if (options.importance_cap <= 0) return 1;
  const double raw = ExpOfDifference(log_weight, 0).value;
  const bool truncated = raw > options.importance_cap;
  const double weight = truncated ? options.importance_cap : raw;
  sums.has_importance = true;
  sums.importance_weight += weight;
  sums.num_truncated += truncated ? 1 : 0;
  return weight;
}

double WeightedAdvantage(const ObjectiveOptions& options, const SequenceInputs& in, size_t t,
                         LossSums& sums) {
  const double advantage = in.advantages_T.empty() ? in.advantage : in.advantages_T[t];
  const double log_weight = OldLogprob(options, in, t) - in.behaviour_logprobs_T[t];
  return ImportanceWeight(options, log_weight, sums) * advantage;
}

Surrogate ClippedSurrogate(const ObjectiveOptions& options, const Ratio& ratio, double advantage,
                           LossSums& sums) {
  CountRatio(ratio.value, sums);
  sums.has_dual |= options.dual_clip > 0;
  // The clip binds only where it makes the objective smaller: from above for positive advantages,
  // from below for negative ones. The dual clip does the opposite, for these alone.
  const double low = 1 - options.clip_low, high = 1 + options.clip_high;
  if (advantage > 0 && ratio.value > high) {
    sums.num_clipped_high += 1;
    return {.loss = -high * advantage, .d_log_ratio = 0};
  }
  if (advantage < 0 && ratio.value < low) {
    sums.num_clipped_low += 1;
    return {.loss = -low * advantage, .d_log_ratio = 0};
  }
  if (advantage < 0 && options.dual_clip > 0 && ratio.value > options.dual_clip) {
    sums.num_clipped_dual += 1;
    return {.loss = -options.dual_clip * advantage, .d_log_ratio = 0};
  }
  return {.loss = -ratio.value * advantage,
          .d_log_ratio = ratio.clamped ? 0.0 : -ratio.value * advantage};
}
}  // namespace stretto::rl
