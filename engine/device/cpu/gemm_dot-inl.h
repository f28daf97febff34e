// Register tiles of gemm_dot.h. Included where STRETTO_DOT and STRETTO_DOT_INLINE name the
// instructions to compile for: not the whole file, functions of headers must not be compiled for
// processors that few have.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "engine/device/cpu/gemm_dot.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header passes undefined registers on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace stretto::engine::cpu {
namespace {
constexpr int kMostRows = 12;
constexpr int kWordBytes = 4;

// 24 sums, of 32 registers; 8 where there is one row, whose sums wait for memory anyway.
constexpr int PanelsFor(int rows) { return rows > 6 ? 2 : (rows > 3 ? 4 : 8); }

template <int kRows, int kPanels>
struct Sums {
  __m512 v[kRows][kPanels];
};

STRETTO_DOT_INLINE __m512i Load(const void* p) { return _mm512_loadu_si512(p); }

// How panels give words. A step is kWords vectors of them, two k each, from kBytes bytes; values
// take kValueBytes. Bf16's are words already.
struct Bf16Panels {
  static constexpr int kWords = 1, kBytes = kLineBytes, kValueBytes = 2;
  STRETTO_DOT_INLINE void Words(const char* p, __m512i* words) const { words[0] = Load(p); }
};

// A step, of rows that are words.
template <class Panels, int kRows, int kPanels>
STRETTO_DOT_INLINE void AddDots(const Panels& format, const char* a, const char* panels,
                                ptrdiff_t panel_bytes, Sums<kRows, kPanels>& sums) {
  __m512i b[kPanels][Panels::kWords];
  for (int p = 0; p < kPanels; ++p) format.Words(panels + p * panel_bytes, b[p]);
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < Panels::kWords; ++w) {
      int32_t word;
      std::memcpy(&word, a + (w * kRows + r) * kWordBytes, kWordBytes);
      const auto x = (__m512bh)_mm512_set1_epi32(word);
      for (int p = 0; p < kPanels; ++p) {
        sums.v[r][p] = _mm512_dpbf16_ps(sums.v[r][p], x, (__m512bh)b[p][w]);
      }
    }
  }
}

// A step, of rows that are f32.
template <class Panels, int kRows, int kPanels>
STRETTO_DOT_INLINE void AddChains(const Panels& format, const char* a, const char* panels,
                                  ptrdiff_t panel_bytes, Sums<kRows, kPanels>& sums) {
  const auto* x = reinterpret_cast<const float*>(a);
  for (int p = 0; p < kPanels; ++p) {
    __m512i words[Panels::kWords];
    format.Words(panels + p * panel_bytes, words);
    for (int w = 0; w < Panels::kWords; ++w) {
      const __m512i high =
          _mm512_and_si512(words[w], _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
      const __m512 first = _mm512_castsi512_ps(high);
      const __m512 second = _mm512_castsi512_ps(_mm512_slli_epi32(words[w], 16));
      for (int r = 0; r < kRows; ++r) {
        const float* at = x + 2 * w * kRows + r;
        sums.v[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(at[0]), first, sums.v[r][p]);
        sums.v[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(at[kRows]), second, sums.v[r][p]);
      }
    }
  }
}

// F32ToBf16 of 16 numbers.
STRETTO_DOT_INLINE void Narrow(__m512 x, uint16_t* out) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}

template <int kRows, int kPanels>
STRETTO_DOT_INLINE void Begin(const Tile& t, const float* c, Sums<kRows, kPanels>& sums) {
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      sums.v[r][p] =
          t.load_c ? _mm512_loadu_ps(c + r * t.c_stride + p * kPanel) : _mm512_setzero_ps();
    }
  }
}

template <int kRows, int kPanels>
STRETTO_DOT_INLINE void End(const Tile& t, int64_t column, const Sums<kRows, kPanels>& sums) {
  for (int p = 0; p < kPanels; ++p) {
    const int64_t at = column + p * kPanel;
    const __m512 scale = t.scales ? _mm512_loadu_ps(t.scales + at) : _mm512_set1_ps(1);
    for (int r = 0; r < kRows; ++r) {
      const __m512 sum = _mm512_mul_ps(sums.v[r][p], scale);
      if (t.out != nullptr) {
        Narrow(sum, t.out + r * t.out_stride + at);
      } else {
        _mm512_storeu_ps(t.c + r * t.c_stride + at, sum);
      }
    }
  }
}

// One row waits for memory: it fetches each panel's own next lines.
constexpr ptrdiff_t kStreamAhead = 16 * kLineBytes;
// Several rows wait for the second cache: panels are larger than the first one (3 to 5 % on Zen 4).
constexpr ptrdiff_t kNearAhead = 16 * kLineBytes;

template <class Panels, bool kDot, int kRows, int kPanels>
STRETTO_DOT __attribute__((noinline)) void TilePanels(const Panels& format, const Tile& t,
                                                      int64_t panel) {
  constexpr int kStepRows = kRows * kWordBytes * Panels::kWords * (kDot ? 1 : 2);
  const ptrdiff_t panel_bytes = t.panel_stride * Panels::kValueBytes;
  const char* panels = static_cast<const char*>(t.panels.data) + panel * panel_bytes;
  const char* a = reinterpret_cast<const char*>(t.a);
  const char* ahead = t.ahead != nullptr ? static_cast<const char*>(t.ahead) : panels;
  Sums<kRows, kPanels> sums;
  Begin(t, t.c + panel * kPanel, sums);
#pragma GCC unroll 1
  for (int64_t steps = t.k / 2 / Panels::kWords; steps > 0; --steps) {
    if constexpr (kRows == 1) {
      // What comes after these panels' ends are the next ones'.
      const ptrdiff_t by = steps * Panels::kBytes > kStreamAhead
                               ? kStreamAhead
                               : kStreamAhead + (kPanels - 1) * panel_bytes;
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(panels + p * panel_bytes + by, 0, 2);
      }
    } else {
      // Half as many lines as a panel has.
      __builtin_prefetch(ahead, 0, 2);
      ahead += Panels::kBytes / 2;
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(panels + p * panel_bytes + kNearAhead, 0, 3);
      }
    }
    if constexpr (kDot) {
      AddDots(format, a, panels, panel_bytes, sums);
    } else {
      AddChains(format, a, panels, panel_bytes, sums);
    }
    a += kStepRows;
    panels += Panels::kBytes;
  }
  End(t, panel * kPanel, sums);
}

// `count` panels, at most kMost and even or 1.
template <class Panels, bool kDot, int kRows, int kMost>
STRETTO_DOT void SomePanels(const Panels& format, const Tile& t, int64_t first, int64_t count) {
  if constexpr (kMost > 2) {
    if (count < kMost) return SomePanels<Panels, kDot, kRows, kMost - 2>(format, t, first, count);
  }
  if (count >= kMost) return TilePanels<Panels, kDot, kRows, kMost>(format, t, first);
  TilePanels<Panels, kDot, kRows, 1>(format, t, first);
}

// As few as can be, of sizes as equal as can be.
template <class Panels, bool kDot, int kRows>
STRETTO_DOT void TileRows(const Panels& format, const Tile& t) {
  constexpr int64_t kMost = PanelsFor(kRows);
  for (int64_t p = 0; p < t.num_panels;) {
    const int64_t rest = t.num_panels - p, parts = (rest + kMost - 1) / kMost;
    const int64_t count = rest == 1 ? 1 : std::min((rest / parts + 1) / 2 * 2, rest / 2 * 2);
    SomePanels<Panels, kDot, kRows, kMost>(format, t, p, count);
    p += count;
  }
}

template <class Panels, int kRows = kMostRows>
STRETTO_DOT void DispatchRows(const Panels& format, const Tile& t, bool dot) {
  if (t.rows == kRows) {
    dot ? TileRows<Panels, true, kRows>(format, t) : TileRows<Panels, false, kRows>(format, t);
  } else if constexpr (kRows > 1) {
    DispatchRows<Panels, kRows - 1>(format, t, dot);
  }
}

template <class Panels>
STRETTO_DOT void RowTilesOf(const Panels& format, const Tile& first, const RowTiles& tiles,
                            const PanelsAhead& ahead, const bool* dots) {
  Tile t = first;
  FetchAhead fetch(ahead, t.k * kPanel * Panels::kValueBytes / 2 / kLineBytes);
  for (int64_t i = 0; i < tiles.count; ++i) {
    t.ahead = fetch.Next();
    t.rows = tiles.Size(i);
    DispatchRows(format, t, dots[i]);
    t.a += t.rows * t.k;
    t.c += t.rows * t.c_stride;
    if (t.out != nullptr) t.out += t.rows * t.out_stride;
  }
}
}  // namespace
}  // namespace stretto::engine::cpu
