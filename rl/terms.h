// What the objectives share: the walk over a sequence's tokens, which adds the KL and entropy terms
// and weighs; ratios, the clipped surrogate and importance weights. An objective is a function that
// calls the walk with its own formula.
#pragma once

#include "absl/functional/function_ref.h"
#include "rl/objective.h"

namespace stretto::rl {
// One token's own part of the loss, unweighted, and its derivatives by log-prob and value.
struct TokenTerm {
  double loss = 0;
  double d_logprob = 0;
  double value_loss = 0;
  double d_value = 0;
};
using TermOfToken = absl::FunctionRef<TokenTerm(size_t t, LossSums& sums)>;

// The loss of the sequence: the sum over its tokens, in order, of the token's weight times (its
// term + kl_coef · KL − entropy_coef · entropy). Writes all gradients. `term` may count in `sums`.
LossSums WalkTokens(const ObjectiveOptions& options, const SequenceInputs& in,
                    const StepTotals& totals, const SequenceGradients& out, TermOfToken term);

// exp of a difference of log-probs, clamped to ±20.
struct Ratio {
  double value = 1;
  bool clamped = false;  // then its derivative is 0
};
Ratio ExpOfDifference(double logprob, double old_logprob);
// Counts a ratio for the metrics.
void CountRatio(double ratio, LossSums& sums);

// The log-prob that ratios are taken against: the behaviour's, or the proximal policy's where
// importance_cap is on.
double OldLogprob(const ObjectiveOptions& options, const SequenceInputs& in, size_t t);
// min(cap, exp(log_weight)), counted in `sums`; 1 where the cap is off. A constant for the
// gradient. (Truncated importance sampling; Espeholt et al., "IMPALA", 2018.)
double ImportanceWeight(const ObjectiveOptions& options, double log_weight, LossSums& sums);
// The token's advantage times its importance weight, that of proximal − behaviour log-prob.
double WeightedAdvantage(const ObjectiveOptions& options, const SequenceInputs& in, size_t t,
                         LossSums& sums);

// −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), for A < 0 at most −dual_clip·A, and its
// derivative by log r (Schulman et al., "Proximal Policy Optimization", 2017). Counted in `sums`.
struct Surrogate {
  double loss = 0;
  double d_log_ratio = 0;
};
Surrogate ClippedSurrogate(const ObjectiveOptions& options, const Ratio& ratio, double advantage,
                           LossSums& sums);

// The objectives, each in its own file. The sequence has tokens, and all its numbers are finite.
using SequenceLoss = LossSums(const ObjectiveOptions& options, const SequenceInputs& in,
                              const StepTotals& totals, const SequenceGradients& out);
SequenceLoss CriticLoss, GrpoLoss, PpoLoss, ReinforceLoss, RlooLoss, SupervisedLoss;
}  // namespace stretto::rl
