#include "engine/device/cpu/gemm_dot.h"

#if defined(__x86_64__)
#define STRETTO_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define STRETTO_DOT_INLINE STRETTO_DOT __attribute__((always_inline)) inline

#include <algorithm>
#include <cstring>

#include "engine/device/cpu/gemm_dot-inl.h"

namespace stretto::engine::cpu {
namespace {
STRETTO_DOT_INLINE __m512 Int8AsFloats(const char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Rows of k as they come; each int8 is a bf16 number.
struct Int8Panels {
  static constexpr int kWords = 1, kBytes = 2 * kPanel, kValueBytes = 1;
  STRETTO_DOT_INLINE void Words(const char* p, __m512i* words) const {
    const __m512i first = _mm512_castps_si512(Int8AsFloats(p));
    const __m512i second = _mm512_castps_si512(Int8AsFloats(p + kPanel));
    words[0] = _mm512_or_si512(first, _mm512_srli_epi32(second, 16));
  }
};

STRETTO_DOT void RowTilesOfPairs(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                                 const bool* dots) {
  RowTilesOf(Bf16Panels(), first, tiles, ahead, dots);
}
STRETTO_DOT void RowTilesOfInt8(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                                const bool* dots) {
  RowTilesOf(Int8Panels(), first, tiles, ahead, dots);
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
  for (; num_rows == 1 && i + 16 <= k / 2; i += 16) {
    const __m512i v = Load(rows + 2 * i);
    smallest = Smallest(smallest, v);
    _mm512_storeu_si512(out + i, _mm512_rol_epi32(v, 16));
  }
  for (; i + 16 <= k / 2; i += 16) {
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      // Rows are too short for the processor to see where their lines go: those of the next tile.
      if (r < num_rows) __builtin_prefetch(rows + (num_rows + r) * row_stride + 2 * i);
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

// Interleave of kPanel rows into lines of memory that are not fetched before they are written.
STRETTO_DOT uint16_t InterleavePast(uint32_t* out, const uint16_t* rows, ptrdiff_t row_stride,
                                    int64_t k) {
  const int64_t whole = k / 32 * 32;
  __m512i smallest = NoneSmallest();
  for (int64_t i = 0; i < whole / 2; i += 16) {
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      v[r] = Load(rows + r * row_stride + 2 * i);
      smallest = Smallest(smallest, v[r]);
      v[r] = _mm512_rol_epi32(v[r], 16);
    }
    Transpose16(v);
    for (int w = 0; w < 16; ++w) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + (i + w) * kPanel), v[w]);
    }
  }
  _mm_sfence();
  const uint16_t least = LeastOfHalves(smallest);
  if (whole == k) return least;
  return std::min(
      least, Interleave(out + whole / 2 * kPanel, rows + whole, row_stride, kPanel, k - whole));
}

uint16_t Pack(uint32_t* panel, const uint16_t* src, ptrdiff_t row_stride, int64_t k, int64_t n,
              bool past_caches) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(panel) % kLineBytes == 0;
  if (n == kPanel && past_caches && is_aligned) return InterleavePast(panel, src, row_stride, k);
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

int PanelsAtOnce(int rows) { return PanelsFor(rows); }

DotKernels MakeKernels() {
  DotKernels k;
  k.max_rows = kMostRows;
  k.panels_at_once = PanelsAtOnce;
  k.pack = Pack;
  k.interleave = Interleave;
  k.pack_rows = PackRows;
  k.interleave_columns = InterleaveColumns;
  k.row_tiles = RowTilesOfPairs;
  k.row_tiles_int8 = RowTilesOfInt8;
  k.bytes = GetByteDotKernels();
  return k;
}
}  // namespace

const DotKernels* GetDotKernels() {
  static const bool present =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bf16");
  static const DotKernels kernels = MakeKernels();
  return present ? &kernels : nullptr;
}
}  // namespace stretto::engine::cpu
#else
namespace stretto::engine::cpu {
const DotKernels* GetDotKernels() { return nullptr; }
}  // namespace stretto::engine::cpu
#endif
