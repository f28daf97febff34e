#include "rl/mini_batches.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/philox.h"

namespace stretto::rl {
std::vector<std::vector<int64_t>> PlanMiniBatches(int64_t num_sequences,
                                                  const MiniBatchOptions& options) {
  STRETTO_CHECK(options.size >= 1 && options.num_epochs >= 1 && num_sequences >= 0);
  std::vector<std::vector<int64_t>> batches;
  PhiloxStream random(options.seed, options.step);
  std::vector<int64_t> order(static_cast<size_t>(num_sequences));
  for (int64_t epoch = 0; epoch < options.num_epochs; ++epoch) {
    std::iota(order.begin(), order.end(), int64_t{0});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
    for (int64_t begin = 0; begin < num_sequences; begin += options.size) {
      const int64_t end = std::min(begin + options.size, num_sequences);
      batches.emplace_back(order.begin() + begin, order.begin() + end);
    }
  }
  return batches;
}
}  // namespace stretto::rl
