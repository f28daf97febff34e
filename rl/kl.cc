#include "rl/kl.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace stretto::rl {
absl::StatusOr<KlEstimator> KlEstimatorByName(absl::string_view name) {
  if (name == "k1") return KlEstimator::kK1;
  if (name == "k2") return KlEstimator::kK2;
  if (name == "k3") return KlEstimator::kK3;
  return absl::InvalidArgumentError(
      absl::StrCat("KL estimator: expected one of k1, k2, k3, found '", name, "'"));
}

KlTerm EstimateKl(KlEstimator estimator, double logprob, double reference_logprob) {
  const double x = reference_logprob - logprob;
  switch (estimator) {
    case KlEstimator::kK1:
      return {.value = -x, .d_logprob = 1};
    case KlEstimator::kK2:
      return {.value = 0.5 * x * x, .d_logprob = -x};
    case KlEstimator::kK3:
      break;
  }
  constexpr double kLimit = 20;
  // Comparisons are written so that a NaN passes through instead of being clamped away.
  const double clamped = x > kLimit ? kLimit : x < -kLimit ? -kLimit : x;
  const double expm1 = std::expm1(clamped);
  return {.value = expm1 - clamped, .d_logprob = clamped == x ? -expm1 : 0.0 * x};
}

double KlController::Next(double kl_coef, double measured_kl, double num_rollouts) const {
  if (target <= 0 || !std::isfinite(measured_kl)) return kl_coef;
  const double error = std::clamp(measured_kl / target - 1, -0.2, 0.2);
  return kl_coef * (1 + error * num_rollouts / horizon);
}
}  // namespace stretto::rl
