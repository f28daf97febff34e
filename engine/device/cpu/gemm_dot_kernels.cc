#include "engine/device/cpu/gemm_dot.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header passes undefined registers on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Not the whole file: functions of headers must not be compiled for processors that few have.
#define STRETTO_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define STRETTO_DOT_INLINE STRETTO_DOT __attribute__((always_inline)) inline

namespace stretto::engine::cpu {
namespace {
constexpr int kMostRows = 12;
constexpr int kWordBytes = 4;
// Bytes of two k of a panel.
constexpr int PairBytes(bool int8) { return kPanel * (int8 ? 2 : kWordBytes); }

// 24 sums, of 32 registers; 8 where there is one row, whose sums wait for memory anyway.
constexpr int PanelsFor(int rows) { return rows > 6 ? 2 : (rows > 3 ? 4 : 8); }
int PanelsAtOnce(int rows) { return PanelsFor(rows); }

template <int kRows, int kPanels>
struct Sums {
  __m512 v[kRows][kPanels];
};

STRETTO_DOT_INLINE __m512i Load(const void* p) { return _mm512_loadu_si512(p); }

STRETTO_DOT_INLINE __m512 Int8AsFloats(const char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Two k of a panel as words. Of int8 the first 16 bytes are k's, and no bf16 is rounded.
template <bool kInt8>
STRETTO_DOT_INLINE __m512i LoadWords(const char* p) {
  if constexpr (!kInt8) return Load(p);
  const __m512i first = _mm512_castps_si512(Int8AsFloats(p));
  const __m512i second = _mm512_castps_si512(Int8AsFloats(p + kPanel));
  return _mm512_or_si512(first, _mm512_srli_epi32(second, 16));
}

// Two k, of rows that are words.
template <bool kInt8, int kRows, int kPanels>
STRETTO_DOT_INLINE void AddDots(const char* a, const char* panels, ptrdiff_t panel_bytes,
                                Sums<kRows, kPanels>& sums) {
  __m512bh b[kPanels];
  for (int p = 0; p < kPanels; ++p) b[p] = (__m512bh)LoadWords<kInt8>(panels + p * panel_bytes);
  for (int r = 0; r < kRows; ++r) {
    int32_t word;
    std::memcpy(&word, a + r * kWordBytes, kWordBytes);
    const auto x = (__m512bh)_mm512_set1_epi32(word);
    for (int p = 0; p < kPanels; ++p) sums.v[r][p] = _mm512_dpbf16_ps(sums.v[r][p], x, b[p]);
  }
}

// Two k, of rows that are f32.
template <bool kInt8, int kRows, int kPanels>
STRETTO_DOT_INLINE void AddChains(const char* a, const char* panels, ptrdiff_t panel_bytes,
                                  Sums<kRows, kPanels>& sums) {
  const auto* x = reinterpret_cast<const float*>(a);
  for (int p = 0; p < kPanels; ++p) {
    const __m512i words = LoadWords<kInt8>(panels + p * panel_bytes);
    const __m512i high = _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    const __m512 first = _mm512_castsi512_ps(high);
    const __m512 second = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    for (int r = 0; r < kRows; ++r) {
      sums.v[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(x[r]), first, sums.v[r][p]);
      sums.v[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(x[kRows + r]), second, sums.v[r][p]);
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
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      const int64_t at = column + p * kPanel;
      if (t.out != nullptr) {
        Narrow(sums.v[r][p], t.out + r * t.out_stride + at);
      } else {
        _mm512_storeu_ps(t.c + r * t.c_stride + at, sums.v[r][p]);
      }
    }
  }
}

// One row waits for memory: it fetches each panel's own next lines.
constexpr ptrdiff_t kStreamAhead = 16 * kLineBytes;
// Several rows wait for the second cache: panels are larger than the first one (3 to 5 % on Zen 4).
constexpr ptrdiff_t kNearAhead = 16 * kLineBytes;

template <bool kInt8, bool kDot, int kRows, int kPanels>
STRETTO_DOT __attribute__((noinline)) void TilePanels(const Tile& t, int64_t panel) {
  constexpr int kRowsBytes = kRows * kWordBytes * (kDot ? 1 : 2);
  const ptrdiff_t panel_bytes = t.panel_stride * (kInt8 ? 1 : 2);
  const char* panels = static_cast<const char*>(t.panels.data) + panel * panel_bytes;
  const char* a = reinterpret_cast<const char*>(t.a);
  const char* ahead = t.ahead != nullptr ? static_cast<const char*>(t.ahead) : panels;
  Sums<kRows, kPanels> sums;
  Begin(t, t.c + panel * kPanel, sums);
#pragma GCC unroll 1
  for (int64_t pairs = t.k / 2; pairs > 0; --pairs) {
    if constexpr (kRows == 1) {
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(panels + p * panel_bytes + kStreamAhead, 0, 2);
      }
    } else {
      // A line for four k, so for every other pair.
      __builtin_prefetch(ahead, 0, 2);
      ahead += PairBytes(kInt8) / 2;
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(panels + p * panel_bytes + kNearAhead, 0, 3);
      }
    }
    if constexpr (kDot) {
      AddDots<kInt8>(a, panels, panel_bytes, sums);
    } else {
      AddChains<kInt8>(a, panels, panel_bytes, sums);
    }
    a += kRowsBytes;
    panels += PairBytes(kInt8);
  }
  End(t, panel * kPanel, sums);
}

template <bool kInt8, bool kDot, int kRows>
STRETTO_DOT void TileRows(const Tile& t) {
  constexpr int kPanels = PanelsFor(kRows);
  int64_t p = 0;
  for (; p + kPanels <= t.num_panels; p += kPanels) TilePanels<kInt8, kDot, kRows, kPanels>(t, p);
  if constexpr (kPanels > 2) {
    for (; p + 2 <= t.num_panels; p += 2) TilePanels<kInt8, kDot, kRows, 2>(t, p);
  }
  for (; p < t.num_panels; ++p) TilePanels<kInt8, kDot, kRows, 1>(t, p);
}

template <bool kInt8, int kRows = kMostRows>
STRETTO_DOT void DispatchRows(const Tile& t, bool dot) {
  if (t.rows == kRows) {
    dot ? TileRows<kInt8, true, kRows>(t) : TileRows<kInt8, false, kRows>(t);
  } else if constexpr (kRows > 1) {
    DispatchRows<kInt8, kRows - 1>(t, dot);
  }
}

STRETTO_DOT void RowTilesOf(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                            const bool* dots, bool int8) {
  Tile t = first;
  FetchAhead fetch(ahead, t.k * PairBytes(int8) / 2 / kLineBytes / 2);
  for (int64_t i = 0; i < tiles.count; ++i) {
    t.ahead = fetch.Next();
    t.rows = tiles.Size(i);
    int8 ? DispatchRows<true>(t, dots[i]) : DispatchRows<false>(t, dots[i]);
    t.a += t.rows * t.k;
    t.c += t.rows * t.c_stride;
    if (t.out != nullptr) t.out += t.rows * t.out_stride;
  }
}

// k goes up, k + 1 down.
inline uint32_t WordAt(const uint16_t* p) { return uint32_t{p[0]} << 16 | p[1]; }

uint16_t LeastOf(uint16_t least, uint32_t word) {
  for (const uint32_t half : {word >> 16, word & 0xffff}) {
    const auto size = static_cast<uint16_t>(half & 0x7fff);
    if (size != 0 && size < least) least = size;
  }
  return least;
}

// v[r] lane i becomes v[i] lane r.
STRETTO_DOT_INLINE void Transpose16(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // v[4 g + c]: lane block b holds column 4 b + c of rows 4 g … 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i a = v[c], b = v[4 + c], d = v[8 + c], e = v[12 + c];
    const __m512i ab_even = _mm512_shuffle_i32x4(a, b, 0x88),
                  ab_odd = _mm512_shuffle_i32x4(a, b, 0xdd);
    const __m512i de_even = _mm512_shuffle_i32x4(d, e, 0x88),
                  de_odd = _mm512_shuffle_i32x4(d, e, 0xdd);
    t[c] = _mm512_shuffle_i32x4(ab_even, de_even, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(ab_even, de_even, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(ab_odd, de_odd, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(ab_odd, de_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

// `smallest` holds, by half, the least magnitude seen less one, so that 0 is the largest.
STRETTO_DOT_INLINE __m512i NoneSmallest() { return _mm512_set1_epi16(-1); }
STRETTO_DOT_INLINE __m512i Smallest(__m512i smallest, __m512i words) {
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
  return _mm512_min_epu16(smallest, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
}
STRETTO_DOT_INLINE uint16_t LeastOfHalves(__m512i smallest) {
  uint16_t halves[32];
  _mm512_storeu_si512(halves, smallest);
  uint16_t least = kNoneSmall;
  for (const uint16_t less_one : halves) {
    const auto size = static_cast<uint16_t>(less_one + 1);
    if (size != 0 && size < least) least = size;
  }
  return least;
}

// Up to 16 columns of two rows, the first in the upper halves; other lanes are 0.
STRETTO_DOT_INLINE __m512i WordsOfRows(const uint16_t* first, const uint16_t* second,
                                       __mmask16 lanes) {
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, first));
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, second));
  return _mm512_or_si512(_mm512_slli_epi32(high, 16), low);
}

STRETTO_DOT_INLINE __mmask16 FirstLanes(int64_t count) {
  return static_cast<__mmask16>(count >= kPanel ? 0xffffu : (1u << count) - 1);
}

STRETTO_DOT uint16_t PackRows(uint32_t* panels, ptrdiff_t panel_words, const uint16_t* src,
                              ptrdiff_t row_stride, int64_t k, int64_t n) {
  __m512i smallest = NoneSmallest();
  for (int64_t i = 0; i < k / 2; ++i) {
    const uint16_t* first = src + 2 * i * row_stride;
    uint32_t* to = panels + i * kPanel;
    for (int64_t j = 0; j < n; j += kPanel, to += panel_words) {
      const __m512i words = WordsOfRows(first + j, first + row_stride + j, FirstLanes(n - j));
      smallest = Smallest(smallest, words);
      _mm512_storeu_si512(to, words);
    }
  }
  return LeastOfHalves(smallest);
}

// Rows that far ahead are fetched.
constexpr int64_t kRowsAhead = 8;

STRETTO_DOT void InterleaveColumns(uint32_t* out, const uint16_t* rows, ptrdiff_t row_stride,
                                   const RowTiles& tiles, int64_t k, uint16_t* least) {
  __m512i smallest[DotKernels::kMostTiles];
  for (int64_t t = 0; t < tiles.count; ++t) smallest[t] = NoneSmallest();
  const int64_t num_columns = tiles.Begin(tiles.count);
  for (int64_t i = 0; i < k / 2; ++i) {
    const uint16_t* first = rows + 2 * i * row_stride;
    for (int64_t j = 0; j < num_columns; j += kLineBytes / 2) {
      __builtin_prefetch(first + kRowsAhead * row_stride + j);
      __builtin_prefetch(first + (kRowsAhead + 1) * row_stride + j);
    }
    for (int64_t t = 0; t < tiles.count; ++t) {
      const int64_t begin = tiles.Begin(t), size = tiles.Size(t);
      const __mmask16 lanes = FirstLanes(size);
      const __m512i words = WordsOfRows(first + begin, first + row_stride + begin, lanes);
      smallest[t] = Smallest(smallest[t], words);
      _mm512_mask_storeu_epi32(out + begin * k + i * size, lanes, words);
    }
  }
  for (int64_t t = 0; t < tiles.count; ++t) {
    least[t] = std::min(least[t], LeastOfHalves(smallest[t]));
  }
}

STRETTO_DOT uint16_t Interleave(uint32_t* out, const uint16_t* rows, ptrdiff_t row_stride,
                                int num_rows, int64_t k) {
  const __mmask16 lanes = static_cast<__mmask16>((1u << num_rows) - 1);
  __m512i smallest = NoneSmallest();
  int64_t i = 0;
  for (; i + 16 <= k / 2; i += 16) {
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      v[r] = r < num_rows ? Load(rows + r * row_stride + 2 * i) : _mm512_setzero_si512();
      smallest = Smallest(smallest, v[r]);
      v[r] = _mm512_rol_epi32(v[r], 16);
    }
    Transpose16(v);
    for (int w = 0; w < 16; ++w) {
      _mm512_mask_storeu_epi32(out + (i + w) * num_rows, lanes, v[w]);
    }
  }
  uint16_t least = LeastOfHalves(smallest);
  for (; i < k / 2; ++i) {
    for (int r = 0; r < num_rows; ++r) {
      const uint32_t word = WordAt(rows + r * row_stride + 2 * i);
      out[i * num_rows + r] = word;
      least = LeastOf(least, word);
    }
  }
  return least;
}

uint16_t Pack(uint32_t* panel, const uint16_t* src, ptrdiff_t row_stride, int64_t k, int64_t n) {
  if (n == kPanel) return Interleave(panel, src, row_stride, kPanel, k);
  uint16_t least = kNoneSmall;
  for (int64_t i = 0; i < k / 2; ++i) {
    for (int64_t j = 0; j < kPanel; ++j) {
      const uint32_t word = j < n ? WordAt(src + j * row_stride + 2 * i) : 0;
      panel[i * kPanel + j] = word;
      least = LeastOf(least, word);
    }
  }
  return least;
}

constexpr DotKernels kDotKernels = {kMostRows, PanelsAtOnce,      Pack,      Interleave,
                                    PackRows,  InterleaveColumns, RowTilesOf};
}  // namespace

const DotKernels* GetDotKernels() {
  static const bool present =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bf16");
  return present ? &kDotKernels : nullptr;
}
}  // namespace stretto::engine::cpu
#else
namespace stretto::engine::cpu {
const DotKernels* GetDotKernels() { return nullptr; }
}  // namespace stretto::engine::cpu
#endif
