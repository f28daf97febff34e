// How the size of a change is coded: the sign, then the size less one, with bits whose
// probabilities are learnt on the way. Small sizes are unary; larger ones are a length, whose five
// bits are learnt as a tree, and the bits after the leading one, learnt as a tree as well (but the
// lowest of the largest): what was 0 moves to a small number, thousands of steps away, and such
// numbers lie close together.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/weights/grid_scan.h"
#include "engine/weights/range_coder.h"

namespace stretto::engine {
// Coder: what codes a bit with a model and returns it (the decoder ignores what it is given).
class StepModel {
 public:
  void Encode(RangeEncoder& coder, int c, uint16_t weight, int64_t step) {
    const auto code = [&coder](AdaptiveBit& model, bool bit) {
      coder.EncodeBit(model, bit);
      return bit;
    };
    code(negative_[weight >> 15][c], step < 0);
    const auto more = static_cast<uint32_t>((step < 0 ? -step : step) - 1);
    Size(code, c, (more - Crosses(weight, step < 0)) & kMostMore);
  }
  // May be anything up to ±2^17; never 0.
  int64_t Decode(RangeDecoder& coder, int c, uint16_t weight) {
    const auto code = [&coder](AdaptiveBit& model, bool) { return coder.DecodeBit(model); };
    const bool negative = code(negative_[weight >> 15][c], false);
    const uint32_t more = Size(code, c, 0) + Crosses(weight, negative);
    const int64_t size = int64_t{more & kMostMore} + 1;
    return negative ? -size : size;
  }

 private:
  // What was 0 moves as far in either direction, but for the other zero that lies between.
  static uint32_t Crosses(uint16_t weight, bool negative) {
    return weight == (negative ? 0 : 0x8000) ? 1 : 0;
  }

  static constexpr uint32_t kMostMore = (1u << 17) - 1;
  static constexpr uint32_t kUnary = 3;
  static constexpr int kLengthBits = 5, kMaxLength = 17, kHighBits = 13;

  template <class Code>
  uint32_t Size(const Code& code, int c, uint32_t more) {
    for (uint32_t i = 0; i < kUnary; ++i) {
      if (!code(larger_[c][i], more > i)) return i;
    }
    return kUnary + Rest(code, c, more - kUnary);
  }

  template <class Code>
  uint32_t Rest(const Code& code, int c, uint32_t rest) {
    const uint32_t value = rest + 1;  // from 1 on
    uint32_t length = Tree(code, length_[c].data(), kLengthBits,
                           static_cast<uint32_t>(31 - __builtin_clz(value | 1)));
    if (length >= kMaxLength) length = kMaxLength - 1;  // no encoder writes it
    const int num_bits = static_cast<int>(length);
    const int num_high = num_bits < kHighBits ? num_bits : kHighBits;
    const int num_low = num_bits - num_high;
    const uint32_t below = value & ((1u << num_bits) - 1);
    std::vector<AdaptiveBit>& high = high_[length];
    if (high.empty()) high.resize(size_t{1} << num_high);
    uint32_t result = 1u << num_high | Tree(code, high.data(), num_high, below >> num_low);
    for (int i = num_low - 1; i >= 0; --i) {
      result = result << 1 | (code(low_[length][i], (value >> i & 1) != 0) ? 1 : 0);
    }
    return result - 1;
  }

  // `num_bits` bits, the highest first, each with a model of its own for those before it.
  template <class Code>
  static uint32_t Tree(const Code& code, AdaptiveBit* nodes, int num_bits, uint32_t value) {
    uint32_t node = 1;
    for (int i = num_bits - 1; i >= 0; --i) {
      node = node << 1 | (code(nodes[node], (value >> i & 1) != 0) ? 1 : 0);
    }
    return node - (1u << num_bits);
  }

  using PerClass = std::array<AdaptiveBit, kNumClasses>;
  PerClass negative_[2];  // by the weight's sign
  std::array<std::array<AdaptiveBit, kUnary>, kNumClasses> larger_;
  std::array<std::array<AdaptiveBit, 1 << kLengthBits>, kNumClasses> length_;
  std::array<std::vector<AdaptiveBit>, kMaxLength> high_;  // by node; made at first use
  std::array<std::array<AdaptiveBit, kMaxLength - kHighBits>, kMaxLength> low_;
};
}  // namespace stretto::engine
