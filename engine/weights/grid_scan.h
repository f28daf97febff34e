// The walks over bf16 elements that make and apply a delta: which of them changed, and how likely
// that was. Integers alone, the same on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace stretto::engine {
// How readily an element changes, by its exponent: kNumClasses of them end with the exponent
// first_exponent + kNumClasses − 1; smaller ones belong to the first class, larger ones to the
// last. A hazard of kHalfLife is a probability of 1/2 not to change, twice that of 1/4.
inline constexpr int kNumClasses = 16;
inline constexpr uint32_t kHalfLife = 1u << 13;
inline constexpr uint32_t kMostHazard = (1u << 16) - 1;
struct Hazards {
  uint8_t first_exponent = 0;
  uint8_t low[kNumClasses] = {}, high[kNumClasses] = {};  // bytes of a hazard

  int ClassOf(uint16_t bits) const {
    const int exponent = bits >> 7 & 0xff;
    const int c = exponent - first_exponent;
    return c < 0 ? 0 : (c < kNumClasses ? c : kNumClasses - 1);
  }
  uint32_t OfClass(int c) const { return low[c] | uint32_t{high[c]} << 8; }
  void SetClass(int c, uint32_t hazard) {
    low[c] = static_cast<uint8_t>(hazard);
    high[c] = static_cast<uint8_t>(hazard >> 8);
  }
  uint32_t Of(uint16_t bits) const { return OfClass(ClassOf(bits)); }
};

// Appends begin + i for every i with base[i] != next[i].
void FindChanges(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next, size_t begin,
                 std::vector<uint32_t>& changed);

// The sum of the elements' hazards.
uint64_t SumHazards(const Hazards& hazards, absl::Span<const uint16_t> elements);

// The first element whose hazard is more than what is left of `rest` after those before it, which
// are taken from `rest`; the number of elements where there is none.
size_t WalkHazards(const Hazards& hazards, absl::Span<const uint16_t> elements, uint64_t& rest);
}  // namespace stretto::engine
