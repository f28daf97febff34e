// GRPO: the clipped surrogate with the group's advantage (Shao et al., "DeepSeekMath", 2024), with
// separate bounds below and above ("clip-higher"; Yu et al., "DAPO", 2025):
//   loss = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A),  r = exp(logprob − old logprob).
// The old log-prob is the behaviour's. With importance_cap on, the ratio is taken against the
// proximal policy instead and the term weighed by the truncated importance weight of the behaviour
// (decoupled objective; Hilton et al., "Batch size-invariance for policy optimization", 2022).
// With ratio_level kSequence every token has the ratio exp(mean of logprob − old logprob).
#include "rl/terms.h"

namespace stretto::rl {
namespace {
LossSums TokenLevel(const ObjectiveOptions& options, const SequenceInputs& in,
                    const StepTotals& totals, const SequenceGradients& out) {
  return WalkTokens(options, in, totals, out, [&](size_t t, LossSums& sums) {
    const double advantage = WeightedAdvantage(options, in, t, sums);
    const Ratio ratio = ExpOfDifference(in.logprobs_T[t], OldLogprob(options, in, t));
    const Surrogate surrogate = ClippedSurrogate(options, ratio, advantage, sums);
    return TokenTerm{.loss = surrogate.loss, .d_logprob = surrogate.d_log_ratio};
  });
}

// Every log-prob moves the ratio of every token, by 1/T: its derivative is the tokens' mean.
LossSums SequenceLevel(const ObjectiveOptions& options, const SequenceInputs& in,
                       const StepTotals& totals, const SequenceGradients& out) {
  const size_t num_tokens = in.logprobs_T.size();
  const double count = static_cast<double>(num_tokens);
  double log_ratio = 0;
  for (size_t t = 0; t < num_tokens; ++t) {
    log_ratio += in.logprobs_T[t] - OldLogprob(options, in, t);
  }
  const Ratio ratio = ExpOfDifference(log_ratio / count, 0);
  const auto surrogate = [&](size_t t, LossSums& sums) {
    return ClippedSurrogate(options, ratio, WeightedAdvantage(options, in, t, sums), sums);
  };
  double d_log_ratio = 0;
  LossSums ignored;
  for (size_t t = 0; t < num_tokens; ++t) d_log_ratio += surrogate(t, ignored).d_log_ratio;
  return WalkTokens(options, in, totals, out, [&](size_t t, LossSums& sums) {
    return TokenTerm{.loss = surrogate(t, sums).loss, .d_logprob = d_log_ratio / count};
  });
}
}  // namespace

LossSums GrpoLoss(const ObjectiveOptions& options, const SequenceInputs& in,
                  const StepTotals& totals, const SequenceGradients& out) {
  return options.ratio_level == RatioLevel::kToken ? TokenLevel(options, in, totals, out)
                                                   : SequenceLevel(options, in, totals, out);
}
}  // namespace stretto::rl
