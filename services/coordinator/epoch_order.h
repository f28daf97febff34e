// The order in which a run goes through its dataset: position p of the stream is line
// At(p).index of pass At(p).epoch. A pure function of (lines, seed, shuffle).
#pragma once

#include <cstdint>
#include <vector>

namespace stretto::services {
struct DatasetPlace {
  uint32_t epoch = 0;
  uint64_t index = 0;
  bool operator==(const DatasetPlace&) const = default;
};

// Not thread-safe (keeps the last epoch's order).
class EpochOrder {
 public:
  // num_lines ≥ 1.
  EpochOrder(uint64_t num_lines, uint64_t seed, bool shuffle);
  DatasetPlace At(uint64_t position);

 private:
  const uint64_t num_lines_, seed_;
  const bool shuffle_;
  uint64_t cached_epoch_ = ~uint64_t{0};
  std::vector<uint64_t> order_;
};
}  // namespace stretto::services
