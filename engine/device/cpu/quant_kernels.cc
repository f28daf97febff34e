// Register tiles over quantised panels: values are widened in registers, then enter the same chains
// as plain ones. Layouts of a panel (16 columns):
//   int8, fp8  [k][16] bytes (where gemm_dot.h orders them otherwise, its kernels read them)
//   int4       for each group of 32 k: 16 bf16 scales (in the order of a bf16 panel row), then
//              [32][8] bytes, byte j holding columns j (low half) and j + 8 (high half)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/device/cpu/quant_kernels.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "engine/device/cpu/gemm-inl.h"
// clang-format on
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
using I32 = hn::Vec<DI>;

HWY_INLINE I32 Widen8(const int8_t* p) {
  return hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<int8_t, DI>(), p));
}

// One k of a panel without scales of its own.
template <WeightFormat kFormat>
HWY_INLINE void LoadBytesRow(const int8_t* HWY_RESTRICT p, V* HWY_RESTRICT b) {
  for (int i = 0; i < kVectors; ++i) {
    const I32 wide = Widen8(p + i * kLanes);
    if constexpr (kFormat == WeightFormat::kInt8) {
      b[i] = hn::ConvertTo(D(), wide);
    } else {  // exponent and mantissa in f32's place: the value times 2^-120
      const auto placed =
          hn::And(hn::ShiftLeft<20>(wide), hn::Set(DI(), static_cast<int32_t>(0x87f00000u)));
      b[i] = hn::Mul(hn::BitCast(D(), placed), Set(0x1p120f));
    }
  }
}

// One k of an int4 panel: 8 bytes, times the group's scales.
HWY_INLINE void LoadNibblesRow(const int8_t* HWY_RESTRICT p, const V* HWY_RESTRICT scale,
                               V* HWY_RESTRICT b) {
#if HWY_TARGET == HWY_AVX3
  const hn::Half<DI> dh;
  const auto bytes = hn::PromoteTo(dh, hn::LoadU(hn::Rebind<int8_t, hn::Half<DI>>(), p));
  const auto low = hn::ShiftRight<28>(hn::ShiftLeft<28>(bytes));
  const auto high = hn::ShiftRight<4>(bytes);
  b[0] = hn::Mul(hn::ConvertTo(D(), hn::Combine(DI(), high, low)), scale[0]);
#else
  constexpr int kHalf = kVectors / 2;
  for (int i = 0; i < kHalf; ++i) {
    const I32 bytes = Widen8(p + i * kLanes);
    const I32 low = hn::ShiftRight<28>(hn::ShiftLeft<28>(bytes));
    b[i] = hn::Mul(hn::ConvertTo(D(), low), scale[i]);
    b[kHalf + i] = hn::Mul(hn::ConvertTo(D(), hn::ShiftRight<4>(bytes)), scale[kHalf + i]);
  }
#endif
}

template <bool kFma, int kRows, int kPanels>
HWY_INLINE void AccumulateRow(const float* HWY_RESTRICT a, ptrdiff_t a_stride, int64_t k, int panel,
                              const V* HWY_RESTRICT b, Accumulators<kRows, kPanels>& acc) {
  for (int r = 0; r < kRows; ++r) {
    const V x = Set(a[r * a_stride + k]);
    for (int i = 0; i < kVectors; ++i) {
      acc.v[r][panel][i] = MultiplyAdd<kFma>(x, b[i], acc.v[r][panel][i]);
    }
  }
}

template <bool kFma, WeightFormat kFormat, int kRows, int kPanels>
HWY_INLINE void AccumulateBytes(const Tile& t, const int8_t* panels,
                                Accumulators<kRows, kPanels>& acc) {
  const ptrdiff_t stride = t.panel_stride;
#pragma GCC unroll 1
  for (int64_t k = 0; k < t.k; ++k) {
    for (int p = 0; p < kPanels; ++p) {
      const int8_t* row = panels + p * stride + k * kPanel;
      __builtin_prefetch(row + kPanels * stride, 0, 2);
      V b[kVectors];
      LoadBytesRow<kFormat>(row, b);
      AccumulateRow<kFma>(t.a, t.a_stride, k, p, b, acc);
    }
  }
}

template <bool kFma, int kRows, int kPanels>
HWY_INLINE void AccumulateNibbles(const Tile& t, const int8_t* panels,
                                  Accumulators<kRows, kPanels>& acc) {
  const ptrdiff_t stride = t.panel_stride;
#pragma GCC unroll 1
  for (int64_t k0 = 0; k0 < t.k; k0 += kInt4Group) {
    const int8_t* group = panels + k0 / kInt4Group * kInt4GroupBytes;
    V scale[kPanels][kVectors];
    for (int p = 0; p < kPanels; ++p) {
      LoadPanelRow<true>(group + p * stride, 0, scale[p]);
      for (int64_t i = 0; i < kInt4GroupBytes; i += 64) {
        __builtin_prefetch(group + (p + kPanels) * stride + i, 0, 2);
      }
    }
    const int64_t end = t.k - k0 < kInt4Group ? t.k - k0 : kInt4Group;
#pragma GCC unroll 1
    for (int64_t k = 0; k < end; ++k) {
      for (int p = 0; p < kPanels; ++p) {
        V b[kVectors];
        LoadNibblesRow(group + p * stride + kPanel * 2 + k * (kPanel / 2), scale[p], b);
        AccumulateRow<kFma>(t.a, t.a_stride, k0 + k, p, b, acc);
      }
    }
  }
}

template <bool kFma, WeightFormat kFormat, int kRows, int kPanels>
HWY_NOINLINE void TilePanels(const Tile& t, int64_t first_panel) {
  float* c = t.c + first_panel * kPanel;
  Accumulators<kRows, kPanels> acc;
  LoadC(t, c, acc);
  const auto* panels = static_cast<const int8_t*>(t.panels.data) + first_panel * t.panel_stride;
  if constexpr (kFormat == WeightFormat::kInt4) {
    AccumulateNibbles<kFma>(t, panels, acc);
  } else {
    AccumulateBytes<kFma, kFormat>(t, panels, acc);
  }
  StoreC(t, c, acc);
}

template <bool kFma, WeightFormat kFormat, int kRows = kMaxRows>
HWY_INLINE void DispatchTile(const Tile& t) {
  if (t.rows != kRows) {
    if constexpr (kRows > 1) DispatchTile<kFma, kFormat, kRows - 1>(t);
    return;
  }
  constexpr int kPanels = PanelsFor(kRows);
  int64_t p = 0;
  for (; p + kPanels <= t.num_panels; p += kPanels) TilePanels<kFma, kFormat, kRows, kPanels>(t, p);
  if constexpr (kPanels > 1) {
    for (; p < t.num_panels; ++p) TilePanels<kFma, kFormat, kRows, 1>(t, p);
  }
}

template <bool kFma>
void QuantTile(const Tile& t, WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt8:
      return DispatchTile<kFma, WeightFormat::kInt8>(t);
    case WeightFormat::kInt4:
      return DispatchTile<kFma, WeightFormat::kInt4>(t);
    case WeightFormat::kFp8:
      return DispatchTile<kFma, WeightFormat::kFp8>(t);
    case WeightFormat::kPlain:
      return;
  }
}

constexpr QuantKernels kQuantTwoRoundings = {QuantTile<false>};
[[maybe_unused]] constexpr QuantKernels kQuantFused = {QuantTile<kHaveFma>};
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine::cpu {
const QuantKernels* GetQuantKernels(InstructionSet set, bool fma) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512:
      return fma ? HWY_CHOOSE_AVX3(kQuantFused) : HWY_CHOOSE_AVX3(kQuantTwoRoundings);
    case InstructionSet::kAvx2:
      return fma ? HWY_CHOOSE_AVX2(kQuantFused) : HWY_CHOOSE_AVX2(kQuantTwoRoundings);
    case InstructionSet::kSse4:
      return HWY_CHOOSE_SSE4(kQuantTwoRoundings);
    case InstructionSet::kScalar:
      return HWY_CHOOSE_FALLBACK(kQuantTwoRoundings);
  }
  return nullptr;
}
}  // namespace stretto::engine::cpu
#endif  // HWY_ONCE
