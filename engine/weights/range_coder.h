// A range coder (G. N. N. Martin 1979) in integers alone: the decoder gives the same symbols on
// every machine. The range keeps at least 48 bits, so that frequencies of up to 24 bits cost what
// they should. Carries travel as in the coder of LZMA (I. Pavlov): the last byte that may still
// change waits, with the 0xff that follow it.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "engine/weights/version.h"

namespace stretto::engine {
inline constexpr int kFrequencyBits = 24;

// The probability of a bit to be 0, learnt from the bits before.
class AdaptiveBit {
 public:
  explicit constexpr AdaptiveBit(uint16_t of_zero = kOne / 2) : of_zero_(of_zero) {}
  uint16_t of_zero() const { return of_zero_; }
  // The first bits teach more than later ones.
  void Learn(bool bit) {
    const int rate = seen_ < kSlowest ? kFastest + seen_++ / 4 : kFastest + kSlowest / 4;
    if (bit) {
      of_zero_ = static_cast<uint16_t>(of_zero_ - (of_zero_ >> rate));
    } else {
      of_zero_ = static_cast<uint16_t>(of_zero_ + ((kOne - of_zero_) >> rate));
    }
  }

  static constexpr int kBits = 16;

 private:
  static constexpr int kOne = (1 << kBits) - 1;
  static constexpr int kFastest = 2, kSlowest = 20;
  uint16_t of_zero_;
  uint8_t seen_ = 0;
};

class RangeEncoder {
 public:
  explicit RangeEncoder(Bytes* out) : out_(*out) {}

  // The symbol that has frequencies [begin, begin + size) of 2^kFrequencyBits; size > 0.
  void Encode(uint32_t begin, uint32_t size) {
    const uint64_t unit = range_ >> kFrequencyBits;
    low_ += unit * begin;
    range_ = unit * size;
    Normalize();
  }
  void EncodeBit(AdaptiveBit& model, bool bit) {
    const uint64_t bound = (range_ >> AdaptiveBit::kBits) * Bounded(model);
    if (bit) {
      low_ += bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    model.Learn(bit);
    Normalize();
  }
  // The lowest `count` bits, evenly likely; the highest first.
  void EncodeEven(uint64_t bits, int count) {
    for (int i = count - 1; i >= 0; --i) {
      range_ >>= 1;
      if ((bits >> i & 1) != 0) low_ += range_;
      Normalize();
    }
  }
  // Nothing may follow.
  void Finish() {
    for (int i = 0; i < 8; ++i) ShiftLow();
    while (!out_.empty() && out_.back() == 0) out_.pop_back();  // the decoder reads zeros there
  }

  // A certain bit must not take the whole range.
  static uint32_t Bounded(const AdaptiveBit& model) {
    const uint32_t p = model.of_zero();
    return p < 32 ? 32 : (p > 65504 ? 65504 : p);
  }

 private:
  static constexpr uint64_t kTop = uint64_t{1} << 56;
  void Normalize() {
    while (range_ < uint64_t{1} << 48) {
      range_ <<= 8;
      ShiftLow();
    }
  }
  void ShiftLow() {
    if (low_ < uint64_t{0xff} << 48 || low_ >= kTop) {
      const auto carry = static_cast<uint8_t>(low_ >> 56);
      if (started_) out_.push_back(static_cast<uint8_t>(waiting_ + carry));
      for (; num_full_ > 0; --num_full_) out_.push_back(static_cast<uint8_t>(0xff + carry));
      waiting_ = static_cast<uint8_t>(low_ >> 48);
      started_ = true;
    } else {
      ++num_full_;
    }
    low_ = (low_ & ((uint64_t{1} << 48) - 1)) << 8;
  }

  Bytes& out_;
  uint64_t low_ = 0, range_ = kTop - 1, num_full_ = 0;
  uint8_t waiting_ = 0;
  bool started_ = false;
};

// Reads zeros after the end: any bytes decode to something.
class RangeDecoder {
 public:
  explicit RangeDecoder(absl::Span<const uint8_t> in) : in_(in) {
    for (int i = 0; i < 7; ++i) code_ = code_ << 8 | NextByte();
  }

  // Where in 2^kFrequencyBits the next symbol lies; Take must follow with its frequencies.
  uint32_t Peek() {
    unit_ = range_ >> kFrequencyBits;
    const uint64_t at = code_ / unit_;
    constexpr uint64_t kLast = (uint64_t{1} << kFrequencyBits) - 1;
    return static_cast<uint32_t>(at < kLast ? at : kLast);
  }
  void Take(uint32_t begin, uint32_t size) {
    code_ -= unit_ * begin;
    range_ = unit_ * size;
    Normalize();
  }
  bool DecodeBit(AdaptiveBit& model) {
    const uint64_t bound = (range_ >> AdaptiveBit::kBits) * RangeEncoder::Bounded(model);
    const bool bit = code_ >= bound;
    if (bit) {
      code_ -= bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    model.Learn(bit);
    Normalize();
    return bit;
  }
  uint64_t DecodeEven(int count) {
    uint64_t bits = 0;
    for (int i = 0; i < count; ++i) {
      range_ >>= 1;
      const bool bit = code_ >= range_;
      if (bit) code_ -= range_;
      bits = bits << 1 | (bit ? 1 : 0);
      Normalize();
    }
    return bits;
  }
  // Whether every byte was needed.
  bool AtEnd() const { return next_ >= in_.size(); }

 private:
  uint8_t NextByte() {
    const size_t i = next_++;
    return i < in_.size() ? in_[i] : 0;
  }
  void Normalize() {
    while (range_ < uint64_t{1} << 48) {
      range_ <<= 8;
      code_ = code_ << 8 | NextByte();
    }
  }

  absl::Span<const uint8_t> in_;
  size_t next_ = 0;
  uint64_t code_ = 0, range_ = (uint64_t{1} << 56) - 1, unit_ = 1;
};
}  // namespace stretto::engine
