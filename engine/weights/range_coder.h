// A range coder (G. N. N. Martin 1979) in integers alone: the decoder gives the same symbols on
// every machine. The range keeps at least 32 bits, and 32 bits leave at a time. A carry is added to
// what has left already: it is rare, and seldom goes far.
#pragma once

#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "engine/weights/version.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace stretto::engine {
// The probability of a bit to be 0, learnt from the bits before.
class AdaptiveBit {
 public:
  // A certain bit must not take the whole range.
  uint32_t of_zero() const {
    return of_zero_ < kLeast ? kLeast : (of_zero_ > kOne - kLeast ? kOne - kLeast : of_zero_);
  }
  // The first bits teach more than later ones.
  void Learn(bool bit) {
    const int rate = seen_ < kSlowest ? kFastest + seen_++ / 4 : kFastest + kSlowest / 4;
    const int32_t target = bit ? 0 : kOne;
    of_zero_ = static_cast<uint16_t>(of_zero_ + ((target - of_zero_) >> rate));
  }

  static constexpr int kBits = 16;

 private:
  static constexpr int32_t kOne = (1 << kBits) - 1, kLeast = 32;
  static constexpr int kFastest = 2, kSlowest = 20;
  uint16_t of_zero_ = kOne / 2;
  uint8_t seen_ = 0;
};

// The probabilities of 16 symbols, learnt the same way: all of them move a part of the way towards
// the one that came (cumulative, so that coding looks up and learning adds vectors).
class AdaptiveNibble {
 public:
  static constexpr int kBits = 15;

  AdaptiveNibble() {
    for (int i = 0; i < 16; ++i) below_[i] = static_cast<int16_t>(i << (kBits - 4));
  }
  uint32_t Begin(int symbol) const { return static_cast<uint32_t>(below_[symbol]); }
  uint32_t Size(int symbol) const {
    return (symbol == 15 ? 1u << kBits : static_cast<uint32_t>(below_[symbol + 1])) - Begin(symbol);
  }
  // The symbol that has frequency `at` < 2^kBits.
  int Find(uint32_t at) const {
#if defined(__SSE2__)
    const __m128i value = _mm_set1_epi16(static_cast<int16_t>(at));
    const auto* p = reinterpret_cast<const __m128i*>(&below_);
    const __m128i low = _mm_cmpgt_epi16(_mm_loadu_si128(p), value);
    const __m128i high = _mm_cmpgt_epi16(_mm_loadu_si128(p + 1), value);
    const auto above = static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
    return __builtin_ctz(above | 1u << 16) - 1;
#else
    int symbol = 0;
    while (symbol < 15 && static_cast<uint32_t>(below_[symbol + 1]) <= at) ++symbol;
    return symbol;
#endif
  }
  void Learn(int symbol) {
    const int rate = seen_ < kSlowest ? kFastest + seen_++ / 8 : kFastest + kSlowest / 8;
    Lanes targets;
    std::memcpy(&targets, kTargets + 15 - symbol, sizeof(targets));
    below_ += (targets + kFloor - below_) >> rate;
  }

 private:
  // GCC's and Clang's vectors: whatever the processor has.
  using Lanes = int16_t __attribute__((vector_size(32), aligned(2)));
  static constexpr int kFastest = 3, kSlowest = 32, kLeast = 4;
  // Up to a symbol nothing is below it, from there on all but what the others keep.
  static constexpr int16_t kTop = (1 << kBits) - 16 * kLeast;
  static constexpr int16_t kTargets[31] = {
      0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,   0,
      kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop, kTop};
  static constexpr Lanes kFloor = {0 * kLeast,  1 * kLeast,  2 * kLeast,  3 * kLeast,
                                   4 * kLeast,  5 * kLeast,  6 * kLeast,  7 * kLeast,
                                   8 * kLeast,  9 * kLeast,  10 * kLeast, 11 * kLeast,
                                   12 * kLeast, 13 * kLeast, 14 * kLeast, 15 * kLeast};
  Lanes below_;
  uint8_t seen_ = 0;
};

class RangeEncoder {
 public:
  explicit RangeEncoder(Bytes* out) : out_(*out) {}

  // The symbol that has frequencies [begin, begin + size) of 2^bits; size > 0, bits <= 24.
  void Encode(uint32_t begin, uint32_t size, int bits) {
    const uint64_t unit = range_ >> bits;
    Add(unit * begin);
    range_ = unit * size;
    Normalize();
  }
  void EncodeBit(AdaptiveBit& model, bool bit) {
    const uint64_t bound = (range_ >> AdaptiveBit::kBits) * model.of_zero();
    Add(bit ? bound : 0);
    range_ = bit ? range_ - bound : bound;
    model.Learn(bit);
    Normalize();
  }
  void EncodeNibble(AdaptiveNibble& model, int symbol) {
    Encode(model.Begin(symbol), model.Size(symbol), AdaptiveNibble::kBits);
    model.Learn(symbol);
  }
  // Nothing may follow.
  void Finish() {
    // The number in the range that has the most zeros at its end, which the decoder reads anyway.
    Add(UINT32_MAX);
    PutWord();
    while (!out_.empty() && out_.back() == 0) out_.pop_back();
  }

 private:
  void Add(uint64_t part) {
    low_ += part;
    if (low_ < part) Carry();
  }
  void Carry() {
    for (size_t i = out_.size(); i > 0 && ++out_[i - 1] == 0; --i) {
    }
  }
  void Normalize() {
    if (range_ >= uint64_t{1} << 32) return;
    PutWord();
    range_ <<= 32;
  }
  void PutWord() {
    const auto byte = [this](int i) { return static_cast<uint8_t>(low_ >> (56 - 8 * i)); };
    const uint8_t word[4] = {byte(0), byte(1), byte(2), byte(3)};
    out_.insert(out_.end(), word, word + sizeof(word));
    low_ <<= 32;
  }

  Bytes& out_;
  uint64_t low_ = 0, range_ = ~uint64_t{0};
};

// Reads zeros after the end: any bytes decode to something.
class RangeDecoder {
 public:
  explicit RangeDecoder(absl::Span<const uint8_t> in) : in_(in) {
    code_ = uint64_t{NextWord()} << 32;
    code_ |= NextWord();
  }

  // Where in 2^bits the next symbol lies; Take must follow with its frequencies.
  uint32_t Peek(int bits) {
    unit_ = range_ >> bits;
    const uint64_t at = code_ / unit_, last = (uint64_t{1} << bits) - 1;
    return static_cast<uint32_t>(at < last ? at : last);
  }
  void Take(uint32_t begin, uint32_t size) {
    code_ -= unit_ * begin;
    range_ = unit_ * size;
    Normalize();
  }
  bool DecodeBit(AdaptiveBit& model) {
    const uint64_t bound = (range_ >> AdaptiveBit::kBits) * model.of_zero();
    const bool bit = code_ >= bound;
    code_ -= bit ? bound : 0;
    range_ = bit ? range_ - bound : bound;
    model.Learn(bit);
    Normalize();
    return bit;
  }
  int DecodeNibble(AdaptiveNibble& model) {
    const int symbol = model.Find(Peek(AdaptiveNibble::kBits));
    Take(model.Begin(symbol), model.Size(symbol));
    model.Learn(symbol);
    return symbol;
  }
  // Whether every byte was needed.
  bool AtEnd() const { return next_ >= in_.size(); }

 private:
  uint32_t NextWord() {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i, ++next_) word = word << 8 | (next_ < in_.size() ? in_[next_] : 0u);
    return word;
  }
  void Normalize() {
    if (range_ >= uint64_t{1} << 32) return;
    range_ <<= 32;
    code_ = code_ << 32 | NextWord();
  }

  absl::Span<const uint8_t> in_;
  size_t next_ = 0;
  uint64_t code_ = 0, range_ = ~uint64_t{0}, unit_ = 1;
};
}  // namespace stretto::engine
