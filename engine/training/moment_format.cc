#include "engine/training/moment_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace stretto::engine {
namespace {
constexpr int kFractionM = 3, kFractionV = 4;
constexpr float kLeastScale = 0x1p-40f;

// 32 well-mixed bits.
inline uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}

// The top bits of the result depend on all of x.
inline uint32_t QuickMix(uint32_t x) {
  x *= 0x9e3779b1U;
  x ^= x >> 15;
  return x * 0x85ebca77U;
}

// The code of y in [0, 1), rounded by `random`.
template <int kFraction>
inline uint32_t Encode(float y, uint32_t random) {
  constexpr uint32_t kShift = 23 - kFraction, kLargest = (16u << kFraction) - 1;
  constexpr uint32_t kBias = 111u << kFraction;  // 2^-15 is the first with an exponent
  constexpr auto kSmall = static_cast<float>(1u << (15 + kFraction));
  const uint32_t noise = random >> (32 - kShift);
  const uint32_t normal = ((std::bit_cast<uint32_t>(y) + noise) >> kShift) - kBias;
  const float unit =
      static_cast<float>(static_cast<int32_t>(noise)) * (1.0f / static_cast<float>(1u << kShift));
  const auto small =
      static_cast<uint32_t>(static_cast<int32_t>(std::min(y, 0x1p-15f) * kSmall + unit));
  const uint32_t is_normal = y >= 0x1p-15f ? ~0U : 0U;  // no branch: either may be the rule
  return std::min((normal & is_normal) | (small & ~is_normal), kLargest);
}

template <int kFraction>
constexpr float Decode(uint32_t code) {
  const auto fraction = static_cast<float>(code & ((1u << kFraction) - 1));
  const uint32_t exponent = code >> kFraction;
  float unit = 0x1p-15f;
  for (uint32_t e = 1; e < exponent; ++e) unit *= 2;
  const auto whole = static_cast<float>(1u << kFraction);
  return exponent == 0 ? fraction / whole * 0x1p-15f : (1 + fraction / whole) * unit;
}

constexpr std::array<float, 256> RootTable() {
  std::array<float, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) table[i] = Decode<kFractionV>(i);
  return table;
}
// With the sign in the top bit.
constexpr std::array<float, 256> SignedTable() {
  std::array<float, 256> table{};
  for (uint32_t i = 0; i < 128; ++i) {
    table[i] = Decode<kFractionM>(i);
    table[i + 128] = -table[i];
  }
  return table;
}
constexpr std::array<float, 256> kTableM = SignedTable();
constexpr std::array<float, 256> kTableV = RootTable();

// The least power of two above `largest`.
float ScaleAbove(float largest) {
  if (largest < kLeastScale) return kLeastScale;
  const uint32_t exponent = std::bit_cast<uint32_t>(largest) >> 23;
  return std::bit_cast<float>((exponent + 1) << 23);
}
}  // namespace

MomentRounding::MomentRounding(int64_t step) {
  const uint32_t seed = Mix(static_cast<uint32_t>(step));
  for (uint32_t i = 0; i < kMomentBlock; ++i) {
    m[i] = Mix(seed + 2 * i);
    v[i] = Mix(seed + 2 * i + 1);
  }
}

float EncodeMoments(Moment which, const float* values, int64_t count,
                    const MomentRounding& rounding, uint8_t* codes) {
  const bool is_m = which == Moment::kM;
  const uint32_t* seeds = is_m ? rounding.m.data() : rounding.v.data();
  float magnitudes[kMomentBlock];
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    magnitudes[i] = is_m ? std::abs(values[i]) : std::sqrt(values[i]);
  }
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitudes[i]);
  const float scale = ScaleAbove(largest), inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t random = QuickMix(bits ^ seeds[i]);
    const float y = magnitudes[i] * inverse;
    if (is_m) {
      codes[i] = static_cast<uint8_t>(Encode<kFractionM>(y, random) | ((bits >> 31) << 7));
    } else {
      const uint32_t code = Encode<kFractionV>(y, random);
      codes[i] = static_cast<uint8_t>(std::max<uint32_t>(code, y > 0 ? 1 : 0));
    }
  }
  return scale;
}

void DecodeMoments(Moment which, const uint8_t* codes, int64_t count, float scale, float* values) {
  if (which == Moment::kM) {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = kTableM[codes[i]] * scale;
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float root = kTableV[codes[i]] * scale;
    values[i] = root * root;
  }
}
}  // namespace stretto::engine
