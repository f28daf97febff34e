#include "services/coordinator/epoch_order.h"

#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/philox.h"

namespace stretto::services {
namespace {
// Separates the shuffle's random numbers from those of sampling (stream 0).
constexpr uint64_t kShuffleStream = 0x73687566666c65;
}  // namespace

EpochOrder::EpochOrder(uint64_t num_lines, uint64_t seed, bool shuffle)
    : num_lines_(num_lines), seed_(seed), shuffle_(shuffle) {
  STRETTO_CHECK(num_lines > 0);
}

DatasetPlace EpochOrder::At(uint64_t position) {
  const uint64_t epoch = position / num_lines_;
  const uint64_t rank = position % num_lines_;
  if (!shuffle_) return {static_cast<uint32_t>(epoch), rank};
  if (epoch != cached_epoch_) {
    order_.resize(num_lines_);
    std::iota(order_.begin(), order_.end(), uint64_t{0});
    PhiloxStream random(seed_, kShuffleStream + epoch);
    for (uint64_t i = num_lines_; i > 1; --i) std::swap(order_[i - 1], order_[random.Below(i)]);
    cached_epoch_ = epoch;
  }
  return {static_cast<uint32_t>(epoch), order_[rank]};
}
}  // namespace stretto::services
