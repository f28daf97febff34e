// The lossless difference of two bf16 tensors, coded close to its entropy given what the receiver
// knows: the old weights.
//
// After an optimizer step of size lr, a weight w moves to a neighbouring bf16 value with a
// probability near lr / (spacing of bf16 at w), so w's exponent says how likely it changed. Each
// class of exponents has a hazard, −log2(probability to stay) in units of 1/kHalfLife
// (grid_scan.h): hazards of elements that all stay add up. So one symbol says which of many
// elements is the next to change, with the probabilities that coding a bit for every element would
// have. Where most of a class changes (what was 0 in a quantised model), a bit for every element is
// coded.
//
// Bytes (integers little-endian, varints LEB128):
//   varint count of changes > 0 · u8 first exponent · kNumClasses × u8 code of a hazard
//   u8 log2 of a window's groups · varint size of what follows
//   a range coder's bytes (range_coder.h), without zeros at the end; for each piece of kPiece
//   elements:
//     for each element of a dense class: an adaptive bit of the class, whether it changed; if so,
//       its grid steps (step_model.h)
//     for each window of the others: symbols until one says that none is left
//       that the element changed whose hazards before it, from the last change in this window on,
//       add up to b and with it to e, with probability t(e) − t(b), where
//       t(x) = 1 − 2^(−x/kHalfLife), then its grid steps; or that none changed, with
//       1 − t(what is left). What is left ends early, at a whole number of elements, where it were
//       more than ChangeTable::kMostOfStretch, and what follows begins anew.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/weights/version.h"

namespace stretto::engine {
// Of two tensors of the same size that differ. Empty when they have 2^32 elements or more. Pure.
Bytes EncodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next);

// Writes what `next` was into `out`, as large as `base`. DATA_LOSS for bytes that no encoder
// writes, as far as they show; a version's hashes tell the rest. Pure.
absl::Status DecodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                        absl::Span<uint16_t> out);
}  // namespace stretto::engine
