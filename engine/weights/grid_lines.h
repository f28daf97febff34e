// The walks over bf16 elements that make and apply a delta, in lines of 64 elements whose
// properties are masks of 64 bits: bit i is element i. Vectors where the processor has them;
// integers alone, the same on every instruction set.
//
// Elements belong to classes by their exponent: kNumClasses of them end with the exponent
// first_exponent + kNumClasses − 1; smaller ones (zero among them) belong to the first class,
// larger ones to the last. Classes that change about as readily are a group, and an element has a
// rank in its group: how many of the group stand before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/weights/bit_stream.h"

namespace stretto::engine {
inline constexpr size_t kLine = 64;         // elements
inline constexpr size_t kChunkLines = 128;  // lines that are worked on together: they stay in L1
inline constexpr size_t kChunk = kChunkLines * kLine;
inline constexpr int kNumClasses = 16;
inline constexpr int kMaxSparseGroups = 6;  // of which changes are told by rank
inline constexpr int kDenseGroup = 7;       // of which every element is told
inline constexpr int kMaskSlots = 8;        // a line's masks fill a cache line

struct ClassGroups {
  uint8_t first_exponent = 0;
  std::array<uint8_t, kNumClasses> bits = {};  // 1 << group, or 0
  int num_sparse = 0;

  int ClassOf(uint16_t weight) const {
    const int c = (weight >> 7 & 0xff) - first_exponent;
    return c < 0 ? 0 : (c < kNumClasses ? c : kNumClasses - 1);
  }
};

// By how much the bits of a line's elements grew.
struct LineChanges {
  uint64_t up;       // by 1, modulo 2^16
  uint64_t down;     // by −1
  uint64_t changed;  // by anything but 0
};

// masks[kMaskSlots * line + group], of the sparse groups and the dense one.
using LineMasks = std::array<uint64_t, kChunkLines * kMaskSlots>;
// Bits of a group's elements in order of rank, and the words after them that may be touched.
using RankBits = std::array<uint64_t, kChunkLines + 2>;
using GroupBits = std::array<RankBits, kMaxSparseGroups>;
using GroupCounts = std::array<uint32_t, kMaxSparseGroups>;

// All of whole lines, at most kChunkLines.
void GroupLines(const ClassGroups& groups, const uint16_t* elements, size_t num_lines,
                LineMasks& masks);
void CompareLines(const uint16_t* base, const uint16_t* next, size_t num_lines,
                  LineChanges* changes);
// Writes the elements after `up` and `down`.
void StepLines(const uint16_t* base, const LineChanges* changes, size_t num_lines, uint16_t* out);

// How many elements each class has, how many of them changed, and by 1 or −1. Added up.
struct ClassCounts {
  std::array<uint32_t, kNumClasses> all = {}, changed = {}, by_one = {};
};
void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts);

// Changes by 1 and −1 of sparse elements: which, by rank, to `bits` (and the groups' sizes to
// `counts`), and in which direction, in order of the elements, to `signs`. `changed` keeps the
// others.
void GatherRanks(int num_sparse, const LineMasks& masks, size_t num_lines, LineChanges* changes,
                 GroupBits& bits, GroupCounts& counts, BitWriter& signs);
// The other way; `counts` come from CountGroups. `signs` begin at `sign_at`, which moves on.
void CountGroups(int num_sparse, const LineMasks& masks, size_t num_lines, GroupCounts& counts);
void ScatterRanks(int num_sparse, const LineMasks& masks, size_t num_lines, const GroupBits& bits,
                  const uint8_t* signs, size_t& sign_at, LineChanges* changes);

// Gaps between changed ranks of a group, whose mean is followed: the next 32 are coded for the mean
// of those before. A gap is q zeros, a one and the k low bits, lowest first, with q the rest of the
// gap; or kMostZeros zeros and 32 bits.
class GapMean {
 public:
  static constexpr int kMostZeros = 24, kMostBits = 26;
  static constexpr uint32_t kBlock = 32;

  GapMean() = default;
  explicit GapMean(int bits) : bits_(bits), average_(uint64_t{50} << bits) {}
  int bits() const { return bits_; }
  // True when a block has ended.
  bool Add(uint64_t gap) {
    sum_ += gap;
    if (++count_ < kBlock) return false;
    average_ = (average_ + sum_) / 2;
    bits_ = BitsFor(average_);
    count_ = 0;
    sum_ = 0;
    return true;
  }
  // The best k for kBlock gaps that are distributed geometrically with this sum.
  static int BitsFor(uint64_t sum) {
    const uint64_t unit = (sum + 15 + 65) / 66;
    const int bits = unit <= 1 ? 0 : 64 - __builtin_clzll(unit - 1);
    return bits < kMostBits ? bits : kMostBits;
  }

 private:
  int bits_ = 0;
  uint32_t count_ = 0;
  uint64_t average_ = 0, sum_ = 0;
};

class GapWriter {
 public:
  explicit GapWriter(int bits) : mean_(bits) {}
  // The next `count` ranks, of which those in `bits` changed.
  void Write(const RankBits& bits, uint32_t count);
  // Nothing follows.
  Bytes Finish();

 private:
  friend struct GapKernels;
  GapMean mean_;
  uint64_t since_ = 0;  // the last change
  BitWriter out_;
};

class GapReader {
 public:
  GapReader() = default;
  // [begin, end) are places in bits of `data`, which has kReadAhead more bytes.
  GapReader(int bits, const uint8_t* data, size_t begin, size_t end);
  // Sets `bits` to those of the next `count` ranks. False: the data ended before them.
  bool Read(uint32_t count, RankBits& bits);
  // All ranks were read, and all of the data with them.
  bool AtEnd() const;

 private:
  friend struct GapKernels;
  GapMean mean_;
  const uint8_t* data_ = nullptr;
  size_t at_ = 0, end_ = 0;  // in bits
  uint64_t next_ = 0;        // rank of the next change
};
}  // namespace stretto::engine
