// The probability of a change within a stretch of elements, by its hazard (grid_scan.h), as a
// frequency of the range coder; and back. From integers alone.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/weights/grid_scan.h"

namespace stretto::engine {
inline constexpr int kFrequencyBits = 24;

class ChangeTable {
 public:
  // Stretches have at most this; beyond it the frequency of one element could be 0.
  static constexpr uint32_t kMostOfStretch = 10 * kHalfLife;

  static const ChangeTable& Get() {
    static const ChangeTable& table = *new ChangeTable;
    return table;
  }
  // 1 − 2^(−x/kHalfLife); x up to kMostOfStretch.
  uint32_t operator[](uint32_t x) const { return table_[x]; }
  // The largest x with table[x] <= at.
  uint32_t Find(uint32_t at) const {
    uint32_t x = coarse_[at >> kCoarseShift];
    x += table_[x + 1] <= at ? 1 : 0;  // as likely as not, and mostly the last step
    while (table_[x + 1] <= at) ++x;
    return x;
  }

 private:
  ChangeTable() : table_(kMostOfStretch + 2), coarse_(1 << kCoarseBits) {
    constexpr uint64_t kFactor = 18445183311048607332u;  // 2^64 · 2^(−1/kHalfLife), rounded
    uint64_t power = ~uint64_t{0};
    for (uint32_t x = 0; x <= kMostOfStretch; ++x) {
      table_[x] = static_cast<uint32_t>((~power) >> (64 - kFrequencyBits));
      power = static_cast<uint64_t>((static_cast<unsigned __int128>(power) * kFactor) >> 64);
    }
    table_[kMostOfStretch + 1] = ~uint32_t{0};
    uint32_t x = 0;
    for (uint32_t i = 0; i < coarse_.size(); ++i) {
      while (table_[x + 1] <= i << kCoarseShift) ++x;
      coarse_[i] = x;
    }
  }
  static constexpr int kCoarseBits = 14, kCoarseShift = kFrequencyBits - kCoarseBits;
  std::vector<uint32_t> table_, coarse_;
};
}  // namespace stretto::engine
