// LEB128: seven bits a byte, lowest first. Signed numbers alternate: 0, −1, 1, −2, …
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "engine/weights/version.h"

namespace stretto::engine {
inline constexpr int kMaxVarintBytes = 10;

inline void PutVarint(Bytes& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<uint8_t>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<uint8_t>(value));
}

// Takes a number from the front; false when it is cut off or has more than 64 bits.
inline bool GetVarint(absl::Span<const uint8_t>& in, uint64_t& value) {
  value = 0;
  for (int i = 0; i < kMaxVarintBytes && static_cast<size_t>(i) < in.size(); ++i) {
    const uint64_t bits = in[i] & 0x7fu;
    if (i == kMaxVarintBytes - 1 && bits > 1) return false;
    value |= bits << (7 * i);
    if (in[i] < 0x80) {
      in.remove_prefix(i + 1);
      return true;
    }
  }
  return false;
}

inline uint64_t ZigZag(int64_t v) {
  return (static_cast<uint64_t>(v) << 1) ^ static_cast<uint64_t>(v >> 63);
}
inline int64_t UnZigZag(uint64_t v) {
  return static_cast<int64_t>(v >> 1) ^ -static_cast<int64_t>(v & 1);
}

// Bits of a float of this width to its place on the grid of all values, and back (delta.h).
template <class Word>
int64_t ToGrid(Word bits) {
  constexpr Word kSign = Word{1} << (sizeof(Word) * 8 - 1);
  return (bits & kSign) != 0 ? static_cast<Word>(~bits) : static_cast<Word>(bits | kSign);
}
template <class Word>
Word FromGrid(Word place) {
  constexpr Word kSign = Word{1} << (sizeof(Word) * 8 - 1);
  return (place & kSign) != 0 ? static_cast<Word>(place & ~kSign) : static_cast<Word>(~place);
}
}  // namespace stretto::engine
