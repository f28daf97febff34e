// Per-token estimators of KL(policy || reference) from the log-probs of a sampled token (Schulman,
// "Approximating KL Divergence", 2020), and the adaptive controller of its weight (Ziegler et al.,
// "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2).
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::rl {
enum class KlEstimator { kK1, kK2, kK3 };
absl::StatusOr<KlEstimator> KlEstimatorByName(absl::string_view name);  // "k1", "k2", "k3"

struct KlTerm {
  double value = 0;
  double d_logprob = 0;  // derivative by the policy's log-prob
};

// With x = reference − policy: k1 = −x, k2 = x²/2, k3 = exp(x) − 1 − x. x is clamped to ±20 where
// it is exponentiated, and the derivative is that of the clamped function. As a loss term k1 has no
// gradient in expectation; it is meant for measuring.
KlTerm EstimateKl(KlEstimator estimator, double logprob, double reference_logprob);

// kl_coef ← kl_coef · (1 + clip(kl/target − 1, ±0.2) · num_rollouts / horizon). A plain value: the
// coordinator journals the coefficient of each step.
struct KlController {
  double target = 0;   // 0: the coefficient is fixed
  double horizon = 1;  // rollouts
  // The coefficient of the next step, given what was measured in this one (nats per token).
  double Next(double kl_coef, double measured_kl, double num_rollouts) const;
};
}  // namespace stretto::rl
