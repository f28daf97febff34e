// The lossless difference of two bf16 tensors, coded close to its entropy given what the receiver
// knows: the old weights.
//
// After an optimizer step of size lr, a weight w moves to a neighbouring bf16 value with a
// probability near lr / (spacing of bf16 at w), so w's exponent says how likely it changed. Each
// class of exponents has a hazard, −log2(1 − p) in units of 1/kHalfLife (grid_scan.h): hazards of
// elements that all stay add up. So one symbol says which of many elements is the next to change,
// with the probabilities that coding a bit for every element would have.
//
// Bytes (integers little-endian, varints LEB128):
//   varint count of changes > 0 · u8 first exponent · kNumClasses × varint hazard < 2^16
//   varint size of what follows
//   a range coder's bytes (range_coder.h), without zeros at the end; for each change in order, from
//   the element after the last one on:
//     a symbol for each window of elements whose hazards add up to at most kHalfLife (or one
//     element
//       of more): that the element changed whose hazards before it add up to b and with it to e,
//       with probability t(e) − t(b), where t(x) = 1 − 2^(−x/kHalfLife); or none, with 1 − t(the
//       window)
//     its grid steps (delta.h): sign, adaptive given the weight's sign; size − 1, unary with
//       adaptive bits given class and place, from 15 on Elias gamma
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
