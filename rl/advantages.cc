#include "rl/advantages.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace stretto::rl {
void GroupAdvantages(absl::Span<const double> rewards, AdvantageScale scale,
                     absl::Span<double> advantages) {
  STRETTO_CHECK(rewards.size() == advantages.size());
  if (rewards.size() <= 1) {
    std::copy(rewards.begin(), rewards.end(), advantages.begin());
    return;
  }
  // The mean of equal numbers need not be that number in floating point; 0 must be 0.
  const bool all_equal =
      std::all_of(rewards.begin(), rewards.end(), [&](double r) { return r == rewards[0]; });
  if (all_equal) {
    std::fill(advantages.begin(), advantages.end(), 0.0);
    return;
  }
  const double count = static_cast<double>(rewards.size());
  double sum = 0;
  for (const double r : rewards) sum += r;
  const double mean = sum / count;
  double squares = 0;
  for (size_t i = 0; i < rewards.size(); ++i) {
    advantages[i] = rewards[i] - mean;
    squares += advantages[i] * advantages[i];
  }
  if (scale == AdvantageScale::kNone) return;
  const double scale_by = std::sqrt(squares / (count - 1)) + 1e-4;
  for (double& a : advantages) a /= scale_by;
}
}  // namespace stretto::rl
