// Supervised: the negative log-likelihood of the tokens, loss = −logprob. Advantages and behaviour
// log-probs play no part.
#include "rl/terms.h"

namespace stretto::rl {
LossSums SupervisedLoss(const ObjectiveOptions& options, const SequenceInputs& in,
                        const StepTotals& totals, const SequenceGradients& out) {
  return WalkTokens(options, in, totals, out, [&](size_t t, LossSums& sums) {
    CountRatio(1, sums);
    return TokenTerm{.loss = -double{in.logprobs_T[t]}, .d_logprob = -1};
  });
}
}  // namespace stretto::rl
