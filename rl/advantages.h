// Advantages of a group: how much better each completion did than its siblings (GRPO; Shao et al.,
// "DeepSeekMath", 2024, section 4.1).
#pragma once

#include "absl/types/span.h"

namespace stretto::rl {
enum class AdvantageScale {
  kStd,   // (r − mean) / (std + 1e-4), with the sample standard deviation (n − 1)
  kNone,  // r − mean ("Dr. GRPO"; Liu et al., "Understanding R1-Zero-Like Training", 2025)
};

// advantages[i] of rewards[i]; both have the group's size. Rewards are finite. Equal rewards give
// exactly 0. A group of one has no siblings to compare with: its advantage is its reward.
// Sums run in index order, in double.
void GroupAdvantages(absl::Span<const double> rewards, AdvantageScale scale,
                     absl::Span<double> advantages);
}  // namespace stretto::rl
