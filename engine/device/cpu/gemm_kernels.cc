// Register tiles of matrix products. Lanes are output columns and every output element is one chain
// over k, so neither the number of rows in a tile nor the vector width can show in the bits.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/device/cpu/gemm_kernels.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "engine/device/cpu/gemm-inl.h"
#include "engine/device/cpu/gemm_avx2-inl.h"
// clang-format on
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
// acc += a · panels[0], where row r's element of a is a[r · row_stride].
template <bool kFma, bool kBf16, int kRows, int kPanels>
HWY_INLINE void AccumulateOne(const float* HWY_RESTRICT a, ptrdiff_t row_stride, const char* panels,
                              ptrdiff_t panel_bytes, Accumulators<kRows, kPanels>& acc) {
  for (int p = 0; p < kPanels; ++p) {
    V b[kVectors];
    LoadPanelRow<kBf16>(panels + p * panel_bytes, 0, b);
    for (int r = 0; r < kRows; ++r) {
      const V x = Set(a[r * row_stride]);
      for (int i = 0; i < kVectors; ++i) {
        acc.v[r][p][i] = MultiplyAdd<kFma>(x, b[i], acc.v[r][p][i]);
      }
    }
  }
}

// acc += a(·, k) · panels[k] for k = 0 … num_k − 1, a's rows apart. With kFetch, what stands
// `ahead` bytes after the panels, where the next panels are, is fetched into the second-level cache
// on the way.
template <bool kFma, bool kBf16, bool kFetch, int kRows, int kPanels>
HWY_INLINE void AccumulateRows(const float* HWY_RESTRICT a, ptrdiff_t a_stride, const char* panels,
                               ptrdiff_t panel_bytes, ptrdiff_t ahead, int64_t num_k,
                               Accumulators<kRows, kPanels>& acc) {
  constexpr int kRowBytes = kPanel * (kBf16 ? 2 : 4);
  // A large tile is not unrolled: the compiler would load two rows of a panel at once, for which
  // there are too few registers.
  constexpr int kUnroll = kRows * kPanels * kVectors <= kMaxAccumulators / 2 ? 4 : 1;
  const auto one = [&](int64_t k) HWY_ATTR {
    if constexpr (kFetch) {
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(panels + p * panel_bytes + k * kRowBytes + ahead, 0, 2);
      }
    }
    AccumulateOne<kFma, kBf16>(a + k, a_stride, panels + k * kRowBytes, panel_bytes, acc);
  };
  int64_t k = 0;
#pragma GCC unroll 1
  for (; k + kUnroll <= num_k; k += kUnroll) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnroll; ++i) one(k + i);
  }
  if constexpr (kUnroll > 1) {
#pragma GCC unroll 1
    for (; k < num_k; ++k) one(k);
  }
}

// The same with the rows of a interleaved, a_stride from one k to the next: of all loops the one
// with the fewest instructions beside the multiply-adds. Fetches a line from `ahead` on for every
// kKPerLine of k.
template <bool kFma, bool kBf16, int kRows, int kPanels>
HWY_INLINE void AccumulateInterleaved(const float* a, ptrdiff_t a_stride, const char* panels,
                                      ptrdiff_t panel_bytes, const char* ahead, int64_t num_k,
                                      Accumulators<kRows, kPanels>& acc) {
  constexpr int kRowBytes = kPanel * (kBf16 ? 2 : 4);
#pragma GCC unroll 1
  for (; num_k >= kKPerLine; num_k -= kKPerLine) {
    __builtin_prefetch(ahead, 0, 2);
    ahead += kLineBytes;
#pragma GCC unroll 4
    for (int i = 0; i < kKPerLine; ++i) {
      AccumulateOne<kFma, kBf16>(a, 1, panels + i * kRowBytes, panel_bytes, acc);
      a += a_stride;
      // Keeps the compiler from loading the next row of the panels before this one has been used:
      // there are no registers for both.
      asm volatile("" : "+r"(a), "+r"(panels));  // NOLINT(hicpp-no-assembler)
    }
    panels += kKPerLine * kRowBytes;
  }
  for (; num_k > 0; --num_k, a += a_stride, panels += kRowBytes) {
    AccumulateOne<kFma, kBf16>(a, 1, panels, panel_bytes, acc);
  }
}

// Panels of attention, whose places say nothing about where the next ones are: `ahead` does, for
// each panel. Prefetches in bursts would stand in the way of the loads; one with every second k
// waits for nobody.
template <bool kFma, bool kBf16, int kRows, int kPanels>
HWY_INLINE void AccumulateFetching(const float* HWY_RESTRICT a, ptrdiff_t a_stride,
                                   const char* panels, ptrdiff_t panel_bytes,
                                   const char* const (&ahead)[kPanels], int64_t num_k,
                                   Accumulators<kRows, kPanels>& acc) {
  constexpr int kRowBytes = kPanel * (kBf16 ? 2 : 4);
  const auto one = [&]() HWY_ATTR {
    AccumulateOne<kFma, kBf16>(a, a_stride, panels, panel_bytes, acc);
    ++a;
    panels += kRowBytes;
    asm volatile("" : "+r"(a), "+r"(panels));  // NOLINT(hicpp-no-assembler): as above
  };
  ptrdiff_t line = 0;
#pragma GCC unroll 1
  for (; num_k >= 2; num_k -= 2, line += kLineBytes) {
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(ahead[p] + line, 0, 2);
    one();
    one();
  }
  if (num_k > 0) one();
}

template <bool kFma, bool kBf16, bool kKMajor, int kRows, int kPanels>
HWY_NOINLINE void TilePanels(const Tile& t, int64_t first_panel) {
  constexpr int kBytes = kBf16 ? 2 : 4;
  float* c = t.c + first_panel * kPanel;
  Accumulators<kRows, kPanels> acc;
  LoadC(t, c, acc);
  const char* panels = static_cast<const char*>(t.panels.data);
  const ptrdiff_t panel_bytes = t.panel_stride * kBytes;
  panels += first_panel * panel_bytes;
  if constexpr (kKMajor) {
    AccumulateInterleaved<kFma, kBf16>(
        t.a, t.a_stride, panels, panel_bytes,
        t.ahead != nullptr ? static_cast<const char*>(t.ahead) : panels, t.k, acc);
  } else if (t.ahead != nullptr) {
    const char* ahead[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      ahead[p] = static_cast<const char*>(t.ahead) + t.ahead_offsets[first_panel + p] * kBytes;
    }
    AccumulateFetching<kFma, kBf16, kRows, kPanels>(t.a, t.a_stride, panels, panel_bytes, ahead,
                                                    t.k, acc);
  } else if (kRows <= 3 && t.num_panels == 1) {
    AccumulateRows<kFma, kBf16, false>(t.a, t.a_stride, panels, panel_bytes, 0, t.k, acc);
  } else {
    AccumulateRows<kFma, kBf16, true>(t.a, t.a_stride, panels, panel_bytes, panel_bytes * kPanels,
                                      t.k, acc);
  }
  if constexpr (kKMajor) {
    if (t.out != nullptr) {
      NarrowC(t, t.out + first_panel * kPanel, acc);
      return;
    }
  }
  StoreC(t, c, acc);
}

template <bool kFma, bool kBf16, bool kKMajor, int kRows>
HWY_INLINE void TileRows(const Tile& t) {
#if HWY_TARGET == HWY_AVX2
  if constexpr (kFma && kKMajor && kRows >= 4) {
    FullTiles<kBf16, kRows>(t);
    return;
  }
#endif
  constexpr int kPanels = PanelsFor(kRows);
  int64_t p = 0;
  for (; p + kPanels <= t.num_panels; p += kPanels) {
    TilePanels<kFma, kBf16, kKMajor, kRows, kPanels>(t, p);
  }
  if constexpr (kPanels > 1) {
    for (; p < t.num_panels; ++p) TilePanels<kFma, kBf16, kKMajor, kRows, 1>(t, p);
  }
}

template <bool kFma, bool kBf16, int kRows, int kPanels>
HWY_NOINLINE void BlockTilePanels(const Tile& t, const int64_t* offsets, int64_t num_blocks,
                                  int64_t first_panel) {
  constexpr int kBytes = kBf16 ? 2 : 4;
  float* c = t.c + first_panel * kPanel;
  Accumulators<kRows, kPanels> acc;
  LoadC(t, c, acc);
  const ptrdiff_t panel_bytes = t.panel_stride * kBytes;
  const char* base = static_cast<const char*>(t.panels.data) + first_panel * panel_bytes;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const float* a = t.a + b * kPanel;
    const char* panels = base + offsets[b] * kBytes;
    if (t.ahead != nullptr) {
      const char* first = static_cast<const char*>(t.ahead) + t.ahead_offsets[b] * kBytes;
      const char* ahead[kPanels];
      for (int p = 0; p < kPanels; ++p) ahead[p] = first + (first_panel + p) * panel_bytes;
      AccumulateFetching<kFma, kBf16, kRows, kPanels>(a, t.a_stride, panels, panel_bytes, ahead,
                                                      t.k, acc);
    } else {
      AccumulateRows<kFma, kBf16, false>(a, t.a_stride, panels, panel_bytes, 0, t.k, acc);
    }
  }
  StoreC(t, c, acc);
}

template <bool kFma, bool kBf16, int kRows>
HWY_INLINE void BlockTileRows(const Tile& t, const int64_t* offsets, int64_t num_blocks) {
  constexpr int kPanels = PanelsFor(kRows) < 2 ? 1 : 2;
  int64_t p = 0;
  for (; p + kPanels <= t.num_panels; p += kPanels) {
    BlockTilePanels<kFma, kBf16, kRows, kPanels>(t, offsets, num_blocks, p);
  }
  if constexpr (kPanels > 1) {
    if (p < t.num_panels) BlockTilePanels<kFma, kBf16, kRows, 1>(t, offsets, num_blocks, p);
  }
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

// One tile of a block of rows, and the place where the next one begins.
template <bool kFma, bool kBf16, int kRows>
HWY_INLINE void NextTile(Tile& t) {
  t.rows = kRows;
  t.a_stride = kRows;
  TileRows<kFma, kBf16, true, kRows>(t);
  t.a += kRows * t.k;
  t.c += kRows * t.c_stride;
  if (t.out != nullptr) t.out += kRows * t.out_stride;
}

// Sizes differ by one at most: kRows and kRows − 1.
template <bool kFma, bool kBf16, int kRows = kMaxRows>
HWY_INLINE void DispatchRowTiles(Tile& t, const RowTiles& tiles, const PanelsAhead& ahead) {
  if (tiles.Size(0) != kRows) {
    if constexpr (kRows > 1) DispatchRowTiles<kFma, kBf16, kRows - 1>(t, tiles, ahead);
    return;
  }
  FetchAhead fetch(ahead, t.k / kKPerLine);
  for (int64_t i = 0; i < tiles.count; ++i) {
    t.ahead = fetch.Next();
    if (tiles.Size(i) == kRows) {
      NextTile<kFma, kBf16, kRows>(t);
    } else if constexpr (kRows > 1) {
      NextTile<kFma, kBf16, kRows - 1>(t);
    }
  }
}

template <bool kFma>
void RowTilesOf(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead) {
  Tile t = first;
  first.panels.bf16 ? DispatchRowTiles<kFma, true>(t, tiles, ahead)
                    : DispatchRowTiles<kFma, false>(t, tiles, ahead);
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

HWY_INLINE float LoadOne(Source s, int64_t i) {
  if (!s.bf16) return static_cast<const float*>(s.data)[i];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(s.data)[i]} << 16;
  float f;
  hwy::CopySameSize(&bits, &f);
  return f;
}

// Rows one by one, elements [k0, num_k).
HWY_INLINE void InterleaveTail(Source rows, ptrdiff_t row_stride, int num_rows, int64_t k0,
                               int64_t num_k, float* out) {
  for (int r = 0; r < num_rows; ++r) {
    const Source row = rows + r * row_stride;
    for (int64_t k = k0; k < num_k; ++k) out[k * num_rows + r] = LoadOne(row, k);
  }
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
using D8 = hn::CappedTag<float, 8>;
using V8 = hn::Vec<D8>;

HWY_INLINE V8 LoadEight(Source s, int64_t i) {
  if (!s.bf16) return hn::LoadU(D8(), static_cast<const float*>(s.data) + i);
  const hn::Rebind<uint32_t, D8> du;
  const hn::Rebind<uint16_t, D8> dh;
  const auto* p = static_cast<const uint16_t*>(s.data) + i;
  return hn::BitCast(D8(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, p))));
}

// v[r][k] becomes v[k][r].
HWY_INLINE void Transpose8(V8* HWY_RESTRICT v) {
  const D8 d;
  const hn::RepartitionToWide<D8> dw;
  V8 pairs[8], fours[8];
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = hn::InterleaveLower(d, v[2 * i], v[2 * i + 1]);
    pairs[2 * i + 1] = hn::InterleaveUpper(d, v[2 * i], v[2 * i + 1]);
  }
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 2; ++i) {
      const auto low = hn::BitCast(dw, pairs[4 * half + i]);
      const auto high = hn::BitCast(dw, pairs[4 * half + 2 + i]);
      fours[4 * half + 2 * i] = hn::BitCast(d, hn::InterleaveLower(dw, low, high));
      fours[4 * half + 2 * i + 1] = hn::BitCast(d, hn::InterleaveUpper(dw, low, high));
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = hn::ConcatLowerLower(d, fours[4 + i], fours[i]);
    v[4 + i] = hn::ConcatUpperUpper(d, fours[4 + i], fours[i]);
  }
}

// A store writes eight floats, of which the next one overwrites those that are too many; so the
// last eight k go another way.
template <int kEights>
HWY_INLINE int64_t InterleaveEights(Source rows, ptrdiff_t row_stride, int num_rows, int64_t num_k,
                                    float* out) {
  int64_t k = 0;
  for (; k + 16 <= num_k; k += 8) {
    V8 v[kEights][8];
    for (int e = 0; e < kEights; ++e) {
      for (int r = 0; r < 8; ++r) {
        const int row = 8 * e + r;
        v[e][r] = row < num_rows ? LoadEight(rows + row * row_stride, k) : hn::Zero(D8());
      }
      Transpose8(v[e]);
    }
    for (int i = 0; i < 8; ++i) {
      for (int e = 0; e < kEights; ++e) {
        hn::StoreU(v[e][i], D8(), out + (k + i) * num_rows + 8 * e);
      }
    }
  }
  return k;
}
#endif

void Interleave(Source rows, ptrdiff_t row_stride, int num_rows, int64_t num_k, float* out) {
  int64_t k = 0;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  k = num_rows <= 8 ? InterleaveEights<1>(rows, row_stride, num_rows, num_k, out)
                    : InterleaveEights<2>(rows, row_stride, num_rows, num_k, out);
#endif
  InterleaveTail(rows, row_stride, num_rows, k, num_k, out);
}

void InterleaveColumns(Source rows, ptrdiff_t row_stride, int num_columns, int64_t num_k,
                       float* out) {
  for (int64_t k = 0; k < num_k; ++k) {
    const Source row = rows + k * row_stride;
    for (int r = 0; r < num_columns; ++r) out[k * num_columns + r] = LoadOne(row, r);
  }
}

static_assert(kMaxRows <= 16);
template <bool kFma>
constexpr GemmKernels MakeGemmKernels() {
  return {kMaxRows,          PanelsFor(kMaxRows), kSlot,          TileOf<kFma>, RowTilesOf<kFma>,
          BlockTileOf<kFma>, PackPanels,          PackTransposed, Interleave,   InterleaveColumns};
}
constexpr GemmKernels kGemmTwoRoundings = MakeGemmKernels<false>();
[[maybe_unused]] constexpr GemmKernels kGemmFused = MakeGemmKernels<kHaveFma>();
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine::cpu {
const GemmKernels* GetGemmKernels(InstructionSet set, bool fma) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
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
