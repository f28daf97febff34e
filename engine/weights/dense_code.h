// How elements that most likely change, by whatever number of steps, are told: every one of them,
// with a prefix code (symbol_code.h) for each context. A context is a range of the old elements'
// exponents. Its symbols are small differences of the bits, of at most 7 or of at most 63 in both
// directions; larger ones by where they lead: whether the sign flips, the new exponent, within a
// window of them, and the upper bits of the new mantissa, whose lower bits follow; and what lies
// outside of the window, whose 16 bits follow. What was 0 moves to numbers of one size, thousands
// of steps away; the encoder chooses how many upper bits are worth a symbol.
//
// Bytes: u8 number of contexts, at most kMaxContexts · for each: u8 its last exponent (of the last
// one, 255) · u8 the window's first exponent · u8 exponents in the window (4 bits) · 1 bit: small
// differences go to 63 · 3 bits: upper bits of a mantissa · the symbols' levels · then varint size
// of the symbols · the symbols · the bits that follow them, lowest first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/weights/bit_stream.h"
#include "engine/weights/symbol_code.h"

namespace stretto::engine {
inline constexpr int kMaxContexts = 16, kMaxWindow = 15;

// The symbols of a context.
struct ChangeSymbols {
  static constexpr int kNear = 7, kWideNear = 63;

  int near = kNear;
  uint8_t first_exponent = 0;
  int num_exponents = 0, mantissa_bits = 0;

  int outside() const { return 2 * near + 1; }
  int first_far() const { return outside() + 1; }
  size_t size() const {
    return static_cast<size_t>(first_far() + (2 * num_exponents << mantissa_bits));
  }
  int Of(uint16_t from, uint16_t to) const {
    const auto by = static_cast<int16_t>(static_cast<uint16_t>(to - from));
    if (by >= -near && by <= near) return by + near;
    const int exponent = (to >> 7 & 0xff) - first_exponent;
    if (exponent < 0 || exponent >= num_exponents) return outside();
    const int place = ((from ^ to) >> 15) * num_exponents + exponent;
    return first_far() + (place << mantissa_bits | (to & 0x7f) >> (7 - mantissa_bits));
  }
  int RestBits(int symbol) const {
    return symbol < outside() ? 0 : (symbol == outside() ? 16 : 7 - mantissa_bits);
  }
};

class DenseEncoder {
 public:
  void Add(uint16_t from, uint16_t to) {
    if (num_ == elements_.size()) elements_.resize(std::max<size_t>(1024, 2 * num_));
    elements_[num_++] = {from, to};
    ++totals_[from >> 7 & 0xff];
  }
  // Nothing when there were no elements.
  Bytes Finish() const;

 private:
  struct Element {
    uint16_t from, to;
  };
  absl::Span<const Element> elements() const { return {elements_.data(), num_}; }

  std::vector<Element> elements_;  // and room for more
  size_t num_ = 0;
  std::array<uint32_t, 256> totals_ = {};  // by exponent of what they were
};

class DenseDecoder {
 public:
  // `in` outlives it, with kReadAhead more bytes.
  absl::Status Start(absl::Span<const uint8_t> in);
  // What `from` became. At most kLine between two calls of IsCutOff.
  uint16_t Next(uint16_t from) {
    const Context& context = contexts_[context_of_[from >> 7 & 0xff]];
    const Entry& entry = entries_[context.begin + symbols_.Peek(context.mask)];
    symbols_.Take(entry.size, entry.offset, context.bits);
    const uint64_t rest = LoadBits(rest_.data(), at_) & ((1u << entry.rest_bits) - 1);
    at_ += entry.rest_bits;
    const uint16_t kept = from & (entry.keep_sign ? 0x8000 : (entry.keep_all ? 0xffff : 0));
    return static_cast<uint16_t>(kept + entry.add + rest);
  }
  bool IsCutOff() const { return symbols_.IsCutOff() || at_ > rest_.size() * 8; }
  // Whether the elements that came were all.
  bool AtEnd() const;

 private:
  struct Context {
    uint32_t begin, mask;  // of entries
    int bits;
  };
  // Of a place in a symbol's frequencies.
  struct Entry {
    uint16_t size, offset;
    uint16_t add;  // comes to the bits that are kept of what it was
    uint8_t rest_bits;
    bool keep_sign : 1, keep_all : 1;
  };
  void AddContext(const ChangeSymbols& symbols, absl::Span<const uint8_t> levels);

  std::vector<Context> contexts_;
  std::array<uint8_t, 256> context_of_ = {};
  std::vector<Entry> entries_;
  SymbolDecoder symbols_;
  absl::Span<const uint8_t> rest_;
  size_t at_ = 0;  // in bits of rest_
};
}  // namespace stretto::engine
