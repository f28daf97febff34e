// The lossless difference of two bf16 tensors, coded close to its entropy given what the receiver
// knows: the old weights.
//
// After an optimizer step of size lr, a weight w moves to a neighbouring bf16 value with a
// probability near lr / (spacing of bf16 at w), so w's exponent says how likely it changed.
// Exponents belong to classes, and classes that change about as readily to groups
// (grid_lines.h). In a sparse group, changes lead to a neighbour: they are told by rank, the number
// of the group's elements before them, as gaps from one to the next, and by direction. In the dense
// group, of small weights that mostly change and by more, every element is told (dense_code.h).
// What is rare in its group is told by its place.
//
// Elements are worked on in lines of 64, whose properties are masks, so that what there is to do
// for an element that stays is a part of a few vector instructions. "A step" here is one of the
// bits as an integer, which is one of the grid's but where it leads over zero.
//
// Bytes (integers little-endian, varints LEB128):
//   u8 first exponent · 4 bits for each of kNumClasses: its group; 7: dense; 15: none · u8 number
//   of sparse groups, at most kMaxSparseGroups · for each u8 low bits of its gaps, to begin with ·
//   varint number of its changes
//   varint size of each part · the parts:
//     for each sparse group its gaps (GapMean): ranks before the first change, and between changes
//     a bit for each change in sparse groups, in order of the elements: 1 up, 0 down
//     the dense elements, in order (dense_code.h); nothing if there are none
//     for each other change: varint elements since the last one · varint zigzag of its steps
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/weights/grid_plan.h"
#include "engine/weights/version.h"

namespace stretto::engine {
// Of two tensors of the same size that differ. Empty when they have 2^32 elements or more. Pure.
Bytes EncodeGrid(const GridPlan& plan, absl::Span<const uint16_t> base,
                 absl::Span<const uint16_t> next);

// Whoever sees a result piece by piece, in order, while it is in the caches.
using SeeElements = absl::FunctionRef<void(absl::Span<const uint16_t>)>;

// Writes what `next` was into `out`, as large as `base`. DATA_LOSS for bytes that no encoder
// writes, as far as they show; a version's hashes tell the rest. Pure.
absl::Status DecodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                        absl::Span<uint16_t> out, SeeElements see);
}  // namespace stretto::engine
