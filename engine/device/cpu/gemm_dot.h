// Products of bf16 by bf16 with instructions that add two products at a time (AVX512_BF16, half of
// the instructions of f32), and the same bits as everywhere.
//
// VDPBF16PS adds to each lane of f32 the products of its two pairs of bf16, one after the other,
// the odd pair first, each a fused multiply-add rounded to nearest even (Intel 64 and IA-32
// Architectures SDM, "VDPBF16PS"; conformance_machines_test.cc compares their sums).
// So with k at the odd and k + 1 at the even place of a pair, a chain of them is the chain over k.
// One thing differs: numbers below 2^-126 are read and written as zero. Where no product that isn't
// 0 can be so small that a sum of them comes there, nothing shows: with |a| >= 2^x and |b| >= 2^y
// for all that aren't 0, every product is a multiple of 2^(x + y − 14), hence so is every sum
// (rounding keeps multiples of powers of two), and at x + y − 14 >= −126 none that isn't 0 is
// small. That is looked at for every tile of rows (SameBitsAsChain); the others, which are rare,
// and rows of f32 take fused multiply-adds. `fast` numerics (DeviceOptions::exact) don't look.
//
// Such weights are packed as panels [k / 2][16] of 32-bit words, k in the upper half. Bytes,
// of int8 or fp8, are bf16 numbers, too, and become such on the way: by look-ups of both halves
// where the machine has them (AVX512_VBMI), int8 else by conversion. In products of the
// backward pass either factor may have k along its columns: pack_rows and interleave_columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/device/cpu/kernels.h"

namespace stretto::engine::cpu {
// The smallest absolute value that isn't 0, as bits of bf16; kNoneSmall where all are 0.
inline constexpr uint16_t kNoneSmall = 0xffff;
inline constexpr uint16_t kLeastInt8 = 0x3f80;  // 1
inline constexpr uint16_t kLeastFp8 = 0x3b00;   // 2^-9
inline bool SameBitsAsChain(uint16_t least_a, uint16_t least_b) {
  constexpr int kFirstNormal = 0x80, kExponents = 2 * 127 + 14 - 126;
  if (least_a < kFirstNormal || least_b < kFirstNormal) return false;
  return (least_a >> 7) + (least_b >> 7) >= kExponents;
}

// Panels of bytes: sign and magnitude, [k / 4] lines in an order of their own. k % 4 == 0.
struct ByteDotKernels {
  // A panel of rows of k values each, as quantize.h leaves them.
  void (*order)(const int8_t* q_NK, int64_t k, bool int8, int8_t* panel) = nullptr;
  // As DotKernels::row_tiles.
  void (*row_tiles_int8)(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                         const bool* dots) = nullptr;
  void (*row_tiles_fp8)(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                        const bool* dots) = nullptr;
};
// nullptr where the machine has no look-ups of bytes.
const ByteDotKernels* GetByteDotKernels();

struct DotKernels {
  static constexpr int64_t kMostTiles = 16;  // of interleave_columns
  int max_rows = 1;
  // That a tile of so many rows computes at once.
  int (*panels_at_once)(int rows) = nullptr;
  // W_NK rows (row n at src + n·row_stride) into one panel; columns ≥ n zero, k even. past_caches:
  // of a panel that will not be read soon. Returns the smallest value, as above.
  uint16_t (*pack)(uint32_t* panel, const uint16_t* src, ptrdiff_t row_stride, int64_t k, int64_t n,
                   bool past_caches) = nullptr;
  // Rows of A as words [k / 2][num_rows], k even. Returns the smallest value, as above.
  uint16_t (*interleave)(uint32_t* out, const uint16_t* rows, ptrdiff_t row_stride, int num_rows,
                         int64_t k) = nullptr;
  // The same of factors whose k goes down: of B, row i at src + i·row_stride with n columns, all
  // panels, `panel_words` apart; of A, columns that begin at `rows`. k even.
  uint16_t (*pack_rows)(uint32_t* panels, ptrdiff_t panel_words, const uint16_t* src,
                        ptrdiff_t row_stride, int64_t k, int64_t n) = nullptr;
  // Of A all tiles at once, one after another in `out`, k words for each column of them; each one's
  // smallest value to `least`. A line of memory has columns of several tiles, and rows far apart
  // push one another out of the caches.
  void (*interleave_columns)(uint32_t* out, const uint16_t* rows, ptrdiff_t row_stride,
                             const RowTiles& tiles, int64_t k, uint16_t* least) = nullptr;
  // As GemmKernels::row_tiles. Tile i's rows are words where dots[i], else f32 [k][rows]; either
  // way the next tile begins k·rows floats further on.
  void (*row_tiles)(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                    const bool* dots) = nullptr;
  // The same where panels are of int8, [k][16].
  void (*row_tiles_int8)(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead,
                         const bool* dots) = nullptr;
  const ByteDotKernels* bytes = nullptr;
};

// nullptr where the machine hasn't these instructions.
const DotKernels* GetDotKernels();
}  // namespace stretto::engine::cpu
