// How the size of a change is coded, with symbols of four bits whose probabilities are learnt on
// the way: first the sign with the size if it is small. A larger size has a length, and then the
// bits after its leading one, four at a time, each four with what stands before them in mind: what
// was 0 moves to a small number, thousands of steps away, and such numbers lie close together.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/weights/grid_scan.h"
#include "engine/weights/range_coder.h"

namespace stretto::engine {
class StepModel {
 public:
  void Encode(RangeEncoder& coder, int c, uint16_t weight, int64_t step) {
    const bool negative = step < 0;
    const auto size = static_cast<uint32_t>(negative ? -step : step);
    const uint32_t more = (size - 1 - Crosses(weight, negative)) & kMostMore;
    const auto near = static_cast<int>(more < kFar ? more : kFar);
    coder.EncodeNibble(near_[weight >> 15][c], near | (negative ? kNegative : 0));
    if (near < kFar) return;
    Far(
        [&coder](AdaptiveNibble& model, int symbol) {
          coder.EncodeNibble(model, symbol);
          return symbol;
        },
        c, more - kFar + 1);
  }
  // May be anything up to ±2^16, never 0.
  int64_t Decode(RangeDecoder& coder, int c, uint16_t weight) {
    const int symbol = coder.DecodeNibble(near_[weight >> 15][c]);
    const bool negative = (symbol & kNegative) != 0;
    uint32_t more = symbol & (kNegative - 1);
    if (more == kFar) {
      more +=
          Far([&coder](AdaptiveNibble& model, int) { return coder.DecodeNibble(model); }, c, 1) - 1;
    }
    const int64_t size = int64_t{(more + Crosses(weight, negative)) & kMostMore} + 1;
    return negative ? -size : size;
  }

 private:
  // What was 0 moves as far in either direction, but for the other zero that lies between.
  static uint32_t Crosses(uint16_t weight, bool negative) {
    return weight == (negative ? 0 : 0x8000) ? 1 : 0;
  }

  static constexpr uint32_t kMostMore = (1u << 16) - 1;
  static constexpr int kFar = 7, kNegative = 8;

  // `code` codes a symbol with a model and returns it, or decodes one. Codes `value` > 0, or
  // decodes what it returns.
  template <class Code>
  uint32_t Far(const Code& code, int c, uint32_t value) {
    const int length = code(length_[c], 31 - __builtin_clz(value));
    std::vector<AdaptiveNibble>& after = after_[length];
    if (after.empty()) after.resize(kFirst + kSecond + kThird + kFourth);
    uint32_t known = 1;
    int left = length;
    for (uint32_t models = 0, context = 0; left > 0;) {
      const int num_bits = left < 4 ? left : 4;
      left -= num_bits;
      const auto bits = static_cast<int>(value >> left & ((1u << num_bits) - 1));
      const auto symbol = static_cast<uint32_t>(code(after[models + context], bits));
      known = known << num_bits | (symbol & ((1u << num_bits) - 1));
      // The next models are 16 times as many, one for each of what is known; the last ones know
      // only the four bits before them.
      models =
          models == 0 ? kFirst : (models == kFirst ? kFirst + kSecond : kFirst + kSecond + kThird);
      context = models < kFirst + kSecond + kThird ? known - (1u << (length - left)) : symbol;
    }
    return known;
  }
  static constexpr uint32_t kFirst = 1, kSecond = 16, kThird = 256, kFourth = 16;

  using PerClass = std::array<AdaptiveNibble, kNumClasses>;
  PerClass near_[2];  // by the weight's sign
  PerClass length_;
  std::array<std::vector<AdaptiveNibble>, 16> after_;  // by length; made at first use
};
}  // namespace stretto::engine
