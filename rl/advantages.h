// Advantages: how much better each completion did than its siblings.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace stretto::rl {
// Of a reward within the rewards of its group of n.
enum class AdvantageScale {
  // (r − mean) / (std + 1e-4), with the sample standard deviation (n − 1) ("GRPO"; Shao et al.,
  // "DeepSeekMath", 2024, section 4.1)
  kStd,
  kNone,  // r − mean ("Dr. GRPO"; Liu et al., "Understanding R1-Zero-Like Training", 2025)
  // r − mean of the others = n/(n − 1) · (r − mean) ("RLOO"; Ahmadian et al., "Back to Basics",
  // 2024)
  kLeaveOneOut,
};
absl::StatusOr<AdvantageScale> AdvantageScaleByName(
    absl::string_view name);  // "std", "none", "leave_one_out"

// advantages[i] of rewards[i]; both have the group's size. Rewards are finite. Equal rewards give
// exactly 0. A group of one has no siblings to compare with: its advantage is its reward.
// Sums run in index order, in double.
void GroupAdvantages(absl::Span<const double> rewards, AdvantageScale scale,
                     absl::Span<double> advantages);

// values ← (values − mean) / sqrt(variance + 1e-8), with the sample variance (n − 1), over all of a
// batch; the mean is kept where `shift_mean` is false. Fewer than two values, or equal ones, have
// no spread: they become 0 (or stay). Finite values; sums run in index order, in double.
void Whiten(bool shift_mean, absl::Span<double> values);

// What divides the advantages of a batch so that they have a variance of about 1, groups without a
// spread included ("REINFORCE++-baseline"; Hu, 2025): sqrt(mean square + 1e-8). The mean of group
// advantages is 0 but for rounding, and is left so: 0 stays 0. 1 if all are 0.
double BatchScale(absl::Span<const double> advantages);
}  // namespace stretto::rl
