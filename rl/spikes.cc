#include "rl/spikes.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace stretto::rl {
double SpikeThreshold(absl::Span<const double> norms, double factor) {
  const auto count = std::min<size_t>(norms.size(), kSpikeWindow);
  if (factor <= 0 || count < kSpikeMinSteps) return std::numeric_limits<double>::infinity();
  const absl::Span<const double> newest = norms.subspan(norms.size() - count);
  std::vector<double> sorted(newest.begin(), newest.end());
  std::sort(sorted.begin(), sorted.end());
  const double median =
      count % 2 == 1 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
  return factor * median;
}
}  // namespace stretto::rl
