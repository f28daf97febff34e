// REINFORCE with the group's baseline (Williams, 1992): loss = −w·A·logprob, w the truncated
// importance weight where importance_cap is on, else 1. With advantages scaled over the batch it is
// what "REINFORCE++" (Hu, 2025) takes on fresh data.
#include "rl/terms.h"

namespace stretto::rl {
LossSums ReinforceLoss(const ObjectiveOptions& options, const SequenceInputs& in,
                       const StepTotals& totals, const SequenceGradients& out) {
  return WalkTokens(options, in, totals, out, [&](size_t t, LossSums& sums) {
    const double factor = WeightedAdvantage(options, in, t, sums);
    CountRatio(ExpOfDifference(in.logprobs_T[t], in.behaviour_logprobs_T[t]).value, sums);
    return TokenTerm{.loss = -factor * in.logprobs_T[t], .d_logprob = -factor};
  });
}
}  // namespace stretto::rl
