// What grid_lines.cc does with the vectors of each instruction set: masks of a line's elements by
// group, the comparison of two lines, steps, and bits side by side. Included once for each.
#if defined(ENGINE_WEIGHTS_GRID_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ENGINE_WEIGHTS_GRID_VECTORS_INL_H_
#undef ENGINE_WEIGHTS_GRID_VECTORS_INL_H_
#else
#define ENGINE_WEIGHTS_GRID_VECTORS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "engine/weights/grid_lines.h"
#include "hwy/highway.h"

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
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine
HWY_AFTER_NAMESPACE();

#endif  // ENGINE_WEIGHTS_GRID_VECTORS_INL_H_
