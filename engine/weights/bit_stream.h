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

// Where a BitWriter goes on, for loops that keep it in registers.
struct BitCursor {
  uint8_t* at;  // where `pending` goes
  uint64_t pending;
  int num_pending;  // < 8 between calls

  // `value` < 2^num_bits, num_bits <= 56.
  void Put(uint64_t value, int num_bits) {
    pending |= value << num_pending;
    Store();
    num_pending += num_bits;
    at += num_pending / 8;
    pending >>= num_pending & 56;
    num_pending &= 7;
  }
  void Store() const {
    uint64_t word = pending;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    std::memcpy(at, &word, sizeof(word));
  }
};

class BitWriter {
 public:
  // For so many bits more; only one cursor at a time.
  BitCursor Begin(size_t num_bits) {
    const size_t need = at_ + num_bits / 8 + 16;
    if (bytes_.size() < need) bytes_.resize(std::max(need, 2 * bytes_.size()));
    return {bytes_.data() + at_, pending_, num_pending_};
  }
  void End(const BitCursor& cursor) {
    at_ = static_cast<size_t>(cursor.at - bytes_.data());
    pending_ = cursor.pending;
    num_pending_ = cursor.num_pending;
  }
  // The rest of the last byte is 0.
  Bytes Finish() {
    Begin(0).Store();
    bytes_.resize(at_ + (num_pending_ > 0 ? 1 : 0));
    return std::move(bytes_);
  }

 private:
  Bytes bytes_;
  size_t at_ = 0;
  uint64_t pending_ = 0;
  int num_pending_ = 0;
};
}  // namespace stretto::engine
