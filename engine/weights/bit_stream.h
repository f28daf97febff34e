// Numbers of a few bits one after the other, lowest bits first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "engine/weights/version.h"

namespace stretto::engine {
// Bytes that must follow what is read with LoadBits, so that whole blocks are read before the end
// is looked at.
inline constexpr size_t kReadAhead = 2048;

inline uint64_t LoadLittleEndian(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// At least 57 bits from bit `at` on.
inline uint64_t LoadBits(const uint8_t* data, size_t at) {
  return LoadLittleEndian(data + at / 8) >> (at % 8);
}
// 64 of them.
inline uint64_t LoadWordAt(const uint8_t* data, size_t at) {
  const size_t shift = at % 8;
  return LoadLittleEndian(data + at / 8) >> shift | uint64_t{data[at / 8 + 8]} << 1 << (63 - shift);
}

class BitWriter {
 public:
  // So many bits are going to be put.
  void Reserve(size_t num_bits) {
    const size_t need = at_ + num_bits / 8 + 16;
    if (bytes_.size() < need) bytes_.resize(std::max(need, 2 * bytes_.size()));
  }
  // `value` < 2^num_bits, num_bits <= 56.
  void Put(uint64_t value, int num_bits) {
    pending_ |= value << num_pending_;
    Store();
    num_pending_ += num_bits;
    at_ += static_cast<size_t>(num_pending_ / 8);
    pending_ >>= num_pending_ & 56;
    num_pending_ &= 7;
  }
  // The rest of the last byte is 0.
  Bytes Finish() {
    Reserve(0);
    Store();
    bytes_.resize(at_ + (num_pending_ > 0 ? 1 : 0));
    return std::move(bytes_);
  }

 private:
  void Store() {
    uint64_t word = pending_;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    std::memcpy(bytes_.data() + at_, &word, sizeof(word));
  }

  Bytes bytes_;
  size_t at_ = 0;  // of the byte where pending_ goes
  uint64_t pending_ = 0;
  int num_pending_ = 0;  // < 8 between calls
};
}  // namespace stretto::engine
