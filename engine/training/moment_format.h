// Adam's moments in 8 bits: blocks of 256 elements with a scale each, as block-wise 8-bit
// optimizers have (Dettmers et al. 2022), in a format of this program's own.
//
// A block's scale s is the least power of two above all its magnitudes, and at least 2⁻⁴⁰. A value
// y = x / s in [0, 1) is a small float of e exponent and f fraction bits, without infinities:
//   code 0 … 2ᶠ−1: code · 2⁻¹⁵⁻ᶠ;  else (1 + fraction / 2ᶠ) · 2^(exponent − 16)
//   m: sign, 4 exponent bits, 3 fraction bits: 2⁻¹⁸ of the scale is the smallest, steps of 6 to 12
//   % v: its square root, 4 exponent bits, 4 fraction bits; what is above zero stays above zero, so
//      that no update is divided by a moment that vanished
//
// Rounding is stochastic, so that small changes add up where they are less than a step (with
// round-to-nearest a moment would stop decaying): up with the probability of the distance. The
// random bits are a hash of the value, its place in its block, and the step; so the result is a
// function of (block, step), whoever computes it. Values that a block can hold are kept as they
// are: decoding and encoding again gives the same codes.
#pragma once

#include <array>
#include <cstdint>

namespace stretto::engine {
inline constexpr int64_t kMomentBlock = 256;

enum class Moment : uint8_t { kM, kV };

// The part of the random bits that a step and places in blocks decide.
struct MomentRounding {
  explicit MomentRounding(int64_t step);
  std::array<uint32_t, kMomentBlock> m, v;
};

// Encodes `count` ≤ kMomentBlock values of one block, which are finite. Returns the scale.
float EncodeMoments(Moment which, const float* values, int64_t count,
                    const MomentRounding& rounding, uint8_t* codes);
void DecodeMoments(Moment which, const uint8_t* codes, int64_t count, float scale, float* values);
}  // namespace stretto::engine
