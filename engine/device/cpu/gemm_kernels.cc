// Register tiles of matrix products. Lanes are output columns and every output element is one chain
// over k, so neither the number of rows in a tile nor the vector width can show in the bits.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/device/cpu/gemm_kernels.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "engine/device/cpu/gemm-inl.h"
// clang-format on
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
// acc += a(·, k) · panels[k] at one k.
template <bool kFma, bool kBf16, bool kKMajor, int kRows, int kPanels>
HWY_INLINE void AccumulateOne(const float* HWY_RESTRICT a, ptrdiff_t a_stride, const char* panels,
                              ptrdiff_t panel_bytes, int64_t k, Accumulators<kRows, kPanels>& acc) {
  for (int p = 0; p < kPanels; ++p) {
    V b[kVectors];
    LoadPanelRow<kBf16>(panels + p * panel_bytes, k, b);
    for (int r = 0; r < kRows; ++r) {
      const V x = Set(kKMajor ? a[k * a_stride + r] : a[r * a_stride + k]);
      for (int i = 0; i < kVectors; ++i) {
        acc.v[r][p][i] = MultiplyAdd<kFma>(x, b[i], acc.v[r][p][i]);
      }
    }
  }
}

// acc += a(·, k) · panels[k] for k = 0 … num_k − 1. What stands `ahead` bytes after the panels,
// where the next panels are, is fetched into the second-level cache on the way (0: nothing is).
template <bool kFma, bool kBf16, bool kKMajor, int kRows, int kPanels>
HWY_INLINE void Accumulate(const float* HWY_RESTRICT a, ptrdiff_t a_stride, const char* panels,
                           ptrdiff_t panel_bytes, ptrdiff_t ahead, int64_t num_k,
                           Accumulators<kRows, kPanels>& acc) {
  constexpr int kRowBytes = kPanel * (kBf16 ? 2 : 4);
  // Not unrolled: the compiler would load two rows of a panel at once, for which there are too few
  // registers.
#pragma GCC unroll 1
  for (int64_t k = 0; k < num_k; ++k) {
    for (int p = 0; p < kPanels; ++p) {
      __builtin_prefetch(panels + p * panel_bytes + k * kRowBytes + ahead, 0, 2);
    }
    AccumulateOne<kFma, kBf16, kKMajor>(a, a_stride, panels, panel_bytes, k, acc);
  }
}

template <bool kFma, bool kBf16, bool kKMajor, int kRows, int kPanels>
HWY_NOINLINE void TilePanels(const Tile& t, int64_t first_panel) {
  constexpr int kBytes = kBf16 ? 2 : 4;
  float* c = t.c + first_panel * kPanel;
  Accumulators<kRows, kPanels> acc;
  LoadC(t, c, acc);
  Accumulate<kFma, kBf16, kKMajor>(
      t.a, t.a_stride,
      static_cast<const char*>(t.panels.data) + first_panel * t.panel_stride * kBytes,
      t.panel_stride * kBytes, t.panel_stride * kBytes * kPanels, t.k, acc);
  StoreC(t, c, acc);
}

template <bool kFma, bool kBf16, bool kKMajor, int kRows>
HWY_INLINE void TileRows(const Tile& t) {
  constexpr int kPanels = PanelsFor(kRows);
  int64_t p = 0;
  for (; p + kPanels <= t.num_panels; p += kPanels) {
    TilePanels<kFma, kBf16, kKMajor, kRows, kPanels>(t, p);
  }
  if constexpr (kPanels > 1) {
    for (; p < t.num_panels; ++p) TilePanels<kFma, kBf16, kKMajor, kRows, 1>(t, p);
  }
}

template <bool kFma, bool kBf16, int kRows>
HWY_NOINLINE void BlockTileRows(const Tile& t, const int64_t* offsets, int64_t num_blocks) {
  constexpr int kBytes = kBf16 ? 2 : 4;
  Accumulators<kRows, 1> acc;
  LoadC(t, t.c, acc);
  const char* base = static_cast<const char*>(t.panels.data);
  for (int64_t b = 0; b < num_blocks; ++b) {
    Accumulate<kFma, kBf16, false>(t.a + b * kPanel, t.a_stride, base + offsets[b] * kBytes, 0, 0,
                                   t.k, acc);
  }
  StoreC(t, t.c, acc);
}

template <bool kFma, int kRows = kMaxRows>
HWY_INLINE void DispatchTile(const Tile& t) {
  if (t.rows == kRows) {
    if (t.a_k_major) {
      t.panels.bf16 ? TileRows<kFma, true, true, kRows>(t) : TileRows<kFma, false, true, kRows>(t);
    } else {
      t.panels.bf16 ? TileRows<kFma, true, false, kRows>(t)
                    : TileRows<kFma, false, false, kRows>(t);
    }
  } else if constexpr (kRows > 1) {
    DispatchTile<kFma, kRows - 1>(t);
  }
}

template <bool kFma, int kRows = kMaxRows>
HWY_INLINE void DispatchBlockTile(const Tile& t, const int64_t* offsets, int64_t num_blocks) {
  if (t.rows == kRows) {
    t.panels.bf16 ? BlockTileRows<kFma, true, kRows>(t, offsets, num_blocks)
                  : BlockTileRows<kFma, false, kRows>(t, offsets, num_blocks);
  } else if constexpr (kRows > 1) {
    DispatchBlockTile<kFma, kRows - 1>(t, offsets, num_blocks);
  }
}

template <bool kFma>
void TileOf(const Tile& t) {
  DispatchTile<kFma>(t);
}
template <bool kFma>
void BlockTileOf(const Tile& t, const int64_t* offsets, int64_t num_blocks) {
  DispatchBlockTile<kFma>(t, offsets, num_blocks);
}

// 16 bf16 columns in order, put in the order of a panel row.
HWY_INLINE void ToPanelOrder(const uint16_t* src, uint16_t* dst) {
#if HWY_TARGET == HWY_SCALAR
  for (int j = 0; j < kPanel; ++j) dst[kSlot[j]] = src[j];
#else
  const hn::CappedTag<uint16_t, 8> d8;
  const auto low = hn::LoadU(d8, src);
  const auto high = hn::LoadU(d8, src + 8);
  hn::StoreU(kPaired ? hn::InterleaveLower(d8, low, high) : low, d8, dst);
  hn::StoreU(kPaired ? hn::InterleaveUpper(d8, low, high) : high, d8, dst + 8);
#endif
}

void PackPanels(Sink dst, ptrdiff_t panel_stride, Source src, ptrdiff_t row_stride, int64_t num_k,
                int64_t n) {
  for (int64_t k = 0; k < num_k; ++k) {
    const Source row = src + k * row_stride;
    for (int64_t j = 0; j < n; j += kPanel) {
      const Sink to = dst + (j / kPanel) * panel_stride + k * kPanel;
      if (!src.bf16) {
        Store16(LoadUpTo16(row, j, n), to, 0);
        continue;
      }
      const uint16_t* from = static_cast<const uint16_t*>(row.data) + j;
      HWY_ALIGN uint16_t tail[kPanel] = {};
      if (n - j < kPanel) {
        for (int64_t i = 0; i < n - j; ++i) tail[i] = from[i];
        from = tail;
      }
      ToPanelOrder(from, static_cast<uint16_t*>(to.data));
    }
  }
}

template <class T>
HWY_INLINE void PackTransposedOf(T* dst, const T* src, ptrdiff_t row_stride, int64_t num_k,
                                 int64_t n, const uint8_t* slot) {
  for (int64_t k = 0; k < num_k; ++k) {
    T* row = dst + k * kPanel;
    for (int64_t j = 0; j < kPanel; ++j) row[slot[j]] = j < n ? src[j * row_stride + k] : T{};
  }
}

void PackTransposed(Sink dst, Source src, ptrdiff_t row_stride, int64_t num_k, int64_t n) {
  if (src.bf16) {
    PackTransposedOf(static_cast<uint16_t*>(dst.data), static_cast<const uint16_t*>(src.data),
                     row_stride, num_k, n, kSlot);
  } else {
    PackTransposedOf(static_cast<float*>(dst.data), static_cast<const float*>(src.data), row_stride,
                     num_k, n, kPlainSlot);
  }
}

constexpr GemmKernels kGemmTwoRoundings = {kMaxRows,           kSlot,      TileOf<false>,
                                           BlockTileOf<false>, PackPanels, PackTransposed};
constexpr GemmKernels kGemmFused = {
    kMaxRows, kSlot, TileOf<kHaveFma>, BlockTileOf<kHaveFma>, PackPanels, PackTransposed};
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine::cpu {
const GemmKernels* GetGemmKernels(InstructionSet set, bool fma) {
  switch (set) {
    case InstructionSet::kAvx512:
      return fma ? HWY_CHOOSE_AVX3(kGemmFused) : HWY_CHOOSE_AVX3(kGemmTwoRoundings);
    case InstructionSet::kAvx2:
      return fma ? HWY_CHOOSE_AVX2(kGemmFused) : HWY_CHOOSE_AVX2(kGemmTwoRoundings);
    case InstructionSet::kSse4:
      return HWY_CHOOSE_SSE4(kGemmTwoRoundings);
    case InstructionSet::kScalar:
      return HWY_CHOOSE_FALLBACK(kGemmTwoRoundings);
  }
  return nullptr;
}
}  // namespace stretto::engine::cpu
#endif  // HWY_ONCE
