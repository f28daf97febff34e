#include "rl/advantages.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace stretto::rl {
absl::StatusOr<AdvantageScale> AdvantageScaleByName(absl::string_view name) {
  if (name == "std") return AdvantageScale::kStd;
  if (name == "none") return AdvantageScale::kNone;
  if (name == "leave_one_out") return AdvantageScale::kLeaveOneOut;
  return absl::InvalidArgumentError(absl::StrCat(
      "advantage scale: expected one of std, none, leave_one_out, found '", name, "'"));
}

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
  if (scale == AdvantageScale::kLeaveOneOut) {
    for (double& a : advantages) a *= count / (count - 1);
    return;
  }
  const double scale_by = std::sqrt(squares / (count - 1)) + 1e-4;
  for (double& a : advantages) a /= scale_by;
}

void Whiten(bool shift_mean, absl::Span<double> values) {
  const double count = static_cast<double>(values.size());
  double sum = 0;
  for (const double v : values) sum += v;
  const double mean = sum / count;
  double squares = 0;
  for (const double v : values) squares += (v - mean) * (v - mean);
  const bool has_spread =
      std::any_of(values.begin(), values.end(), [&](double v) { return v != values[0]; });
  if (!has_spread) {
    if (shift_mean) std::fill(values.begin(), values.end(), 0.0);
    return;
  }
  const double scale_by = 1 / std::sqrt(squares / (count - 1) + 1e-8);
  for (double& v : values) v = (v - mean) * scale_by + (shift_mean ? 0.0 : mean);
}

double BatchScale(absl::Span<const double> advantages) {
  double squares = 0;
  for (const double a : advantages) squares += a * a;
  if (squares == 0) return 1;
  return std::sqrt(squares / static_cast<double>(advantages.size()) + 1e-8);
}
}  // namespace stretto::rl
