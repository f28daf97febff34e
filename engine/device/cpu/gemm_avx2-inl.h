// The largest register tiles of AVX2, four to six rows of one panel. With six, twelve sums, two
// vectors of B, an element of A and the mask that widens bf16 take all sixteen registers: compilers
// spill here, so each k is spelt out. Included once for each Highway target.
#if defined(STRETTO_ENGINE_DEVICE_CPU_GEMM_AVX2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRETTO_ENGINE_DEVICE_CPU_GEMM_AVX2_INL_H_
#undef STRETTO_ENGINE_DEVICE_CPU_GEMM_AVX2_INL_H_
#else
#define STRETTO_ENGINE_DEVICE_CPU_GEMM_AVX2_INL_H_
#endif

// clang-format off
#include "engine/device/cpu/gemm-inl.h"
// clang-format on

#if HWY_TARGET == HWY_AVX2
HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
// NOLINTBEGIN(hicpp-no-assembler)
// sum_i += a[0] · b_i
HWY_INLINE void AddRow(const float* a, __m256 b0, __m256 b1, __m256& sum0, __m256& sum1) {
  __m256 x;
  asm volatile(
      "vbroadcastss %[a], %[x]\n\t"
      "vfmadd231ps %[b0], %[x], %[sum0]\n\t"
      "vfmadd231ps %[b1], %[x], %[sum1]"
      : [sum0] "+x"(sum0), [sum1] "+x"(sum1), [x] "=&x"(x)
      : [a] "m"(*a), [b0] "x"(b0), [b1] "x"(b1));
}

template <bool kBf16>
HWY_INLINE void LoadTwo(const char* panel, __m256i high_half, __m256& b0, __m256& b1) {
  if constexpr (kBf16) {
    asm volatile(
        "vmovdqu %[words], %[b1]\n\t"
        "vpslld $16, %[b1], %[b0]\n\t"
        "vpand %[mask], %[b1], %[b1]"
        : [b0] "=&x"(b0), [b1] "=&x"(b1)
        : [words] "m"(*reinterpret_cast<const __m256i_u*>(panel)), [mask] "x"(high_half));
  } else {
    asm volatile("vmovups %[p0], %[b0]\n\tvmovups %[p1], %[b1]"
                 : [b0] "=&x"(b0), [b1] "=&x"(b1)
                 : [p0] "m"(*reinterpret_cast<const __m256_u*>(panel)), [p1] "m"(*reinterpret_cast<
                                                                                 const __m256_u*>(
                                                                            panel + 32)));
  }
}
// NOLINTEND(hicpp-no-assembler)

// Two vectors of one row of C.
HWY_INLINE void LoadRow(const float* c, __m256& sum0, __m256& sum1) {
  sum0 = _mm256_loadu_ps(c);
  sum1 = _mm256_loadu_ps(c + 8);
}
HWY_INLINE void StoreRow(float* c, __m256 sum0, __m256 sum1) {
  _mm256_storeu_ps(c, sum0);
  _mm256_storeu_ps(c + 8, sum1);
}
HWY_INLINE void NarrowRow(uint16_t* out, __m256 sum0, __m256 sum1) {
  NarrowBf16(V{sum0}, out);
  NarrowBf16(V{sum1}, out + 8);
}

// `kPacked`: a_stride is kRows, which saves an addition for every k.
// The sums are variables, not an array: in an array compilers keep them in memory.
template <bool kBf16, int kRows, bool kPacked>
HWY_NOINLINE void FullTile(const Tile& t, int64_t panel) {
  static_assert(kRows >= 4 && kRows <= 6);
  constexpr int kRowBytes = kPanel * (kBf16 ? 2 : 4);
  float* c = t.c + panel * kPanel;
  const ptrdiff_t s = t.c_stride, a_stride = kPacked ? kRows : t.a_stride;
  const float* a = t.a;
  const char* b = static_cast<const char*>(t.panels.data) +
                  panel * t.panel_stride * static_cast<ptrdiff_t>(kBf16 ? 2 : 4);
  const char* ahead = t.ahead != nullptr ? static_cast<const char*>(t.ahead) : b;
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 c00 = _mm256_setzero_ps(), c01 = c00, c10 = c00, c11 = c00, c20 = c00, c21 = c00;
  __m256 c30 = c00, c31 = c00, c40 = c00, c41 = c00, c50 = c00, c51 = c00;
  if (t.load_c) {
    LoadRow(c, c00, c01);
    LoadRow(c + s, c10, c11);
    LoadRow(c + 2 * s, c20, c21);
    LoadRow(c + 3 * s, c30, c31);
    if constexpr (kRows > 4) LoadRow(c + 4 * s, c40, c41);
    if constexpr (kRows > 5) LoadRow(c + 5 * s, c50, c51);
  }
  const auto one = [&](int i) HWY_ATTR {
    __m256 b0, b1;
    LoadTwo<kBf16>(b + i * kRowBytes, high_half, b0, b1);
    const float* x = a + i * a_stride;
    AddRow(x, b0, b1, c00, c01);
    AddRow(x + 1, b0, b1, c10, c11);
    AddRow(x + 2, b0, b1, c20, c21);
    AddRow(x + 3, b0, b1, c30, c31);
    if constexpr (kRows > 4) AddRow(x + 4, b0, b1, c40, c41);
    if constexpr (kRows > 5) AddRow(x + 5, b0, b1, c50, c51);
  };
  int64_t k = t.k;
  for (; k >= kKPerLine; k -= kKPerLine) {
    __builtin_prefetch(ahead, 0, 2);
    ahead += kLineBytes;
    one(0);
    one(1);
    one(2);
    one(3);
    a += kKPerLine * a_stride;
    b += kKPerLine * kRowBytes;
  }
  for (; k > 0; --k, a += a_stride, b += kRowBytes) one(0);
  if (t.out != nullptr) {
    uint16_t* out = t.out + panel * kPanel;
    NarrowRow(out, c00, c01);
    NarrowRow(out + t.out_stride, c10, c11);
    NarrowRow(out + 2 * t.out_stride, c20, c21);
    NarrowRow(out + 3 * t.out_stride, c30, c31);
    if constexpr (kRows > 4) NarrowRow(out + 4 * t.out_stride, c40, c41);
    if constexpr (kRows > 5) NarrowRow(out + 5 * t.out_stride, c50, c51);
    return;
  }
  StoreRow(c, c00, c01);
  StoreRow(c + s, c10, c11);
  StoreRow(c + 2 * s, c20, c21);
  StoreRow(c + 3 * s, c30, c31);
  if constexpr (kRows > 4) StoreRow(c + 4 * s, c40, c41);
  if constexpr (kRows > 5) StoreRow(c + 5 * s, c50, c51);
}

template <bool kBf16, int kRows>
HWY_INLINE void FullTiles(const Tile& t) {
  for (int64_t p = 0; p < t.num_panels; ++p) {
    t.a_stride == kRows ? FullTile<kBf16, kRows, true>(t, p) : FullTile<kBf16, kRows, false>(t, p);
  }
}
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();
#endif

#endif  // STRETTO_ENGINE_DEVICE_CPU_GEMM_AVX2_INL_H_
