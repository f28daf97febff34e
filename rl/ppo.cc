// PPO with a critic (Schulman et al., "Proximal Policy Optimization", 2017): the clipped surrogate
// with each token's own advantage (rl/gae.h), and half the squared error of the value, of which the
// clipped value's counts where it is larger:
//   value_loss = value_coef · ½·max((v − R)², (clip(v, v_old ± value_clip) − R)²).
// A batch is trained on for several epochs of mini-batches (rl/mini_batches.h).
#include <algorithm>

#include "rl/terms.h"

namespace stretto::rl {
namespace {
void AddValueTerm(const ObjectiveOptions& options, const SequenceInputs& in, size_t t,
                  LossSums& sums, TokenTerm& term) {
  const double value = in.values_T[t], target = in.returns_T[t], old_value = in.old_values_T[t];
  double error = value - target;
  term.d_value = options.value_coef * error;
  if (options.value_clip > 0) {
    const double clipped =
        std::clamp(value, old_value - options.value_clip, old_value + options.value_clip) - target;
    if (clipped * clipped > error * error) {  // then the value lies outside, and does not move
      error = clipped;
      term.d_value = 0;
      sums.num_clipped_values += 1;
    }
  }
  term.value_loss = options.value_coef * 0.5 * error * error;
  sums.has_values = true;
}
}  // namespace

LossSums PpoLoss(const ObjectiveOptions& options, const SequenceInputs& in,
                 const StepTotals& totals, const SequenceGradients& out) {
  return WalkTokens(options, in, totals, out, [&](size_t t, LossSums& sums) {
    const double advantage = WeightedAdvantage(options, in, t, sums);
    const Ratio ratio = ExpOfDifference(in.logprobs_T[t], OldLogprob(options, in, t));
    const Surrogate surrogate = ClippedSurrogate(options, ratio, advantage, sums);
    TokenTerm term{.loss = surrogate.loss, .d_logprob = surrogate.d_log_ratio};
    AddValueTerm(options, in, t, sums, term);
    return term;
  });
}

LossSums CriticLoss(const ObjectiveOptions& options, const SequenceInputs& in,
                    const StepTotals& totals, const SequenceGradients& out) {
  return WalkTokens(options, in, totals, out, [&](size_t t, LossSums& sums) {
    TokenTerm term;
    AddValueTerm(options, in, t, sums, term);
    return term;
  });
}
}  // namespace stretto::rl
