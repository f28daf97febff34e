#include "rl/terms.h"

#include <cmath>

#include "base/check.h"

namespace stretto::rl {
void CheckSizes(const SequenceInputs& in, const SequenceGradients& out) {
  const size_t num_tokens = in.logprobs_T.size();
  const auto is_optional = [&](auto span) { return span.empty() || span.size() == num_tokens; };
  STRETTO_CHECK(in.behaviour_logprobs_T.size() == num_tokens);
  STRETTO_CHECK(is_optional(in.reference_logprobs_T));
  STRETTO_CHECK(is_optional(in.entropies_T));
  STRETTO_CHECK(is_optional(in.proximal_logprobs_T));
  STRETTO_CHECK(out.d_logprobs_T.size() == num_tokens);
  STRETTO_CHECK(is_optional(out.d_entropies_T));
}

double TokenWeight(LossDenominator denominator, const StepTotals& totals, size_t num_tokens) {
  if (denominator == LossDenominator::kTokenMean) {
    STRETTO_CHECK(totals.num_tokens > 0);
    return 1.0 / static_cast<double>(totals.num_tokens);
  }
  STRETTO_CHECK(totals.num_sequences > 0);
  return 1.0 / (static_cast<double>(totals.num_sequences) * static_cast<double>(num_tokens));
}

Ratio ExpOfDifference(double logprob, double old_logprob) {
  constexpr double kLimit = 20;
  const double x = logprob - old_logprob;
  if (x > kLimit) return {.value = std::exp(kLimit), .clamped = true};
  if (x < -kLimit) return {.value = std::exp(-kLimit), .clamped = true};
  return {.value = std::exp(x), .clamped = false};
}

double ImportanceWeight(const ObjectiveOptions& options, const SequenceInputs& in, size_t t,
                        LossSums* sums) {
  if (options.importance_cap <= 0) return 1;
  const float proximal =
      in.proximal_logprobs_T.empty() ? in.logprobs_T[t] : in.proximal_logprobs_T[t];
  const double raw = ExpOfDifference(proximal, in.behaviour_logprobs_T[t]).value;
  const bool truncated = raw > options.importance_cap;
  const double weight = truncated ? options.importance_cap : raw;
  sums->has_importance = true;
  sums->importance_weight += weight;
  sums->num_truncated += truncated ? 1 : 0;
  return weight;
}

void AddToken(const ObjectiveOptions& options, const SequenceInputs& in, size_t t, double weight,
              const PolicyTerm& policy, const SequenceGradients& out, LossSums* sums) {
  double loss = policy.loss;
  double d_logprob = policy.d_logprob;
  if (!in.reference_logprobs_T.empty()) {
    const KlTerm kl =
        EstimateKl(options.kl_estimator, in.logprobs_T[t], in.reference_logprobs_T[t]);
    sums->has_kl = true;
    sums->kl += kl.value;
    loss += options.kl_coef * kl.value;
    d_logprob += options.kl_coef * kl.d_logprob;
  }
  if (!in.entropies_T.empty()) {
    sums->has_entropy = true;
    sums->entropy += in.entropies_T[t];
    loss -= options.entropy_coef * in.entropies_T[t];
  }
  sums->loss += weight * loss;
  sums->policy_loss += weight * policy.loss;
  sums->num_tokens += 1;
  out.d_logprobs_T[t] = static_cast<float>(weight * d_logprob);
  if (!out.d_entropies_T.empty()) {
    out.d_entropies_T[t] =
        in.entropies_T.empty() ? 0.0f : static_cast<float>(-weight * options.entropy_coef);
  }
}
}  // namespace stretto::rl
