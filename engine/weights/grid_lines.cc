#include "engine/weights/grid_lines.h"

#include <algorithm>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/weights/grid_lines.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#if HWY_ARCH_X86_64
#include <immintrin.h>
#endif

// Loops over groups are unrolled, so that what they count stays in registers.
#undef STRETTO_UNROLL
#define STRETTO_UNROLL _Pragma("GCC unroll 8")

HWY_BEFORE_NAMESPACE();
namespace stretto::engine {
namespace HWY_NAMESPACE {
// Of a line.
template <int kSparse>
struct GroupMasks {
  uint64_t of[kSparse + 1];
  uint64_t dense;
};
struct Changes {
  uint64_t by_one, any;  // by 1 or −1 modulo 2^16; by anything but 0
};

#if HWY_TARGET == HWY_SCALAR
class LineReader {
 public:
  explicit LineReader(const ClassGroups& groups) : groups_(groups) {}

  template <int kSparse>
  GroupMasks<kSparse> Masks(const uint16_t* p) const {
    GroupMasks<kSparse> masks = {};
    for (size_t i = 0; i < kLine; ++i) {
      const uint32_t of = groups_.bits[static_cast<size_t>(groups_.ClassOf(p[i]))];
      for (int g = 0; g < kSparse; ++g) masks.of[g] |= uint64_t{of >> g & 1} << i;
      masks.dense |= uint64_t{of >> kDenseGroup & 1} << i;
    }
    return masks;
  }

 private:
  const ClassGroups& groups_;
};

Changes Compare(const uint16_t* base, const uint16_t* next) {
  Changes c = {};
  for (size_t i = 0; i < kLine; ++i) {
    const auto by = static_cast<uint16_t>(next[i] - base[i]);
    c.by_one |= uint64_t{by == 1 || by == 0xffff} << i;
    c.any |= uint64_t{by != 0} << i;
  }
  return c;
}

size_t LinesTo(const uint16_t* begins, uint64_t rank) {
  return static_cast<size_t>(std::upper_bound(begins, begins + kChunkLines, rank) - begins);
}

void Step(const uint16_t* base, uint64_t up, uint64_t down, uint16_t* out) {
  for (size_t i = 0; i < kLine; ++i) {
    out[i] = static_cast<uint16_t>(base[i] + (up >> i & 1) - (down >> i & 1));
  }
}
#else
namespace hn = hwy::HWY_NAMESPACE;
// At most a line's bytes in a vector.
using DB = hn::CappedTag<uint8_t, kLine>;
using DW = hn::Repartition<uint16_t, DB>;
constexpr size_t kBytes = hn::MaxLanes(DB()), kWords = hn::MaxLanes(DW());
static_assert(kWords % 8 == 0);

// A mask's bits, in an integer of their number, which needs no memory on the way.
template <size_t kLanes>
using MaskBits =
    std::conditional_t<kLanes == 64, uint64_t,
                       std::conditional_t<kLanes == 32, uint32_t,
                                          std::conditional_t<kLanes == 16, uint16_t, uint8_t> > >;
template <class D>
HWY_INLINE uint64_t BitsOf(D d, hn::Mask<D> mask) {
  MaskBits<hn::MaxLanes(D())> bits;
  hn::StoreMaskBits(d, mask, reinterpret_cast<uint8_t*>(&bits));
  return bits;
}
template <class D>
HWY_INLINE hn::Mask<D> MaskOf(D d, uint64_t word) {
  const auto bits = static_cast<MaskBits<hn::MaxLanes(D())> >(word);
  return hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
}

class LineReader {
 public:
  explicit LineReader(const ClassGroups& groups)
      : first_(hn::Set(DB(), groups.first_exponent)),
        table_(hn::LoadDup128(DB(), groups.bits.data())) {}

  template <int kSparse>
  HWY_INLINE GroupMasks<kSparse> Masks(const uint16_t* p) const {
    const DB d;
    const DW dw;
    GroupMasks<kSparse> masks = {};
    for (size_t i = 0; i < kLine; i += kBytes, p += kBytes) {
      // Without the sign, the exponent is the upper byte.
      const auto a = hn::LoadU(dw, p), b = hn::LoadU(dw, p + kWords);
      const auto exponents =
          hn::ConcatOdd(d, hn::BitCast(d, hn::Add(b, b)), hn::BitCast(d, hn::Add(a, a)));
      const auto classes =
          hn::Min(hn::SaturatedSub(exponents, first_), hn::Set(d, uint8_t{kNumClasses - 1}));
      const auto of = hn::TableLookupBytes(table_, classes);
      STRETTO_UNROLL for (int g = 0; g < kSparse; ++g) {
        const auto bit = hn::Set(d, static_cast<uint8_t>(1 << g));
        masks.of[g] |= BitsOf(d, hn::TestBit(of, bit)) << i;
      }
      masks.dense |= BitsOf(d, hn::TestBit(of, hn::Set(d, uint8_t{1 << kDenseGroup}))) << i;
    }
    return masks;
  }

 private:
  const hn::Vec<DB> first_, table_;
};

HWY_INLINE Changes Compare(const uint16_t* base, const uint16_t* next) {
  const DW d;
#if HWY_TARGET <= HWY_AVX3
  // As signed bytes, of which small numbers stay what they are and no other becomes one.
  const auto a = hn::Sub(hn::LoadU(d, next), hn::LoadU(d, base));
  const auto b = hn::Sub(hn::LoadU(d, next + kWords), hn::LoadU(d, base + kWords));
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const hn::Vec<DB> by{
      _mm512_maskz_permutexvar_epi64(0xff, order, _mm512_packs_epi16(a.raw, b.raw))};
  const DB db;
  const hn::RebindToSigned<DB> signed_bytes;
  const auto size = hn::BitCast(db, hn::Abs(hn::BitCast(signed_bytes, by)));
  return {BitsOf(db, hn::Eq(size, hn::Set(db, uint8_t{1}))), BitsOf(db, hn::Ne(by, hn::Zero(db)))};
#else
  Changes c = {};
  for (size_t i = 0; i < kLine; i += kWords) {
    const auto by = hn::Sub(hn::LoadU(d, next + i), hn::LoadU(d, base + i));
    const auto size = hn::Abs(hn::BitCast(hn::RebindToSigned<DW>(), by));
    c.by_one |= BitsOf(d, hn::Eq(hn::BitCast(d, size), hn::Set(d, uint16_t{1}))) << i;
    c.any |= BitsOf(d, hn::Ne(by, hn::Zero(d))) << i;
  }
  return c;
#endif
}

// How many of a group's lines begin at this rank or before.
HWY_INLINE size_t LinesTo(const uint16_t* begins, uint64_t rank) {
  const hn::RebindToSigned<DW> d;
  const auto limit = hn::Set(d, static_cast<int16_t>(rank));
  size_t after = 0;
  for (size_t i = 0; i < kChunkLines; i += kWords) {
    const auto begin = hn::Load(d, reinterpret_cast<const int16_t*>(begins + i));
    after += hn::CountTrue(d, hn::Gt(begin, limit));
  }
  return kChunkLines - after;
}

HWY_INLINE void Step(const uint16_t* base, uint64_t up, uint64_t down, uint16_t* out) {
  const DW d;
  const auto one = hn::Set(d, uint16_t{1});
  for (size_t i = 0; i < kLine; i += kWords) {
    auto v = hn::LoadU(d, base + i);
    v = hn::Add(v, hn::IfThenElseZero(MaskOf(d, up >> i), one));
    v = hn::Sub(v, hn::IfThenElseZero(MaskOf(d, down >> i), one));
    hn::StoreU(v, d, out + i);
  }
}
#endif

// The bits of `word` where `mask` has ones, side by side; and back.
HWY_INLINE uint64_t Extract(uint64_t word, uint64_t mask) {
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
  return _pext_u64(word, mask);
#else
  uint64_t bits = 0;
  for (word &= mask; word != 0; word &= word - 1) {
    const uint64_t below = (word & (~word + 1)) - 1;
    bits |= uint64_t{1} << __builtin_popcountll(mask & below);
  }
  return bits;
#endif
}
HWY_INLINE uint64_t Deposit(uint64_t bits, uint64_t mask) {
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
  return _pdep_u64(bits, mask);
#else
  uint64_t word = 0;
  for (; bits != 0 && mask != 0; bits >>= 1, mask &= mask - 1) {
    if ((bits & 1) != 0) word |= mask & (~mask + 1);
  }
  return word;
#endif
}

HWY_INLINE uint32_t Count(uint64_t bits) {
  return static_cast<uint32_t>(__builtin_popcountll(bits));
}
// Below the lowest one, of which there is one.
HWY_INLINE size_t CountZeros(uint64_t bits) { return static_cast<size_t>(__builtin_ctzll(bits)); }

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

// A chunk's changes by one, in sparse groups: of `num` lines that have some.
struct OneSteps {
  uint64_t masks[kChunkLines];  // of the num first
  uint16_t lines[kChunkLines];  // not bytes, which could be anything to a compiler
  size_t num;
};

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
  CompareLines(groups, base, next, chunk, steps, others);
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
    ranks.of[g][ranks.num[g]++] = static_cast<uint16_t>(chunk.begins[g][line] + Count(before));
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

void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts) {
  constexpr int kHalf = kNumClasses / 2;
  for (int half = 0; half < 2; ++half) {
    ClassGroups groups{.first_exponent = first_exponent, .bits = {}, .num_sparse = kHalf - 1};
    for (int c = 0; c < kHalf; ++c) groups.bits[kHalf * half + c] = static_cast<uint8_t>(1u << c);
    const LineReader reader(groups);
    for (size_t line = 0; line < num_lines; ++line) {
      auto masks = reader.template Masks<kHalf - 1>(base + line * kLine);
      masks.of[kHalf - 1] = masks.dense;
      const Changes changes = Compare(base + line * kLine, next + line * kLine);
      STRETTO_UNROLL for (int c = 0; c < kHalf; ++c) {
        const uint64_t mask = masks.of[c];
        counts.all[kHalf * half + c] += Count(mask);
        counts.changed[kHalf * half + c] += Count(mask & changes.any);
        counts.by_one[kHalf * half + c] += Count(mask & changes.by_one);
      }
    }
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
