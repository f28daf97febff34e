#include "engine/weights/grid_scan.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/weights/grid_scan.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace stretto::engine {
namespace HWY_NAMESPACE {
// Writes to `places`, which has room for all of them; their number. `Test(d, i)` gives the mask of
// the lanes from element i on, `one(i)` the same of one element.
#if HWY_TARGET == HWY_SCALAR
template <class One>
size_t Places(size_t n, size_t begin, uint32_t* places, const One& one) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    places[count] = static_cast<uint32_t>(begin + i);
    count += one(i) ? 1 : 0;
  }
  return count;
}

size_t FindChanges(const uint16_t* base, const uint16_t* next, size_t n, size_t begin,
                   uint32_t* places) {
  return Places(n, begin, places, [&](size_t i) { return base[i] != next[i]; });
}

size_t ScanGroups(const Hazards& h, const uint16_t* p, size_t n, uint32_t* sums, uint32_t* dense,
                  uint16_t* copy) {
  for (size_t i = 0; i < n; ++i) {
    if (copy != nullptr) copy[i] = p[i];
    if (i % kGroup == 0) sums[i / kGroup] = 0;
    sums[i / kGroup] += h.Of(p[i]);
  }
  return Places(n, 0, dense, [&](size_t i) { return h.dense[h.ClassOf(p[i])] != 0; });
}
#else
namespace hn = hwy::HWY_NAMESPACE;
using DW = hn::CappedTag<uint16_t, 16>;
using DB = hn::Repartition<uint8_t, DW>;
using VB = hn::Vec<DB>;
constexpr size_t kLanes = hn::MaxLanes(DW());
static_assert(kGroup % (2 * kLanes) == 0);

template <class Mask>
HWY_INLINE uint32_t Bits(Mask mask) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(DW(), mask, bytes);
  return bytes[0] | uint32_t{bytes[1]} << 8;
}

HWY_INLINE size_t PutPlaces(uint32_t bits, size_t begin, uint32_t* places) {
  size_t count = 0;
  for (; bits != 0; bits &= bits - 1) {
    places[count++] = static_cast<uint32_t>(begin + static_cast<size_t>(__builtin_ctz(bits)));
  }
  return count;
}

size_t FindChanges(const uint16_t* base, const uint16_t* next, size_t n, size_t begin,
                   uint32_t* places) {
  const DW d;
  size_t i = 0, count = 0;
  const auto differ = [&](size_t j) {
    return hn::Xor(hn::LoadU(d, base + j), hn::LoadU(d, next + j));
  };
  const auto put = [&](size_t j, hn::Vec<DW> difference) {
    const uint32_t bits = Bits(hn::Ne(difference, hn::Zero(d)));
    count += PutPlaces(bits, begin + j, places + count);
  };
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const auto a = differ(i), b = differ(i + kLanes);
    if (HWY_LIKELY(hn::AllTrue(d, hn::Eq(hn::Or(a, b), hn::Zero(d))))) continue;
    put(i, a);
    put(i + kLanes, b);
  }
  for (; i < n; ++i) {
    if (base[i] != next[i]) places[count++] = static_cast<uint32_t>(begin + i);
  }
  return count;
}

// The classes of 2·kLanes elements, one a byte, in no particular order.
HWY_INLINE VB Classes(VB first, hn::Vec<DW> a, hn::Vec<DW> b) {
  const DW d;
  const auto low = hn::And(hn::ShiftRight<7>(a), hn::Set(d, 0x00ff));
  const auto high = hn::And(hn::ShiftLeft<1>(b), hn::Set(d, 0xff00));
  const VB exponents = hn::BitCast(DB(), hn::Or(low, high));
  return hn::Min(hn::SaturatedSub(exponents, first), hn::Set(DB(), uint8_t{kNumClasses - 1}));
}

template <bool kCopy>
size_t Scan(const Hazards& h, const uint16_t* p, size_t n, uint32_t* sums, uint32_t* dense,
            uint16_t* copy) {
  const DW d;
  const hn::Repartition<uint64_t, DW> d64;
  const VB first = hn::Set(DB(), h.first_exponent), is_dense = hn::LoadDup128(DB(), h.dense.data());
  const VB low_bytes = hn::LoadDup128(DB(), h.low.data());
  const VB high_bytes = hn::LoadDup128(DB(), h.high.data());
  size_t i = 0, count = 0;
  for (; i + kGroup <= n; i += kGroup) {
    auto sum = hn::Zero(d64);
    for (size_t j = i; j < i + kGroup; j += 2 * kLanes) {
      const auto a = hn::LoadU(d, p + j), b = hn::LoadU(d, p + j + kLanes);
      if (kCopy) {
        hn::StoreU(a, d, copy + j);
        hn::StoreU(b, d, copy + j + kLanes);
      }
      const VB classes = Classes(first, a, b);
      const auto low = hn::SumsOf8(hn::TableLookupBytes(low_bytes, classes));
      const auto high = hn::SumsOf8(hn::TableLookupBytes(high_bytes, classes));
      sum = hn::Add(sum, hn::Add(low, hn::ShiftLeft<8>(high)));
      const auto found = hn::BitCast(d, hn::TableLookupBytes(is_dense, classes));
      if (HWY_LIKELY(hn::AllTrue(d, hn::Eq(found, hn::Zero(d))))) continue;
      const uint32_t in_low = Bits(hn::Ne(hn::And(found, hn::Set(d, 0x00ff)), hn::Zero(d)));
      const uint32_t in_high = Bits(hn::Ne(hn::ShiftRight<8>(found), hn::Zero(d)));
      count += PutPlaces(in_low, j, dense + count);
      count += PutPlaces(in_high, j + kLanes, dense + count);
    }
    sums[i / kGroup] = static_cast<uint32_t>(hn::GetLane(hn::SumOfLanes(d64, sum)));
  }
  if (i == n) return count;
  uint32_t& last = sums[i / kGroup] = 0;
  for (; i < n; ++i) {
    if (kCopy) copy[i] = p[i];
    last += h.Of(p[i]);
    if (h.dense[h.ClassOf(p[i])] != 0) dense[count++] = static_cast<uint32_t>(i);
  }
  return count;
}

size_t ScanGroups(const Hazards& h, const uint16_t* p, size_t n, uint32_t* sums, uint32_t* dense,
                  uint16_t* copy) {
  return copy != nullptr ? Scan<true>(h, p, n, sums, dense, copy)
                         : Scan<false>(h, p, n, sums, dense, copy);
}
#endif
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine {
HWY_EXPORT(FindChanges);
HWY_EXPORT(ScanGroups);

Hazards::Hazards(uint8_t first, const std::array<uint8_t, kNumClasses>& class_codes)
    : first_exponent(first), codes(class_codes) {
  std::array<uint32_t, kNumClasses> hazards = {};
  for (int c = 0; c < kNumClasses; ++c) {
    dense[c] = codes[c] == kDenseCode ? 0xff : 0;
    if (codes[c] != 0 && dense[c] == 0) hazards[c] = HazardOfCode(codes[c]);
    low[c] = static_cast<uint8_t>(hazards[c]);
    high[c] = static_cast<uint8_t>(hazards[c] >> 8);
  }
  for (size_t e = 0; e < by_exponent.size(); ++e) {
    by_exponent[e] = hazards[ClassOf(static_cast<uint16_t>(e << 7))];
  }
}

namespace {
constexpr size_t kPiece = 4096;
using Places = std::array<uint32_t, kPiece>;
}  // namespace

void FindChanges(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next,
                 std::vector<GridChange>& changes) {
  Places found;
  for (size_t at = 0; at < base.size(); at += kPiece) {
    const size_t size = std::min(kPiece, base.size() - at);
    const size_t count = HWY_DYNAMIC_DISPATCH(FindChanges)(base.data() + at, next.data() + at, size,
                                                           at, found.data());
    for (size_t i = 0; i < count; ++i) {
      changes.push_back({found[i], base[found[i]], next[found[i]]});
    }
  }
}

size_t ScanGroups(const Hazards& hazards, absl::Span<const uint16_t> elements, uint32_t* sums,
                  uint32_t* dense, uint16_t* copy) {
  return HWY_DYNAMIC_DISPATCH(ScanGroups)(hazards, elements.data(), elements.size(), sums, dense,
                                          copy);
}
}  // namespace stretto::engine
#endif  // HWY_ONCE
