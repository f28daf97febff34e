// RLOO: the completion is one action (Ahmadian et al., "Back to Basics", 2024). Its ratio is that
// of the whole sequence, the product of its tokens' ratios, and it is clipped as one:
//   loss = −min(r·A, clip(r)·A),  r = exp(Σ logprob − Σ old logprob).
// The advantage is to be the reward less the mean of its siblings' (AdvantageScale::kLeaveOneOut).
// The step's loss is the mean over sequences, whatever `denominator` says; each token carries an
// equal share of its sequence's. KL and entropy terms and importance weights are those of the
// sequence, too: sums over its tokens, and one weight.
#include "rl/terms.h"

namespace stretto::rl {
LossSums RlooLoss(const ObjectiveOptions& options, const SequenceInputs& in,
                  const StepTotals& totals, const SequenceGradients& out) {
  ObjectiveOptions of_sequence = options;
  of_sequence.denominator = LossDenominator::kSequenceSum;
  const size_t num_tokens = in.logprobs_T.size();
  const double count = static_cast<double>(num_tokens);
  double log_ratio = 0, log_weight = 0, advantage = 0;
  for (size_t t = 0; t < num_tokens; ++t) {
    log_ratio += in.logprobs_T[t] - OldLogprob(options, in, t);
    log_weight += OldLogprob(options, in, t) - in.behaviour_logprobs_T[t];
    advantage += in.advantages_T.empty() ? in.advantage : in.advantages_T[t];
  }
  const Ratio ratio = ExpOfDifference(log_ratio, 0);
  return WalkTokens(of_sequence, in, totals, out, [&](size_t, LossSums& sums) {
    const double factor = ImportanceWeight(options, log_weight, sums) * (advantage / count);
    const Surrogate surrogate = ClippedSurrogate(options, ratio, factor, sums);
    return TokenTerm{.loss = surrogate.loss / count, .d_logprob = surrogate.d_log_ratio};
  });
}
}  // namespace stretto::rl
