// Gradients that spike: how large the norm of a step's gradient may be, given the steps before it.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace stretto::rl {
// Steps that are looked back at, and the fewest that say anything.
inline constexpr int64_t kSpikeWindow = 64, kSpikeMinSteps = 8;

// `factor` times the median of the newest kSpikeWindow norms (in order of steps; all finite).
// Infinity while there are fewer than kSpikeMinSteps, or with a factor of 0.
double SpikeThreshold(absl::Span<const double> norms, double factor);
}  // namespace stretto::rl
