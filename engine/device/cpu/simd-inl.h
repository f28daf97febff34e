// What the kernels share: groups of 16 floats (one per partial sum of device.h) as vectors of the
// target's width, loads and stores with conversion, and exp and log whose bits don't depend on the
// width. Included once for each Highway target.
#if defined(STRETTO_ENGINE_DEVICE_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRETTO_ENGINE_DEVICE_CPU_SIMD_INL_H_
#undef STRETTO_ENGINE_DEVICE_CPU_SIMD_INL_H_
#else
#define STRETTO_ENGINE_DEVICE_CPU_SIMD_INL_H_
#endif

#include "engine/device/cpu/kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using DU = hn::Rebind<uint32_t, D>;
using DI = hn::Rebind<int32_t, D>;
using DH = hn::Rebind<uint16_t, D>;
using V = hn::Vec<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
constexpr int kVectors = 16 / kLanes;  // vectors that make 16 floats

#if HWY_NATIVE_FMA
constexpr bool kHaveFma = true;
#else
constexpr bool kHaveFma = false;
#endif

// a·b + c, fused or in two roundings.
template <bool kFma>
HWY_INLINE V MultiplyAdd(V a, V b, V c) {
  if constexpr (kFma) {
    return hn::MulAdd(a, b, c);
  } else {
    return hn::Add(hn::Mul(a, b), c);
  }
}

HWY_INLINE V Set(float x) { return hn::Set(D(), x); }

HWY_INLINE V WidenBf16(const uint16_t* p) {
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(DH(), p))));
}

// Rounds to nearest even as F32ToBf16 does; the result stands in the upper 16 bits.
HWY_INLINE hn::Vec<DU> RoundToBf16Bits(V x) {
  const DU du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  // Eq is false for NaN on every target; Ne is not true for it on all.
  const auto is_number = hn::RebindMask(du, hn::Eq(x, x));
  return hn::IfThenElse(is_number, rounded, quiet);
}

HWY_INLINE V RoundToBf16(V x) {
  return hn::BitCast(D(), hn::And(RoundToBf16Bits(x), hn::Set(DU(), 0xffff0000u)));
}

HWY_INLINE void NarrowBf16(V x, uint16_t* p) {
  const auto high = hn::ShiftRight<16>(RoundToBf16Bits(x));
  hn::StoreU(hn::DemoteTo(DH(), hn::BitCast(DI(), high)), DH(), p);
}

// 16 floats.
struct F16 {
  V v[kVectors];
};

HWY_INLINE F16 Set16(float x) {
  F16 r;
  for (int i = 0; i < kVectors; ++i) r.v[i] = Set(x);
  return r;
}
HWY_INLINE F16 Load16(const float* p) {
  F16 r;
  for (int i = 0; i < kVectors; ++i) r.v[i] = hn::LoadU(D(), p + i * kLanes);
  return r;
}
HWY_INLINE void Store16(const F16& x, float* p) {
  for (int i = 0; i < kVectors; ++i) hn::StoreU(x.v[i], D(), p + i * kLanes);
}
HWY_INLINE F16 Load16(Source s, int64_t i) {
  F16 r;
  if (s.bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(s.data) + i;
    for (int j = 0; j < kVectors; ++j) r.v[j] = WidenBf16(p + j * kLanes);
    return r;
  }
  return Load16(static_cast<const float*>(s.data) + i);
}
HWY_INLINE void Store16(const F16& x, Sink s, int64_t i) {
  if (s.bf16) {
    uint16_t* p = static_cast<uint16_t*>(s.data) + i;
    for (int j = 0; j < kVectors; ++j) NarrowBf16(x.v[j], p + j * kLanes);
    return;
  }
  Store16(x, static_cast<float*>(s.data) + i);
}

// The n < 16 elements from i on; the others are `fill`.
HWY_INLINE F16 LoadTail16(Source s, int64_t i, int64_t n, float fill) {
  HWY_ALIGN float wide[16];
  for (int j = 0; j < 16; ++j) wide[j] = fill;
  if (s.bf16) {
    HWY_ALIGN uint16_t narrow[16] = {};
    for (int64_t j = 0; j < n; ++j) narrow[j] = static_cast<const uint16_t*>(s.data)[i + j];
    HWY_ALIGN float widened[16];
    Store16(Load16(Source{narrow, true}, 0), widened);
    for (int64_t j = 0; j < n; ++j) wide[j] = widened[j];
  } else {
    for (int64_t j = 0; j < n; ++j) wide[j] = static_cast<const float*>(s.data)[i + j];
  }
  return Load16(wide);
}
HWY_INLINE void StoreTail16(const F16& x, Sink s, int64_t i, int64_t n) {
  if (s.bf16) {
    HWY_ALIGN uint16_t narrow[16];
    Store16(x, Sink{narrow, true}, 0);
    for (int64_t j = 0; j < n; ++j) static_cast<uint16_t*>(s.data)[i + j] = narrow[j];
  } else {
    HWY_ALIGN float wide[16];
    Store16(x, wide);
    for (int64_t j = 0; j < n; ++j) static_cast<float*>(s.data)[i + j] = wide[j];
  }
}
// Elements [i, min(i + 16, n)).
HWY_INLINE F16 LoadUpTo16(Source s, int64_t i, int64_t n, float fill = 0.0f) {
  return n - i >= 16 ? Load16(s, i) : LoadTail16(s, i, n - i, fill);
}
HWY_INLINE void StoreUpTo16(const F16& x, Sink s, int64_t i, int64_t n) {
  if (n - i >= 16) {
    Store16(x, s, i);
  } else {
    StoreTail16(x, s, i, n - i);
  }
}
HWY_INLINE F16 LoadUpTo16(const float* p, int64_t i, int64_t n, float fill = 0.0f) {
  return LoadUpTo16(Source{p, false}, i, n, fill);
}
HWY_INLINE void StoreUpTo16(const F16& x, float* p, int64_t i, int64_t n) {
  StoreUpTo16(x, Sink{p, false}, i, n);
}

#define STRETTO_LANEWISE(NAME, OP)                                      \
  HWY_INLINE F16 NAME(const F16& a, const F16& b) {                     \
    F16 r;                                                              \
    for (int i = 0; i < kVectors; ++i) r.v[i] = hn::OP(a.v[i], b.v[i]); \
    return r;                                                           \
  }
STRETTO_LANEWISE(Add16, Add)
STRETTO_LANEWISE(Sub16, Sub)
STRETTO_LANEWISE(Mul16, Mul)
STRETTO_LANEWISE(Div16, Div)
STRETTO_LANEWISE(Max16, Max)
#undef STRETTO_LANEWISE

template <bool kFma>
HWY_INLINE F16 MultiplyAdd16(const F16& a, const F16& b, const F16& c) {
  F16 r;
  for (int i = 0; i < kVectors; ++i) r.v[i] = MultiplyAdd<kFma>(a.v[i], b.v[i], c.v[i]);
  return r;
}
HWY_INLINE F16 RoundToBf16(const F16& x) {
  F16 r;
  for (int i = 0; i < kVectors; ++i) r.v[i] = RoundToBf16(x.v[i]);
  return r;
}

// The binary tree over the 16 partial sums, in a vector as long as it has several lanes.
template <class DN, class VN>
HWY_INLINE float SumHalves(DN d, VN v) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(DN()) > 1) {
    const hn::Half<DN> half;
    return SumHalves(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
#endif
  static_cast<void>(d);
  return hn::GetLane(v);
}
HWY_INLINE float SumTree(const F16& partials) {
  F16 p = partials;
  for (int half = kVectors / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) p.v[i] = hn::Add(p.v[i], p.v[i + half]);
  }
  return SumHalves(D(), p.v[0]);
}
// NaN where any element is one; of zeros of both signs the first.
HWY_INLINE float MaxOf(const F16& partials) {
  V largest = partials.v[0];
  auto all_numbers = hn::Eq(partials.v[0], partials.v[0]);
  for (int i = 1; i < kVectors; ++i) {
    largest = hn::Max(largest, partials.v[i]);
    all_numbers = hn::And(all_numbers, hn::Eq(partials.v[i], partials.v[i]));
  }
  const float of_numbers = hn::GetLane(hn::MaxOfLanes(D(), largest));
  if (hn::AllTrue(D(), all_numbers) && of_numbers != 0.0f) return of_numbers;
  HWY_ALIGN float p[16];
  Store16(partials, p);
  float m = p[0];
  for (int i = 1; i < 16; ++i) m = p[i] > m || p[i] != p[i] ? p[i] : m;
  return m;
}

// e^x within 2 units in the last place for x in [-87, 88]; 0 below, e^88 above, NaN stays NaN.
// Range reduction by multiples of ln 2 in two parts and the polynomial of Cephes' expf (S. L.
// Moshier).
template <bool kFma>
HWY_INLINE V Exp(V x) {
  const V low = Set(-87.0f);
  // The order of operands keeps a NaN in x on x86 (the second operand is returned).
  V y = hn::Min(Set(88.0f), hn::Max(low, x));
  // Adding 1.5·2^23 rounds to an integer, which then stands in the low bits.
  const V magic = Set(12582912.0f);
  const V shifted = hn::Add(hn::Mul(y, Set(1.44269504088896341f)), magic);
  const V n = hn::Sub(shifted, magic);
  y = MultiplyAdd<kFma>(n, Set(-0.693359375f), y);
  y = MultiplyAdd<kFma>(n, Set(2.12194440e-4f), y);
  V p = Set(1.9875691500e-4f);
  p = MultiplyAdd<kFma>(p, y, Set(1.3981999507e-3f));
  p = MultiplyAdd<kFma>(p, y, Set(8.3334519073e-3f));
  p = MultiplyAdd<kFma>(p, y, Set(4.1665795894e-2f));
  p = MultiplyAdd<kFma>(p, y, Set(1.6666665459e-1f));
  p = MultiplyAdd<kFma>(p, y, Set(5.0000001201e-1f));
  p = MultiplyAdd<kFma>(p, hn::Mul(y, y), hn::Add(y, Set(1.0f)));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(DI(), shifted));
  V result = hn::BitCast(D(), hn::Add(hn::BitCast(DI(), p), exponent));
  result = hn::IfThenZeroElse(hn::Lt(x, low), result);
  return hn::IfThenElse(hn::Eq(x, x), result, x);
}
template <bool kFma>
HWY_INLINE F16 Exp16(const F16& x) {
  F16 r;
  for (int i = 0; i < kVectors; ++i) r.v[i] = Exp<kFma>(x.v[i]);
  return r;
}

// ln x for positive normal x; infinity and NaN stay. Polynomial of Cephes' logf (S. L. Moshier).
template <bool kFma>
HWY_INLINE float LogOf(float value) {
  if (!(value < __builtin_inff())) return value;
  const DI di;
  const V x = Set(value);
  // Exponent and fraction such that the fraction lies in [sqrt(1/2), sqrt(2)).
  const auto bits = hn::BitCast(di, x);
  const auto offset = hn::Sub(bits, hn::Set(di, 0x3f3504f3));
  const auto exponent = hn::ShiftRight<23>(offset);
  const V fraction = hn::BitCast(D(), hn::Sub(bits, hn::ShiftLeft<23>(exponent)));
  const V e = hn::ConvertTo(D(), exponent);
  const V f = hn::Sub(fraction, Set(1.0f));
  const V z = hn::Mul(f, f);
  V p = Set(7.0376836292e-2f);
  p = MultiplyAdd<kFma>(p, f, Set(-1.1514610310e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(1.1676998740e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(-1.2420140846e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(1.4249322787e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(-1.6668057665e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(2.0000714765e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(-2.4999993993e-1f));
  p = MultiplyAdd<kFma>(p, f, Set(3.3333331174e-1f));
  V y = hn::Mul(hn::Mul(p, f), z);
  y = MultiplyAdd<kFma>(e, Set(-2.12194440e-4f), y);
  y = MultiplyAdd<kFma>(z, Set(-0.5f), y);
  y = hn::Add(f, y);
  y = MultiplyAdd<kFma>(e, Set(0.693359375f), y);
  return hn::GetLane(y);
}

}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#endif  // STRETTO_ENGINE_DEVICE_CPU_SIMD_INL_H_
