// An entropy coder for symbols whose frequencies are told beforehand, roughly: rANS (J. Duda 2009)
// with a state of 32 bits that gives and takes 16. The decoder looks a symbol up and multiplies
// once; the encoder goes from the last symbol to the first. From integers alone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "engine/weights/bit_stream.h"
#include "engine/weights/version.h"

namespace stretto::engine {
inline constexpr size_t kMostSymbols = 1 << 12;

// How often symbols come, as numbers from 1 (as often as any) to 12, two of them a factor of two
// apart, later ones one; 0: never. Good enough for 0.03 bits a symbol, and told with four.
std::vector<uint8_t> LevelsOf(absl::Span<const uint32_t> counts);

// Nibbles, lower first: 1 to 12 a level; 0 and r: r + 1 symbols that never come; 13 and two: 17 and
// more.
void PutLevels(absl::Span<const uint8_t> levels, Bytes& out);
// Of `num_symbols`; false when they are cut off or impossible.
bool GetLevels(absl::Span<const uint8_t>& in, size_t num_symbols, std::vector<uint8_t>& levels);

// Of 2^bits, a symbol has [begins[s], begins[s + 1]). Tables of this size stay small, and every
// symbol that comes has some.
struct Frequencies {
  int bits = 0;
  std::vector<uint32_t> begins;
};
// Levels of at most kMostSymbols symbols, of which one or more come.
Frequencies FrequenciesOf(absl::Span<const uint8_t> levels);

// What the encoder does for a symbol, without a division: its quotient by the symbol's size is the
// upper half of a product (D. Lemire et al. 2019), which is exact for numbers of 32 bits.
struct SymbolStep {
  uint64_t reciprocal, limit;  // a state from `limit` on gives 16 bits first
  uint32_t begin, rest;        // what the table has besides the symbol

  uint32_t Next(uint32_t state) const {
    const auto quotient =
        static_cast<uint32_t>(static_cast<unsigned __int128>(state) * reciprocal >> 64);
    return state + begin + quotient * rest;
  }
};
// By symbol; those that never come have none that makes sense.
std::vector<SymbolStep> StepsOf(const Frequencies& of);

class SymbolEncoder {
 public:
  explicit SymbolEncoder(size_t num_symbols)
      : size_(num_symbols), symbols_(new const SymbolStep*[num_symbols]) {}
  // As often as was said; `symbol` outlives it.
  void Add(const SymbolStep& symbol) { symbols_[num_++] = &symbol; }
  Bytes Finish() const;

 private:
  const size_t size_;
  size_t num_ = 0;
  std::unique_ptr<const SymbolStep*[]> symbols_;
};

class SymbolDecoder {
 public:
  SymbolDecoder() = default;
  // `in` has kReadAhead more bytes after it.
  explicit SymbolDecoder(absl::Span<const uint8_t> in)
      : at_(in.data() + 4), end_(in.data() + in.size()) {
    state_ = static_cast<uint32_t>(LoadLittleEndian(in.data()));
  }
  // Where in 2^bits the next symbol lies; Take must follow.
  uint32_t Peek(uint32_t mask) const { return state_ & mask; }
  // That place is the symbol's `offset`th of `size`.
  void Take(uint32_t size, uint32_t offset, int bits) {
    state_ = size * (state_ >> bits) + offset;
    const uint32_t next = state_ << 16 | at_[0] | static_cast<uint32_t>(at_[1]) << 8;
    const bool take = state_ < kLow;
    state_ = take ? next : state_;
    at_ += take ? 2 : 0;
  }
  bool IsCutOff() const { return at_ > end_; }
  bool AtEnd() const { return at_ == end_ && state_ == kLow; }

  static constexpr uint32_t kLow = 1u << 16;

 private:
  static constexpr uint8_t kNothing[2] = {};

  uint32_t state_ = kLow;
  const uint8_t* at_ = kNothing;
  const uint8_t* end_ = kNothing;
};
}  // namespace stretto::engine
