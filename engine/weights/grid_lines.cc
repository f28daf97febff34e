#include "engine/weights/grid_lines.h"

#include <algorithm>

#include "engine/weights/grid_transpose.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/weights/grid_lines.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "engine/weights/grid_vectors-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace stretto::engine {
namespace HWY_NAMESPACE {
// A line of a chunk ahead; where there is none, fetching does no harm.
HWY_INLINE void Fetch(const uint16_t* line) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(line) + sizeof(uint16_t) * kChunk;
  __builtin_prefetch(reinterpret_cast<const void*>(ahead), 0, 2);
  __builtin_prefetch(reinterpret_cast<const void*>(ahead + sizeof(uint16_t) * kLine / 2), 0, 2);
}

// Puts a line's masks down and adds up what stands before the next line; which elements are sparse.
template <int kSparse>
HWY_INLINE uint64_t PutGroups(const GroupMasks<kSparse>& masks, uint64_t there, size_t line,
                              uint32_t* at, ChunkGroups& chunk) {
  uint64_t* const put = &chunk.masks[line * ChunkGroups::kSlots];
  uint64_t sparse = 0;
  STRETTO_UNROLL for (int g = 0; g < kSparse; ++g) {
    const uint64_t mask = masks.of[g] & there;
    put[g] = mask;
    chunk.begins[g][line] = static_cast<uint16_t>(at[g]);
    at[g] += Count(mask);
    sparse |= mask;
  }
  put[kDenseGroup] = masks.dense & there;
  return sparse;
}
// After the last one.
template <int kSparse>
HWY_INLINE void EndGroups(size_t num_lines, const uint32_t* at, ChunkGroups& chunk) {
  for (int g = 0; g < kSparse; ++g) {
    std::fill(chunk.begins[g].begin() + static_cast<ptrdiff_t>(num_lines), chunk.begins[g].end(),
              uint16_t{INT16_MAX});
    chunk.sizes[g] = at[g];
  }
}

template <int kSparse>
void CompareLinesOf(const ClassGroups& groups, const Lines& base, const uint16_t* next,
                    ChunkGroups& chunk, OneSteps& steps, uint64_t* others) {
  const LineReader reader(groups);
  uint32_t at[kSparse + 1] = {};
  size_t num = 0, num_rest = 0;
  const auto compare = [&](size_t line, uint64_t there) HWY_ATTR __attribute__((always_inline)) {
    const uint16_t* const elements = base.elements + line * kLine;
    const auto masks = reader.template Masks<kSparse>(elements);
    const Changes c = Compare(elements, next + line * kLine);
    Fetch(elements);
    Fetch(next + line * kLine);
    const uint64_t told = PutGroups(masks, there, line, at, chunk) & c.by_one;
    const uint64_t other = c.any & there & ~told & ~masks.dense;
    others[line] = other;
    chunk.rest_lines[num_rest] = static_cast<uint16_t>(line);
    num_rest += (other | (masks.dense & there)) != 0 ? 1 : 0;
    steps.masks[num] = told;
    steps.lines[num] = static_cast<uint16_t>(line);
    num += told != 0 ? 1 : 0;
  };
  for (size_t line = 0; line + 1 < base.count; ++line) compare(line, ~uint64_t{0});
  compare(base.count - 1, base.last_line);
  steps.num = num;
  chunk.num_rest_lines = num_rest;
  EndGroups<kSparse>(base.count, at, chunk);
}

void CompareLines(const ClassGroups& groups, const Lines& base, const uint16_t* next,
                  ChunkGroups& chunk, OneSteps& steps, uint64_t* others) {
  switch (groups.num_sparse) {
    case 0:
      return CompareLinesOf<0>(groups, base, next, chunk, steps, others);
    case 1:
      return CompareLinesOf<1>(groups, base, next, chunk, steps, others);
    case 2:
      return CompareLinesOf<2>(groups, base, next, chunk, steps, others);
    case 3:
      return CompareLinesOf<3>(groups, base, next, chunk, steps, others);
    case 4:
      return CompareLinesOf<4>(groups, base, next, chunk, steps, others);
    case 5:
      return CompareLinesOf<5>(groups, base, next, chunk, steps, others);
    default:
      return CompareLinesOf<6>(groups, base, next, chunk, steps, others);
  }
}

// The places of the changes; `places` has room for three more.
size_t Places(const OneSteps& steps, uint16_t* places) {
  size_t count = 0;
  for (size_t i = 0; i < steps.num; ++i) {
    uint64_t mask = steps.masks[i];
    const auto line = static_cast<size_t>(steps.lines[i]) * kLine;
    uint16_t* put = places + count;
    count += Count(mask);
    // Mostly there are few: so many are written whether they are there or not.
    STRETTO_UNROLL for (int k = 0; k < 3; ++k, mask &= mask - 1) {
      *put++ = static_cast<uint16_t>(line + CountZeros(mask | uint64_t{1} << 63));
    }
    for (; HWY_UNLIKELY(mask != 0); mask &= mask - 1) {
      *put++ = static_cast<uint16_t>(line + CountZeros(mask));
    }
  }
  return count;
}

void GatherRanks(const ClassGroups& groups, const Lines& base, const uint16_t* next,
                 ChunkGroups& chunk, ChangedRanks& ranks, BitWriter& signs, uint64_t* others) {
  OneSteps steps;
  const bool transposed = HWY_TARGET <= HWY_AVX3 && CanTranspose();
  if (transposed) {
    CompareTransposed(groups, base, next, chunk, steps, others);
  } else {
    CompareLines(groups, base, next, chunk, steps, others);
  }
  const uint16_t* const begins = transposed ? chunk.line_begins.data() : chunk.begins[0].data();
  const size_t to_line = transposed ? ChunkGroups::kSlots : 1;
  const size_t to_group = transposed ? 1 : kChunkLines;
  uint16_t places[kChunk + 3];
  const size_t num = Places(steps, places);
  ranks.num = {};
  BitCursor cursor = signs.Begin(num);
  uint64_t up = 0;
  for (size_t i = 0; i < num; ++i) {
    const size_t place = places[i], line = place / kLine, bit = place % kLine;
    const size_t g = groups.group_of[base.elements[place] >> 7 & 0xff];
    const uint64_t before =
        chunk.masks[line * ChunkGroups::kSlots + g] & ((uint64_t{1} << bit) - 1);
    ranks.of[g][ranks.num[g]++] =
        static_cast<uint16_t>(begins[line * to_line + g * to_group] + Count(before));
    up |= uint64_t{static_cast<uint16_t>(next[place] - base.elements[place]) == 1} << i % 32;
    if (HWY_LIKELY(i % 32 != 31)) continue;
    cursor.Put(up, 32);
    up = 0;
  }
  cursor.Put(up, static_cast<int>(num % 32));
  signs.End(cursor);
}

template <int kSparse>
void GroupLinesOf(const ClassGroups& groups, const Lines& base, ChunkGroups& chunk) {
  const LineReader reader(groups);
  uint32_t at[kSparse + 1] = {};
  size_t num_rest = 0;
  const auto group = [&](size_t line, uint64_t there) HWY_ATTR __attribute__((always_inline)) {
    const uint16_t* const elements = base.elements + line * kLine;
    Fetch(elements);
    const auto masks = reader.template Masks<kSparse>(elements);
    PutGroups(masks, there, line, at, chunk);
    chunk.rest_lines[num_rest] = static_cast<uint16_t>(line);
    num_rest += (masks.dense & there) != 0 ? 1 : 0;
  };
  for (size_t line = 0; line + 1 < base.count; ++line) group(line, ~uint64_t{0});
  group(base.count - 1, base.last_line);
  chunk.num_rest_lines = num_rest;
  EndGroups<kSparse>(base.count, at, chunk);
}

void GroupLines(const ClassGroups& groups, const Lines& base, ChunkGroups& chunk) {
  if (HWY_TARGET <= HWY_AVX3 && CanTranspose()) return GroupTransposed(groups, base, chunk);
  switch (groups.num_sparse) {
    case 0:
      return GroupLinesOf<0>(groups, base, chunk);
    case 1:
      return GroupLinesOf<1>(groups, base, chunk);
    case 2:
      return GroupLinesOf<2>(groups, base, chunk);
    case 3:
      return GroupLinesOf<3>(groups, base, chunk);
    case 4:
      return GroupLinesOf<4>(groups, base, chunk);
    case 5:
      return GroupLinesOf<5>(groups, base, chunk);
    default:
      return GroupLinesOf<6>(groups, base, chunk);
  }
}

void StepLines(const Lines& base, const uint64_t* changed, const uint8_t* signs, size_t& sign_at,
               uint16_t* out) {
  size_t at = sign_at;
  for (size_t line = 0; line < base.count; ++line) {
    const uint64_t up = Deposit(LoadWordAt(signs, at), changed[line]);
    at += Count(changed[line]);
    Step(base.elements + line * kLine, up, changed[line] & ~up, out + line * kLine);
  }
  sign_at = at;
}

// Of at most so many lines, which are compared once for both halves of the classes.
constexpr size_t kCountedLines = 8;
void CountFewClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                     size_t num_lines, ClassCounts& counts) {
  constexpr int kHalf = kNumClasses / 2;
  Changes changes[kCountedLines];
  for (size_t line = 0; line < num_lines; ++line) {
    changes[line] = Compare(base + line * kLine, next + line * kLine);
  }
  for (int half = 0; half < 2; ++half) {
    ClassGroups groups{.first_exponent = first_exponent, .bits = {}, .num_sparse = kHalf - 1};
    for (int c = 0; c < kHalf; ++c) groups.bits[kHalf * half + c] = static_cast<uint8_t>(1u << c);
    const LineReader reader(groups);
    uint32_t all[kHalf] = {};
    for (size_t line = 0; line < num_lines; ++line) {
      auto masks = reader.template Masks<kHalf - 1>(base + line * kLine);
      masks.of[kHalf - 1] = masks.dense;
      STRETTO_UNROLL for (int c = 0; c < kHalf; ++c) all[c] += Count(masks.of[c]);
      if (changes[line].any == 0) continue;
      STRETTO_UNROLL for (int c = 0; c < kHalf; ++c) {
        counts.changed[kHalf * half + c] += Count(masks.of[c] & changes[line].any);
        counts.by_one[kHalf * half + c] += Count(masks.of[c] & changes[line].by_one);
      }
    }
    for (int c = 0; c < kHalf; ++c) counts.all[kHalf * half + c] += all[c];
  }
}

void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts) {
  if (HWY_TARGET <= HWY_AVX3 && CanTranspose()) {
    return CountTransposed(first_exponent, base, next, num_lines, counts);
  }
  for (size_t line = 0; line < num_lines; line += kCountedLines) {
    CountFewClasses(first_exponent, base + line * kLine, next + line * kLine,
                    std::min(kCountedLines, num_lines - line), counts);
  }
}

HWY_INLINE void WriteGap(GapMean& mean, uint64_t gap, BitCursor& out) {
  const int k = mean.bits();
  const uint64_t zeros = gap >> k;
  if (HWY_LIKELY(zeros < GapMean::kMostZeros)) {
    const uint64_t low = gap & ((uint64_t{1} << k) - 1);
    out.Put((low << 1 | 1) << zeros, static_cast<int>(zeros) + 1 + k);
  } else {
    out.Put(gap << GapMean::kMostZeros, GapMean::kMostZeros + 32);
  }
  mean.Add(gap);
}

// `since` are the ranks since the last change.
void WriteGaps(GapMean& mean, uint64_t& since, const uint16_t* ranks, uint32_t num, uint32_t size,
               BitWriter& out) {
  if (num == 0) {
    since += size;
    return;
  }
  BitCursor cursor = out.Begin(num * 56);
  GapMean local = mean;
  WriteGap(local, since + ranks[0], cursor);
  for (uint32_t i = 1; i < num; ++i) {
    WriteGap(local, static_cast<uint64_t>(ranks[i] - ranks[i - 1]) - 1, cursor);
  }
  mean = local;
  since = size - uint64_t{ranks[num - 1]} - 1;
  out.End(cursor);
}

HWY_INLINE uint64_t ReadGap(int k, const uint8_t* data, size_t& at) {
  const uint64_t word = LoadBits(data, at);
  const int zeros = word == 0 ? 64 : __builtin_ctzll(word);
  if (HWY_UNLIKELY(zeros >= GapMean::kMostZeros)) {
    at += GapMean::kMostZeros + 32;
    return word >> GapMean::kMostZeros & 0xffffffff;
  }
  at += static_cast<size_t>(zeros + 1 + k);
  return static_cast<uint64_t>(zeros) << k | (word >> (zeros + 1) & ((uint64_t{1} << k) - 1));
}

// Reads the chunk's changes, or fewer once it came behind `size`, in bits.
void ReadGaps(GapPlace& place, const uint8_t* data, size_t size, const ChunkGroups& chunk,
              size_t group, uint64_t* changed) {
  const uint16_t* const begins = chunk.begins[group].data();
  const uint64_t* const masks = &chunk.masks[group];
  const uint64_t end = chunk.sizes[group];
  GapPlace p = place;
  while (p.next < end) {
    const size_t line = LinesTo(begins, p.next) - 1;
    const uint64_t one = uint64_t{1} << (p.next - begins[line]);
    changed[line] |= Deposit(one, masks[line * ChunkGroups::kSlots]);
    if (--p.left == 0) {
      p.next = UINT64_MAX;
      break;
    }
    const uint64_t gap = ReadGap(p.mean.bits(), data, p.at);
    p.next += 1 + gap;
    if (HWY_UNLIKELY(p.mean.Add(gap)) && p.at > size) break;
  }
  if (p.left > 0) p.next -= end;
  place = p;
}

// Before the first change.
void ReadFirstGap(GapPlace& place, const uint8_t* data) {
  place.next = ReadGap(place.mean.bits(), data, place.at);
  place.mean.Add(place.next);
}

void StreamElements(const uint16_t* elements, size_t count, uint16_t* out) {
  const auto* from = reinterpret_cast<const uint8_t*>(elements);
  auto* to = reinterpret_cast<uint8_t*>(out);
  size_t left = count * sizeof(uint16_t);
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
  const size_t head = std::min(left, -reinterpret_cast<uintptr_t>(to) % 32);
  std::memcpy(to, from, head);
  for (from += head, to += head, left -= head; left >= 32; from += 32, to += 32, left -= 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
#endif
  std::memcpy(to, from, left);
}

void FinishStream() {
#if HWY_ARCH_X86_64
  _mm_sfence();
#endif
}
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine {
HWY_EXPORT(CountClasses);
HWY_EXPORT(GatherRanks);
HWY_EXPORT(GroupLines);
HWY_EXPORT(StepLines);
HWY_EXPORT(StreamElements);
HWY_EXPORT(FinishStream);
HWY_EXPORT(WriteGaps);
HWY_EXPORT(ReadGaps);
HWY_EXPORT(ReadFirstGap);

void ClassGroups::SetGroups() {
  for (size_t e = 0; e < group_of.size(); ++e) {
    const uint8_t bit = bits[static_cast<size_t>(ClassOf(static_cast<uint16_t>(e << 7)))];
    group_of[e] = bit == 0 ? 0 : static_cast<uint8_t>(__builtin_ctz(bit));
  }
}

void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts) {
  HWY_DYNAMIC_DISPATCH(CountClasses)(first_exponent, base, next, num_lines, counts);
}
void GatherRanks(const ClassGroups& groups, const Lines& base, const uint16_t* next,
                 ChunkGroups& chunk, ChangedRanks& ranks, BitWriter& signs, uint64_t* others) {
  HWY_DYNAMIC_DISPATCH(GatherRanks)(groups, base, next, chunk, ranks, signs, others);
}
void GroupLines(const ClassGroups& groups, const Lines& base, ChunkGroups& chunk) {
  HWY_DYNAMIC_DISPATCH(GroupLines)(groups, base, chunk);
}
void StepLines(const Lines& base, const ChangedLines& changed, const uint8_t* signs,
               size_t& sign_at, uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(StepLines)(base, changed.data(), signs, sign_at, out);
}
void StreamElements(const uint16_t* elements, size_t count, uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(StreamElements)(elements, count, out);
}
void FinishStream() { HWY_DYNAMIC_DISPATCH(FinishStream)(); }

void GapWriter::Write(const uint16_t* ranks, uint32_t num, uint32_t size) {
  HWY_DYNAMIC_DISPATCH(WriteGaps)(mean_, since_, ranks, num, size, out_);
  num_changes_ += num;
}

GapReader::GapReader(int bits, uint64_t num_changes, absl::Span<const uint8_t> data)
    : place_{.mean = GapMean(bits), .next = UINT64_MAX, .left = num_changes}, data_(data) {
  if (num_changes > 0) HWY_DYNAMIC_DISPATCH(ReadFirstGap)(place_, data_.data());
}
bool GapReader::Read(const ChunkGroups& chunk, int group, ChangedLines& changed) {
  HWY_DYNAMIC_DISPATCH(ReadGaps)
  (place_, data_.data(), data_.size() * 8, chunk, static_cast<size_t>(group), changed.data());
  return place_.at <= data_.size() * 8;
}
bool GapReader::AtEnd() const {
  const size_t rest = data_.size() * 8 - place_.at;
  return place_.left == 0 && rest < 8 && (rest == 0 || data_.back() >> (8 - rest) == 0);
}
}  // namespace stretto::engine
#endif  // HWY_ONCE
