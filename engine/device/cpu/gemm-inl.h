// What the register tiles of matrix products share: how many rows and panels a tile has, the order
// of bf16 columns inside a panel row, and the accumulators. Included once for each Highway target.
#if defined(STRETTO_ENGINE_DEVICE_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRETTO_ENGINE_DEVICE_CPU_GEMM_INL_H_
#undef STRETTO_ENGINE_DEVICE_CPU_GEMM_INL_H_
#else
#define STRETTO_ENGINE_DEVICE_CPU_GEMM_INL_H_
#endif

// clang-format off
#include "engine/device/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
// Accumulators that fit into the registers beside the operands.
constexpr int kMaxAccumulators = kLanes == 16 ? 24 : (kLanes == 1 ? 16 : 12);
constexpr int kMaxRows = kMaxAccumulators / (kVectors * (kLanes == 16 ? 2 : 1));
constexpr int kMaxPanels = kLanes == 16 ? 8 : 4;

// Panels that a tile of `rows` rows computes at once: enough chains to hide the latency. Several
// panels also need registers for their own rows.
constexpr int PanelsFor(int rows) {
  constexpr int kMost = kLanes == 16 ? kMaxAccumulators : 8;
  int panels = kMaxPanels;
  while (panels > 1 && rows * panels * kVectors > kMost) panels /= 2;
  return panels;
}

// Up to eight lanes, a panel row of bf16 holds columns j and j + 8 as the halves of one 32-bit
// word: widening is a shift and a mask. With 16 lanes it holds them in order.
constexpr bool kPaired = kLanes <= 8;
constexpr uint8_t kPairedSlot[16] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
constexpr uint8_t kPlainSlot[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr const uint8_t* kSlot = kPaired ? kPairedSlot : kPlainSlot;

template <bool kBf16>
HWY_INLINE void LoadPanelRow(const void* panel, int64_t k, V* HWY_RESTRICT b) {
  if constexpr (!kBf16) {
    const float* p = static_cast<const float*>(panel) + k * kPanel;
    for (int i = 0; i < kVectors; ++i) b[i] = hn::LoadU(D(), p + i * kLanes);
  } else if constexpr (kPaired) {
    const DU du;
    const uint32_t* p =
        reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(panel) + k * kPanel);
    constexpr int kHalf = kVectors / 2;
    for (int i = 0; i < kHalf; ++i) {
      const auto words = hn::LoadU(du, p + i * kLanes);
      b[i] = hn::BitCast(D(), hn::ShiftLeft<16>(words));
      b[kHalf + i] = hn::BitCast(D(), hn::And(words, hn::Set(du, 0xffff0000u)));
    }
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(panel) + k * kPanel;
    for (int i = 0; i < kVectors; ++i) b[i] = WidenBf16(p + i * kLanes);
  }
}

template <int kRows, int kPanels>
struct Accumulators {
  V v[kRows][kPanels][kVectors];
};

template <int kRows, int kPanels>
HWY_INLINE void LoadC(const Tile& t, const float* c, Accumulators<kRows, kPanels>& acc) {
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      for (int i = 0; i < kVectors; ++i) {
        acc.v[r][p][i] =
            t.load_c ? hn::LoadU(D(), c + r * t.c_stride + p * kPanel + i * kLanes) : hn::Zero(D());
      }
    }
  }
}

template <int kRows, int kPanels>
HWY_INLINE void StoreC(const Tile& t, float* c, const Accumulators<kRows, kPanels>& acc) {
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      for (int i = 0; i < kVectors; ++i) {
        hn::StoreU(acc.v[r][p][i], D(), c + r * t.c_stride + p * kPanel + i * kLanes);
      }
    }
  }
}

template <int kRows, int kPanels>
HWY_INLINE void NarrowC(const Tile& t, uint16_t* out, const Accumulators<kRows, kPanels>& acc) {
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      for (int i = 0; i < kVectors; ++i) {
        NarrowBf16(acc.v[r][p][i], out + r * t.out_stride + p * kPanel + i * kLanes);
      }
    }
  }
}
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#endif  // STRETTO_ENGINE_DEVICE_CPU_GEMM_INL_H_
