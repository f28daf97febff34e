#include "engine/device/cpu/gemm_dot.h"

#if defined(__x86_64__)
#define STRETTO_DOT \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")))
#define STRETTO_DOT_INLINE STRETTO_DOT __attribute__((always_inline)) inline

#include <array>
#include <bit>

#include "engine/device/cpu/gemm_dot-inl.h"
#include "engine/device/quantize.h"

namespace stretto::engine::cpu {
namespace {
constexpr int kSigns = 0x80;

// What the seven lower bits of a byte stand for, as the two halves of a bf16 number.
struct alignas(kLineBytes) Halves {
  std::array<uint8_t, kSigns> upper, lower;
};
template <class ValueOf>
Halves HalvesOf(ValueOf value_of) {
  Halves h;
  for (int i = 0; i < kSigns; ++i) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value_of(i)));
    h.upper[i] = static_cast<uint8_t>(bits >> 24);
    h.lower[i] = static_cast<uint8_t>(bits >> 16);
  }
  return h;
}

// A look-up gives 64 numbers' halves at once; four k in the order in which unpacking them makes
// words of two k.
struct BytePanels {
  static constexpr int kWords = 2, kBytes = kLineBytes, kValueBytes = 1;
  __m512i upper[2], lower[2];

  STRETTO_DOT_INLINE explicit BytePanels(const Halves& h)
      : upper{Load(h.upper.data()), Load(h.upper.data() + kLineBytes)},
        lower{Load(h.lower.data()), Load(h.lower.data() + kLineBytes)} {}
  STRETTO_DOT_INLINE void Words(const char* p, __m512i* words) const {
    constexpr int kFirstOrBoth = 0xf8;  // a | (b & c)
    const __m512i bytes = Load(p);
    const __m512i low = _mm512_permutex2var_epi8(lower[0], bytes, lower[1]);
    const __m512i high =
        _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(upper[0], bytes, upper[1]), bytes,
                                  _mm512_set1_epi8(static_cast<char>(kSigns)), kFirstOrBoth);
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
};

STRETTO_DOT void RowTilesOfHalves(const Halves& halves, const Tile& first, const RowTiles& tiles,
                                  const PanelsAhead& ahead, const bool* dots) {
  RowTilesOf(BytePanels(halves), first, tiles, ahead, dots);
}

void RowTilesOfInt8(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                    const bool* dots) {
  static const Halves halves = HalvesOf([](int i) { return i; });
  RowTilesOfHalves(halves, first, tiles, ahead, dots);
}

void RowTilesOfFp8(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                   const bool* dots) {
  static const Halves halves = HalvesOf([](int i) { return Fp8ToF32(static_cast<int8_t>(i)); });
  RowTilesOfHalves(halves, first, tiles, ahead, dots);
}

// 16 bytes of a line give four columns: their words of k and k + 1, then of k + 2 and k + 3, a
// column's second k first.
template <bool kInt8>
void OrderPanel(const int8_t* q_NK, int64_t k, int8_t* panel) {
  constexpr int kFirstK[] = {1, 0, 3, 2};  // of bytes 0, 1, 8 and 9
  for (int64_t k0 = 0; k0 < k; k0 += 4, panel += kLineBytes) {
    for (int column = 0; column < kPanel; ++column) {
      int8_t* to = panel + column / 4 * 16 + column % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        const int8_t v = q_NK[column * k + k0 + kFirstK[i]];
        to[i / 2 * 8 + i % 2] = kInt8 && v < 0 ? static_cast<int8_t>(-v | kSigns) : v;
      }
    }
  }
}
void Order(const int8_t* q_NK, int64_t k, bool int8, int8_t* panel) {
  int8 ? OrderPanel<true>(q_NK, k, panel) : OrderPanel<false>(q_NK, k, panel);
}

constexpr ByteDotKernels kByteDotKernels = {Order, RowTilesOfInt8, RowTilesOfFp8};
}  // namespace

const ByteDotKernels* GetByteDotKernels() {
  return __builtin_cpu_supports("avx512vbmi") ? &kByteDotKernels : nullptr;
}
}  // namespace stretto::engine::cpu
#else
namespace stretto::engine::cpu {
const ByteDotKernels* GetByteDotKernels() { return nullptr; }
}  // namespace stretto::engine::cpu
#endif
