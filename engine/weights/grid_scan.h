// The walks over bf16 elements that make and apply a delta: which of them changed, and how likely
// that was. Integers alone, the same on every instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace stretto::engine {
// Elements belong to classes by their exponent: kNumClasses of them end with the exponent
// first_exponent + kNumClasses − 1; smaller ones (zero among them) belong to the first class,
// larger ones to the last. A class has a hazard, −log2(probability to stay) in units of
// 1/kHalfLife, or is dense: it changes so readily that nothing is gained by skipping its elements.
inline constexpr int kNumClasses = 16;
inline constexpr uint32_t kHalfLife = 1u << 13;
// Hazards are small floats of one byte, four bits each: 3 % apart, 0 the first.
inline constexpr uint32_t HazardOfCode(uint8_t code) {
  return (16u + (code & 15u)) << (code >> 4) >> 4;
}
inline constexpr uint8_t kDenseCode = 0xff;
inline constexpr uint8_t kMostHazardCode = 12 << 4;  // 0.3 of the elements change
inline constexpr uint32_t kMostHazard = HazardOfCode(kMostHazardCode);

struct Hazards {
  Hazards() = default;
  // `codes`: 0 for 0, kDenseCode, or what is at most kMostHazardCode.
  Hazards(uint8_t first, const std::array<uint8_t, kNumClasses>& class_codes);

  int ClassOf(uint16_t bits) const {
    const int exponent = bits >> 7 & 0xff;
    const int c = exponent - first_exponent;
    return c < 0 ? 0 : (c < kNumClasses ? c : kNumClasses - 1);
  }
  // 0 of dense ones.
  uint32_t Of(uint16_t bits) const { return by_exponent[bits >> 7 & 0xff]; }

  uint8_t first_exponent = 0;
  std::array<uint8_t, kNumClasses> codes = {};
  std::array<uint8_t, kNumClasses> low = {}, high = {}, dense = {};  // bytes of a hazard; 0xff or 0
  std::array<uint32_t, 256> by_exponent = {};
};

// With what stood there and stands there, so that nothing has to be read again.
struct GridChange {
  uint32_t at;
  uint16_t from, to;
  friend bool operator==(const GridChange&, const GridChange&) = default;
};
// Appends every i with base[i] != next[i].
void FindChanges(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next,
                 std::vector<GridChange>& changes);

// The hazards of each kGroup elements (the last may be fewer), added up; and the places of dense
// elements in `dense`, which has room for all of them: their number. Copies the elements to `copy`,
// if it isn't null, on the way.
inline constexpr size_t kGroup = 32;
size_t ScanGroups(const Hazards& hazards, absl::Span<const uint16_t> elements, uint32_t* sums,
                  uint32_t* dense, uint16_t* copy = nullptr);
}  // namespace stretto::engine
