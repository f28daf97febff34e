// The difference of two bf16 tensors of which a good part of the elements changed, mostly by one
// grid step: a bit for each element, whether it changed, two for each change, and a number where it
// is more than one step. Not as small as what codes changes one by one
// (grid_codec.h; packed by zstd a third larger where one in six changed), but several times as
// fast.
//
// Bytes: a bit for each element, lowest first · for each change two bits, lowest first: whether it
// leads down, whether it is of more than one step · for each of those varint steps − 2. Bits that
// belong to nothing are 0.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/weights/version.h"

namespace stretto::engine {
// The most bytes that so many elements take.
inline constexpr uint64_t MostChangeBits(uint64_t num_elements) {
  return (num_elements + 7) / 8 + (num_elements + 3) / 4 + 3 * num_elements;
}

// Appended to `out`. Of two tensors of the same size. Pure.
void EncodeChangeBits(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next, Bytes& out);

// Writes what `next` was into `out`, as large as `base`. DATA_LOSS for bytes that no encoder
// writes. Pure.
absl::Status DecodeChangeBits(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                              absl::Span<uint16_t> out);
}  // namespace stretto::engine
