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

#include "absl/types/span.h"
#include "engine/weights/bit_stream.h"

namespace stretto::engine {
inline constexpr size_t kLine = 64;        // elements
inline constexpr size_t kChunkLines = 64;  // lines that are worked on together: they stay in L1
inline constexpr size_t kChunk = kChunkLines * kLine;
inline constexpr int kNumClasses = 16;
inline constexpr int kMaxSparseGroups = 6;  // of which changes are told by rank
inline constexpr int kDenseGroup = 7;       // of which every element is told

struct ClassGroups {
  uint8_t first_exponent = 0;
  std::array<uint8_t, kNumClasses> bits = {};  // 1 << group, or 0
  int num_sparse = 0;
  std::array<uint8_t, 256> group_of = {};  // by exponent, where there is one

  // From the rest.
  void SetGroups();

  int ClassOf(uint16_t weight) const {
    const int c = (weight >> 7 & 0xff) - first_exponent;
    return c < 0 ? 0 : (c < kNumClasses ? c : kNumClasses - 1);
  }
};

// How many elements each class has, how many of them changed, and by 1 or −1. Added up, of whole
// lines.
struct ClassCounts {
  std::array<uint32_t, kNumClasses> all = {}, changed = {}, by_one = {};
};
void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts);

// A chunk's elements, or fewer at the end of a tensor, in one or more whole lines of which the last
// has elements only where `last_line` has ones. What follows the chunk is fetched meanwhile.
struct Lines {
  const uint16_t* elements;
  size_t count;
  uint64_t last_line = ~uint64_t{0};
};

// Where a chunk's groups are.
struct ChunkGroups {
  static constexpr size_t kSlots = 8;  // a line's masks fill a cache line

  alignas(64) std::array<uint64_t, kChunkLines * kSlots> masks;  // of line l and group g: [l·8 + g]
  // Ranks before each line, counted from the chunk's first; and before line l and of group g at
  // [l·8 + g], where they are found so (grid_transpose.h).
  alignas(64) std::array<std::array<uint16_t, kChunkLines>, kMaxSparseGroups> begins;
  alignas(64) std::array<uint16_t, kChunkLines * kSlots> line_begins;
  std::array<uint32_t, kMaxSparseGroups> sizes;
  // Lines that have dense elements, or, after GatherRanks, others that are not told by rank.
  std::array<uint16_t, kChunkLines> rest_lines;
  size_t num_rest_lines;
};

// Ranks of the sparse elements that changed by 1 or −1, counted from the chunk's first, in order.
struct ChangedRanks {
  std::array<std::array<uint16_t, kChunk>, kMaxSparseGroups> of;
  std::array<uint32_t, kMaxSparseGroups> num;
};
// Also sets the chunk's groups; appends the changes' directions, in order of the elements, to
// `signs`; and tells the changed elements of each line that are neither told so nor dense.
void GatherRanks(const ClassGroups& groups, const Lines& base, const uint16_t* next,
                 ChunkGroups& chunk, ChangedRanks& ranks, BitWriter& signs, uint64_t* others);

// The other way: first the groups; then which elements change is added up (GapReader::Read); then
// they are stepped to `out`. `signs` begin at `sign_at`, which moves on.
void GroupLines(const ClassGroups& groups, const Lines& base, ChunkGroups& chunk);
using ChangedLines = std::array<uint64_t, kChunkLines>;
void StepLines(const Lines& base, const ChangedLines& changed, const uint8_t* signs,
               size_t& sign_at, uint16_t* out);

// Copies past the caches. Other threads see it after FinishStream.
void StreamElements(const uint16_t* elements, size_t count, uint16_t* out);
void FinishStream();

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
  // The next `size` ranks, of which `num` changed.
  void Write(const uint16_t* ranks, uint32_t num, uint32_t size);
  uint64_t num_changes() const { return num_changes_; }
  Bytes Finish() { return out_.Finish(); }

 private:
  GapMean mean_;
  uint64_t since_ = 0, num_changes_ = 0;  // ranks since the last change; all changes
  BitWriter out_;
};

// Where a GapReader is.
struct GapPlace {
  GapMean mean;
  size_t at = 0;      // in bits
  uint64_t next = 0;  // rank of the next change, counted from the chunk's first
  uint64_t left = 0;  // changes to come
};

class GapReader {
 public:
  // `data` has kReadAhead more bytes after it.
  GapReader(int bits, uint64_t num_changes, absl::Span<const uint8_t> data);
  // Sets the bits of the chunk's elements of this group that change, and goes on to the next chunk.
  // False: the data ended before.
  bool Read(const ChunkGroups& chunk, int group, ChangedLines& changed);
  // Whether all changes came and no data is left.
  bool AtEnd() const;

 private:
  GapPlace place_;
  absl::Span<const uint8_t> data_;
};
}  // namespace stretto::engine
