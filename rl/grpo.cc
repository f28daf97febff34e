// GRPO: the clipped surrogate of PPO with the group's advantage (Schulman et al., 2017; Shao et
// al., 2024), with separate bounds below and above ("clip-higher"; Yu et al., "DAPO", 2025):
//   loss = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A),  r = exp(logprob − old logprob).
// The old log-prob is the behaviour's. With importance_cap on, the ratio is taken against the
// proximal policy instead and the term weighed by the truncated importance weight of the behaviour
// (decoupled objective; Hilton et al., "Batch size-invariance for policy optimization", 2022).
#include <algorithm>

#include "rl/terms.h"

namespace stretto::rl {
namespace {
class Grpo : public Objective {
 public:
  explicit Grpo(const ObjectiveOptions& options) : options_(options) {}

  LossSums Evaluate(const SequenceInputs& in, const StepTotals& totals,
                    const SequenceGradients& out) const override {
    CheckSizes(in, out);
    LossSums sums;
    if (in.logprobs_T.empty()) return sums;
    const double weight = TokenWeight(options_.denominator, totals, in.logprobs_T.size());
    for (size_t t = 0; t < in.logprobs_T.size(); ++t) {
      AddToken(options_, in, t, weight, Policy(in, t, &sums), out, &sums);
    }
    return sums;
  }

 private:
  PolicyTerm Policy(const SequenceInputs& in, size_t t, LossSums* sums) const {
    const double importance = ImportanceWeight(options_, in, t, sums);
    float old_logprob = in.behaviour_logprobs_T[t];
    if (options_.importance_cap > 0) {
      old_logprob = in.proximal_logprobs_T.empty() ? in.logprobs_T[t] : in.proximal_logprobs_T[t];
    }
    const Ratio ratio = ExpOfDifference(in.logprobs_T[t], old_logprob);
    sums->ratio += ratio.value;
    sums->ratio_min = std::min(sums->ratio_min, ratio.value);
    sums->ratio_max = std::max(sums->ratio_max, ratio.value);
    // The clip binds only where it makes the objective smaller: from above for positive advantages,
    // from below for negative ones.
    const double low = 1 - options_.clip_low, high = 1 + options_.clip_high;
    const double factor = importance * in.advantage;
    if (in.advantage > 0 && ratio.value > high) {
      sums->num_clipped_high += 1;
      return {.loss = -high * factor, .d_logprob = 0};
    }
    if (in.advantage < 0 && ratio.value < low) {
      sums->num_clipped_low += 1;
      return {.loss = -low * factor, .d_logprob = 0};
    }
    return {.loss = -ratio.value * factor,
            .d_logprob = ratio.clamped ? 0.0 : -ratio.value * factor};
  }

  const ObjectiveOptions options_;
};
}  // namespace

std::unique_ptr<Objective> MakeGrpo(const ObjectiveOptions& options) {
  return std::make_unique<Grpo>(options);
}
}  // namespace stretto::rl
