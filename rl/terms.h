// What the objectives share: token weights, KL and entropy terms, importance weights.
#pragma once

#include "rl/objective.h"

namespace stretto::rl {
// Aborts unless the spans have T or no entries as SequenceInputs says.
void CheckSizes(const SequenceInputs& in, const SequenceGradients& out);

// The weight of each token of this sequence in the step's loss.
double TokenWeight(LossDenominator denominator, const StepTotals& totals, size_t num_tokens);

// exp of a difference of log-probs, clamped to ±20; NaN stays NaN.
struct Ratio {
  double value = 1;
  bool clamped = false;  // then its derivative is 0
};
Ratio ExpOfDifference(double logprob, double old_logprob);

// The policy term of one token: its loss and the derivative by the token's log-prob.
struct PolicyTerm {
  double loss = 0;
  double d_logprob = 0;
};

// min(cap, exp(proximal − behaviour)) of token t, counted in `sums`; 1 where the cap is off. A
// constant for the gradient. (Truncated importance sampling; Espeholt et al., "IMPALA", 2018.)
double ImportanceWeight(const ObjectiveOptions& options, const SequenceInputs& in, size_t t,
                        LossSums* sums);

// Adds token t to the loss: the policy term plus kl_coef · KL minus entropy_coef · entropy, all
// weighted; writes the token's gradients.
void AddToken(const ObjectiveOptions& options, const SequenceInputs& in, size_t t, double weight,
              const PolicyTerm& policy, const SequenceGradients& out, LossSums* sums);

std::unique_ptr<Objective> MakeGrpo(const ObjectiveOptions& options);
std::unique_ptr<Objective> MakeReinforce(const ObjectiveOptions& options);
std::unique_ptr<Objective> MakeSupervised(const ObjectiveOptions& options);
}  // namespace stretto::rl
