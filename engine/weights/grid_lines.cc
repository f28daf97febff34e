#include "engine/weights/grid_lines.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/weights/grid_lines.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
#include <immintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace stretto::engine {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
void GroupLines(const ClassGroups& groups, const uint16_t* p, size_t num_lines, uint64_t* masks) {
  for (size_t line = 0; line < num_lines; ++line, p += kLine, masks += kMaskSlots) {
    std::fill_n(masks, kMaskSlots, 0);
    for (size_t i = 0; i < kLine; ++i) {
      const uint8_t of = groups.bits[static_cast<size_t>(groups.ClassOf(p[i]))];
      for (size_t g = 0; g < kMaskSlots; ++g) masks[g] |= uint64_t{of >> g & 1u} << i;
    }
  }
}

void CompareLines(const uint16_t* base, const uint16_t* next, size_t num_lines,
                  LineChanges* changes) {
  for (size_t line = 0; line < num_lines; ++line, base += kLine, next += kLine) {
    LineChanges& c = changes[line] = {};
    for (size_t i = 0; i < kLine; ++i) {
      const auto by = static_cast<uint16_t>(next[i] - base[i]);
      c.up |= uint64_t{by == 1} << i;
      c.down |= uint64_t{by == 0xffff} << i;
      c.changed |= uint64_t{by != 0} << i;
    }
  }
}

void StepLines(const uint16_t* base, const LineChanges* changes, size_t num_lines, uint16_t* out) {
  for (size_t line = 0; line < num_lines; ++line) {
    for (size_t i = 0; i < kLine; ++i) {
      const uint64_t by = (changes[line].up >> i & 1) - (changes[line].down >> i & 1);
      out[kLine * line + i] = static_cast<uint16_t>(base[kLine * line + i] + by);
    }
  }
}
#else
namespace hn = hwy::HWY_NAMESPACE;
// At most a line's bytes in a vector.
using DB = hn::CappedTag<uint8_t, kLine>;
using DW = hn::Repartition<uint16_t, DB>;
constexpr size_t kBytes = hn::MaxLanes(DB()), kWords = hn::MaxLanes(DW());
static_assert(kWords % 8 == 0);

template <class D, class Mask>
HWY_INLINE void PutMask(D d, Mask mask, uint64_t& word, size_t element) {
  hn::StoreMaskBits(d, mask, reinterpret_cast<uint8_t*>(&word) + element / 8);
}

template <int kSparse>
void GroupLinesOf(const ClassGroups& groups, const uint16_t* p, size_t num_lines, uint64_t* masks) {
  const DB d;
  const DW dw;
  const auto first = hn::Set(d, groups.first_exponent);
  const auto last = hn::Set(d, uint8_t{kNumClasses - 1});
  const auto table = hn::LoadDup128(d, groups.bits.data());
  for (size_t line = 0; line < num_lines; ++line, masks += kMaskSlots) {
    for (size_t i = 0; i < kLine; i += kBytes, p += kBytes) {
      // Without the sign, the exponent is the upper byte.
      const auto low = hn::BitCast(d, hn::Add(hn::LoadU(dw, p), hn::LoadU(dw, p)));
      const auto high =
          hn::BitCast(d, hn::Add(hn::LoadU(dw, p + kWords), hn::LoadU(dw, p + kWords)));
      const auto exponents = hn::ConcatOdd(d, high, low);
      const auto classes = hn::Min(hn::SaturatedSub(exponents, first), last);
      const auto of = hn::TableLookupBytes(table, classes);
      for (int g = 0; g < kSparse; ++g) {
        const auto bit = hn::Set(d, static_cast<uint8_t>(1 << g));
        PutMask(d, hn::TestBit(of, bit), masks[g], i);
      }
      PutMask(d, hn::TestBit(of, hn::Set(d, uint8_t{1 << kDenseGroup})), masks[kDenseGroup], i);
    }
  }
}

void GroupLines(const ClassGroups& groups, const uint16_t* p, size_t num_lines, uint64_t* masks) {
  switch (groups.num_sparse) {
    case 1:
      return GroupLinesOf<1>(groups, p, num_lines, masks);
    case 2:
      return GroupLinesOf<2>(groups, p, num_lines, masks);
    case 3:
      return GroupLinesOf<3>(groups, p, num_lines, masks);
    case 4:
      return GroupLinesOf<4>(groups, p, num_lines, masks);
    case 5:
      return GroupLinesOf<5>(groups, p, num_lines, masks);
    case 6:
      return GroupLinesOf<6>(groups, p, num_lines, masks);
    default:
      return GroupLinesOf<kDenseGroup>(groups, p, num_lines, masks);
  }
}

void CompareLines(const uint16_t* base, const uint16_t* next, size_t num_lines,
                  LineChanges* changes) {
  const DW d;
  const auto one = hn::Set(d, uint16_t{1}), minus_one = hn::Set(d, uint16_t{0xffff});
  for (size_t line = 0; line < num_lines; ++line) {
    LineChanges& c = changes[line];
    for (size_t i = 0; i < kLine; i += kWords, base += kWords, next += kWords) {
      const auto by = hn::Sub(hn::LoadU(d, next), hn::LoadU(d, base));
      PutMask(d, hn::Eq(by, one), c.up, i);
      PutMask(d, hn::Eq(by, minus_one), c.down, i);
      PutMask(d, hn::Ne(by, hn::Zero(d)), c.changed, i);
    }
  }
}

void StepLines(const uint16_t* base, const LineChanges* changes, size_t num_lines, uint16_t* out) {
  const DW d;
  const auto one = hn::Set(d, uint16_t{1});
  for (size_t line = 0; line < num_lines; ++line) {
    const auto* up = reinterpret_cast<const uint8_t*>(&changes[line].up);
    const auto* down = reinterpret_cast<const uint8_t*>(&changes[line].down);
    for (size_t i = 0; i < kLine; i += kWords, base += kWords, out += kWords) {
      auto v = hn::LoadU(d, base);
      v = hn::Add(v, hn::IfThenElseZero(hn::LoadMaskBits(d, up + i / 8), one));
      v = hn::Sub(v, hn::IfThenElseZero(hn::LoadMaskBits(d, down + i / 8), one));
      hn::StoreU(v, d, out);
    }
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
  for (; bits != 0; bits >>= 1, mask &= mask - 1) {
    if ((bits & 1) != 0) word |= mask & (~mask + 1);
  }
  return word;
#endif
}

HWY_INLINE uint32_t Count(uint64_t bits) {
  return static_cast<uint32_t>(__builtin_popcountll(bits));
}

template <int kSparse>
void GatherRanksOf(const uint64_t* masks, size_t num_lines, LineChanges* changes, GroupBits& bits,
                   GroupCounts& counts, BitWriter& signs) {
  uint32_t at[kSparse] = {};
  for (int g = 0; g < kSparse; ++g) bits[g][0] = 0;
  for (size_t line = 0; line < num_lines; ++line, masks += kMaskSlots) {
    LineChanges& c = changes[line];
    uint64_t all = 0;
    const uint64_t by_one = c.up | c.down;
    for (int g = 0; g < kSparse; ++g) {
      const uint64_t mask = masks[g], ranks = Extract(by_one, mask);
      uint64_t* const word = &bits[g][at[g] / 64];
      const uint32_t shift = at[g] % 64;
      word[0] |= ranks << shift;
      word[1] = ranks >> 1 >> (63 - shift);
      at[g] += Count(mask);
      all |= mask;
    }
    const uint64_t told = by_one & all, up = Extract(c.up, told);
    const auto num_told = static_cast<int>(Count(told));
    if (HWY_LIKELY(num_told <= 56)) {
      signs.Put(up, num_told);
    } else {
      signs.Put(up & 0xffffffff, 32);
      signs.Put(up >> 32, num_told - 32);
    }
    c.changed &= ~told;
  }
  for (int g = 0; g < kSparse; ++g) counts[g] = at[g];
}

void GatherRanks(int num_sparse, const uint64_t* masks, size_t num_lines, LineChanges* changes,
                 GroupBits& bits, GroupCounts& counts, BitWriter& signs) {
  switch (num_sparse) {
    case 1:
      return GatherRanksOf<1>(masks, num_lines, changes, bits, counts, signs);
    case 2:
      return GatherRanksOf<2>(masks, num_lines, changes, bits, counts, signs);
    case 3:
      return GatherRanksOf<3>(masks, num_lines, changes, bits, counts, signs);
    case 4:
      return GatherRanksOf<4>(masks, num_lines, changes, bits, counts, signs);
    case 5:
      return GatherRanksOf<5>(masks, num_lines, changes, bits, counts, signs);
    default:
      return GatherRanksOf<6>(masks, num_lines, changes, bits, counts, signs);
  }
}

void CountGroups(int num_sparse, const uint64_t* masks, size_t num_lines, GroupCounts& counts) {
  counts = {};
  for (size_t line = 0; line < num_lines; ++line, masks += kMaskSlots) {
    for (int g = 0; g < num_sparse; ++g) counts[g] += Count(masks[g]);
  }
}

template <int kSparse>
size_t ScatterRanksOf(const uint64_t* masks, size_t num_lines, const GroupBits& bits,
                      const uint8_t* signs, size_t sign_at, LineChanges* changes) {
  uint32_t at[kSparse] = {};
  for (size_t line = 0; line < num_lines; ++line, masks += kMaskSlots) {
    uint64_t changed = 0;
    for (int g = 0; g < kSparse; ++g) {
      const uint64_t mask = masks[g];
      const uint64_t* const word = &bits[g][at[g] / 64];
      const uint32_t shift = at[g] % 64;
      changed |= Deposit(word[0] >> shift | word[1] << 1 << (63 - shift), mask);
      at[g] += Count(mask);
    }
    const uint64_t up = Deposit(LoadWordAt(signs, sign_at), changed);
    changes[line].up = up;
    changes[line].down = changed & ~up;
    sign_at += Count(changed);
  }
  return sign_at;
}

size_t ScatterRanks(int num_sparse, const uint64_t* masks, size_t num_lines, const GroupBits& bits,
                    const uint8_t* signs, size_t sign_at, LineChanges* changes) {
  switch (num_sparse) {
    case 1:
      return ScatterRanksOf<1>(masks, num_lines, bits, signs, sign_at, changes);
    case 2:
      return ScatterRanksOf<2>(masks, num_lines, bits, signs, sign_at, changes);
    case 3:
      return ScatterRanksOf<3>(masks, num_lines, bits, signs, sign_at, changes);
    case 4:
      return ScatterRanksOf<4>(masks, num_lines, bits, signs, sign_at, changes);
    case 5:
      return ScatterRanksOf<5>(masks, num_lines, bits, signs, sign_at, changes);
    default:
      return ScatterRanksOf<6>(masks, num_lines, bits, signs, sign_at, changes);
  }
}

// The places of the ones among the first n bits; `places` has room for four more.
size_t Places(const uint64_t* bits, size_t n, uint16_t* places) {
  size_t count = 0;
  for (size_t at = 0; at < n; at += 64) {
    uint64_t word = bits[at / 64];
    const uint32_t in_word = Count(word);
    uint16_t* put = places + count;
    count += in_word;
    // Mostly there are few: so many are written whether they are there or not.
    for (int i = 0; i < 4; ++i, word &= word - 1) {
      put[i] = static_cast<uint16_t>(at + static_cast<size_t>(__builtin_ctzll(word | 1ull << 63)));
    }
    for (put += 4; word != 0; word &= word - 1) {
      *put++ = static_cast<uint16_t>(at + static_cast<size_t>(__builtin_ctzll(word)));
    }
  }
  return count;
}

void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts) {
  constexpr int kHalf = kNumClasses / 2;
  LineMasks masks;
  LineChanges changes[kChunkLines];
  HWY_NAMESPACE::CompareLines(base, next, num_lines, changes);
  for (int half = 0; half < 2; ++half) {
    ClassGroups groups{.first_exponent = first_exponent, .num_sparse = kHalf - 1};
    for (int c = 0; c < kHalf; ++c) groups.bits[kHalf * half + c] = static_cast<uint8_t>(1u << c);
    GroupLines(groups, base, num_lines, masks.data());
    for (size_t line = 0; line < num_lines; ++line) {
      for (int c = 0; c < kHalf; ++c) {
        const uint64_t mask = masks[kMaskSlots * line + c];
        counts.all[kHalf * half + c] += Count(mask);
        counts.changed[kHalf * half + c] += Count(mask & changes[line].changed);
        counts.by_one[kHalf * half + c] += Count(mask & (changes[line].up | changes[line].down));
      }
    }
  }
}

void WriteGap(GapMean& mean, uint64_t gap, BitWriter& out) {
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

// Those of places in the next `count` ranks; `since` are the ranks since the last change.
void WriteGaps(GapMean& mean, uint64_t& since, const uint64_t* bits, uint32_t count,
               BitWriter& out) {
  uint16_t places[kChunk + 4];
  const size_t num = Places(bits, count, places);
  if (num == 0) {
    since += count;
    return;
  }
  out.Reserve((num + 1) * 56);
  GapMean local = mean;
  WriteGap(local, since + places[0], out);
  for (size_t i = 1; i < num; ++i) {
    WriteGap(local, static_cast<uint64_t>(places[i] - places[i - 1]) - 1, out);
  }
  mean = local;
  since = count - uint64_t{places[num - 1]} - 1;
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

bool ReadGaps(GapMean& mean, const uint8_t* data, size_t& at, size_t end, uint64_t& next,
              uint32_t count, uint64_t* bits) {
  std::fill_n(bits, count / 64 + 2, 0);
  GapMean local = mean;
  uint64_t rank = next;
  size_t place = at;
  bool ok = true;
  while (rank < count) {
    bits[rank / 64] |= uint64_t{1} << (rank % 64);
    const uint64_t gap = ReadGap(local.bits(), data, place);
    rank += 1 + gap;
    if (HWY_UNLIKELY(local.Add(gap)) && place > end) {
      ok = false;
      break;
    }
  }
  mean = local;
  next = rank - count;
  at = place;
  return ok && place <= end;
}
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine {
HWY_EXPORT(GroupLines);
HWY_EXPORT(CompareLines);
HWY_EXPORT(StepLines);
HWY_EXPORT(CountClasses);
HWY_EXPORT(GatherRanks);
HWY_EXPORT(CountGroups);
HWY_EXPORT(ScatterRanks);
HWY_EXPORT(WriteGap);
HWY_EXPORT(WriteGaps);
HWY_EXPORT(ReadGaps);

void GroupLines(const ClassGroups& groups, const uint16_t* elements, size_t num_lines,
                LineMasks& masks) {
  HWY_DYNAMIC_DISPATCH(GroupLines)(groups, elements, num_lines, masks.data());
}
void CompareLines(const uint16_t* base, const uint16_t* next, size_t num_lines,
                  LineChanges* changes) {
  HWY_DYNAMIC_DISPATCH(CompareLines)(base, next, num_lines, changes);
}
void StepLines(const uint16_t* base, const LineChanges* changes, size_t num_lines, uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(StepLines)(base, changes, num_lines, out);
}
void CountClasses(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                  size_t num_lines, ClassCounts& counts) {
  HWY_DYNAMIC_DISPATCH(CountClasses)(first_exponent, base, next, num_lines, counts);
}
void GatherRanks(int num_sparse, const LineMasks& masks, size_t num_lines, LineChanges* changes,
                 GroupBits& bits, GroupCounts& counts, BitWriter& signs) {
  if (num_sparse == 0) return;
  signs.Reserve(num_lines * kLine);
  HWY_DYNAMIC_DISPATCH(GatherRanks)
  (num_sparse, masks.data(), num_lines, changes, bits, counts, signs);
}
void CountGroups(int num_sparse, const LineMasks& masks, size_t num_lines, GroupCounts& counts) {
  HWY_DYNAMIC_DISPATCH(CountGroups)(num_sparse, masks.data(), num_lines, counts);
}
void ScatterRanks(int num_sparse, const LineMasks& masks, size_t num_lines, const GroupBits& bits,
                  const uint8_t* signs, size_t& sign_at, LineChanges* changes) {
  if (num_sparse == 0) {
    std::fill_n(changes, num_lines, LineChanges{});
    return;
  }
  sign_at = HWY_DYNAMIC_DISPATCH(ScatterRanks)(num_sparse, masks.data(), num_lines, bits, signs,
                                               sign_at, changes);
}

void GapWriter::Write(const RankBits& bits, uint32_t count) {
  HWY_DYNAMIC_DISPATCH(WriteGaps)(mean_, since_, bits.data(), count, out_);
}
Bytes GapWriter::Finish() {
  out_.Reserve(56);
  HWY_DYNAMIC_DISPATCH(WriteGap)(mean_, since_, out_);
  return out_.Finish();
}

GapReader::GapReader(int bits, const uint8_t* data, size_t begin, size_t end)
    : mean_(bits), data_(data), at_(begin), end_(end) {
  // As if a change before the first rank came first.
  RankBits first;
  next_ = 0;
  Read(1, first);
}
bool GapReader::Read(uint32_t count, RankBits& bits) {
  return HWY_DYNAMIC_DISPATCH(ReadGaps)(mean_, data_, at_, end_, next_, count, bits.data());
}
bool GapReader::AtEnd() const {
  return next_ == 0 && at_ <= end_ && end_ - at_ < 8 &&
         (LoadBits(data_, at_) & ((1u << (end_ - at_)) - 1)) == 0;
}
}  // namespace stretto::engine
#endif  // HWY_ONCE
