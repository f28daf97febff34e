#include "engine/weights/grid_scan.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/weights/grid_scan.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace stretto::engine {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
constexpr size_t kGroup = 1;
uint32_t GroupSum(const Hazards& hazards, const uint16_t* p) { return hazards.Of(*p); }
#else
namespace hn = hwy::HWY_NAMESPACE;
// 16 elements: their classes are the bytes of one register, the bytes of their hazards two tables
// of a register each.
constexpr size_t kGroup = 16;
using DB = hn::Full128<uint8_t>;
using DW = hn::Full128<uint16_t>;
using DI = hn::Full128<int16_t>;
using VB = hn::Vec<DB>;

struct Tables {
  explicit HWY_INLINE Tables(const Hazards& h)
      : first(hn::Set(DB(), h.first_exponent)),
        low(hn::LoadU(DB(), h.low)),
        high(hn::LoadU(DB(), h.high)) {}
  VB first, low, high;
};

HWY_INLINE hn::Vec<DI> Exponents(const uint16_t* p) {
  const auto bits = hn::ShiftRight<7>(hn::LoadU(DW(), p));
  return hn::BitCast(DI(), hn::And(bits, hn::Set(DW(), 0xff)));
}

HWY_INLINE uint32_t GroupSum(const Tables& t, const uint16_t* p) {
  const hn::Half<DB> half;
  const VB exponents =
      hn::Combine(DB(), hn::DemoteTo(half, Exponents(p + 8)), hn::DemoteTo(half, Exponents(p)));
  const VB classes =
      hn::Min(hn::SaturatedSub(exponents, t.first), hn::Set(DB(), uint8_t{kNumClasses - 1}));
  const auto low = hn::SumsOf8(hn::TableLookupBytes(t.low, classes));
  const auto high = hn::SumsOf8(hn::TableLookupBytes(t.high, classes));
  const auto sums = hn::Add(low, hn::ShiftLeft<8>(high));
  return static_cast<uint32_t>(hn::GetLane(hn::SumOfLanes(hn::Full128<uint64_t>(), sums)));
}

HWY_INLINE bool Same(const uint16_t* base, const uint16_t* next) {
  const DW d;
  const auto low = hn::Xor(hn::LoadU(d, base), hn::LoadU(d, next));
  const auto high = hn::Xor(hn::LoadU(d, base + 8), hn::LoadU(d, next + 8));
  return hn::AllTrue(d, hn::Eq(hn::Or(low, high), hn::Zero(d)));
}
#endif

void FindChanges(const uint16_t* base, const uint16_t* next, size_t n, size_t begin,
                 std::vector<uint32_t>& changed) {
  size_t i = 0;
  const auto one = [&](size_t j) {
    if (base[j] != next[j]) changed.push_back(static_cast<uint32_t>(begin + j));
  };
#if HWY_TARGET != HWY_SCALAR
  for (; i + 2 * kGroup <= n; i += 2 * kGroup) {
    if (HWY_LIKELY(Same(base + i, next + i) && Same(base + i + kGroup, next + i + kGroup))) {
      continue;
    }
    for (size_t j = i; j < i + 2 * kGroup; ++j) one(j);
  }
#endif
  for (; i < n; ++i) one(i);
}

uint64_t SumHazards(const Hazards& hazards, const uint16_t* elements, size_t n) {
  uint64_t sum = 0;
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const Tables tables(hazards);
  for (; i + kGroup <= n; i += kGroup) sum += GroupSum(tables, elements + i);
#endif
  for (; i < n; ++i) sum += hazards.Of(elements[i]);
  return sum;
}

size_t WalkHazards(const Hazards& hazards, const uint16_t* elements, size_t n, uint64_t& rest) {
  uint64_t left = rest;
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const Tables tables(hazards);
  for (; i + kGroup <= n; i += kGroup) {
    const uint32_t sum = GroupSum(tables, elements + i);
    if (sum > left) break;
    left -= sum;
  }
#endif
  for (; i < n; ++i) {
    const uint32_t hazard = hazards.Of(elements[i]);
    if (hazard > left) break;
    left -= hazard;
  }
  rest = left;
  return i;
}
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine {
HWY_EXPORT(FindChanges);
HWY_EXPORT(SumHazards);
HWY_EXPORT(WalkHazards);

void FindChanges(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next, size_t begin,
                 std::vector<uint32_t>& changed) {
  HWY_DYNAMIC_DISPATCH(FindChanges)(base.data(), next.data(), base.size(), begin, changed);
}
uint64_t SumHazards(const Hazards& hazards, absl::Span<const uint16_t> elements) {
  return HWY_DYNAMIC_DISPATCH(SumHazards)(hazards, elements.data(), elements.size());
}
size_t WalkHazards(const Hazards& hazards, absl::Span<const uint16_t> elements, uint64_t& rest) {
  return HWY_DYNAMIC_DISPATCH(WalkHazards)(hazards, elements.data(), elements.size(), rest);
}
}  // namespace stretto::engine
#endif  // HWY_ONCE
