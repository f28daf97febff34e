// The lossless difference of two versions of a tensor. After a small optimizer step most bf16
// elements are the same and the others moved by a few steps of the bf16 grid: a delta says which,
// and by how many. For bf16 it is coded close to its entropy (grid_codec.h); for other dtypes it is
// a list of (position gap, signed number of grid steps), varint-coded and compressed.
//
// Grid: an element's bits are mapped to an integer that orders all values (negative NaNs, −inf, …,
// −0, +0, …, +inf, NaNs) one grid point apart; the mapping is a bijection, so NaN payloads and the
// sign of zero survive. bf16 and f16 have 2^16 grid points, f32 2^32.
//
// Bytes of a delta (integers little-endian, varints LEB128):
//   u8 mode         0 unchanged · 1 sparse · 2 whole · 4 steps · 5 bits · 6 grid (4 to 6: bf16)
//   0: nothing more
//   1: varint count · varint size of the gaps · varint size of the steps · zstd frame of
//      gaps (varint each: first position, then position − previous − 1) and
//      steps (varint each: zigzag of new − old, never 0)
//   2: zstd frame of the new bytes
//   4: zstd frame of the steps of all elements, modulo 2^16, zigzag: the low bytes, then the high
//      bytes, both in order of the old elements' exponents
//   5: zstd frame of what change_bits.h says
//   6: as in grid_codec.h (3 was an earlier code of the same)
// Deltas live as long as the processes that make them; nobody reads one from another release.
// Encoding takes 5 where an eighth of the elements changed, mostly by one step, 4 where a quarter
// changed by more, and what is smaller than the tensor; else 2, so that any change of any dtype
// costs at most about the tensor itself.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/weights/version.h"

namespace stretto::engine {
// `base` and `next` have the same size, a multiple of the element's. Pure.
Bytes EncodeDelta(DType dtype, absl::Span<const uint8_t> base, absl::Span<const uint8_t> next);

// Writes what `next` was into `out`, as large as `base` and elsewhere, from a delta that may be
// anything: DATA_LOSS for bytes that no encoder writes, as far as they show (else the result is not
// what a version's hashes say), or that are for another size; then `out` may hold anything. Never
// takes more memory than a small multiple of the base. Pure.
absl::Status ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                        absl::Span<const uint8_t> delta, absl::Span<uint8_t> out);
// The same; `see` sees the result piece by piece, in order, in the caches where that is possible.
using SeeBytes = absl::FunctionRef<void(absl::Span<const uint8_t>)>;
absl::Status ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                        absl::Span<const uint8_t> delta, absl::Span<uint8_t> out, SeeBytes see);
absl::StatusOr<Bytes> ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                                 absl::Span<const uint8_t> delta);

// A whole version's difference.
struct VersionDelta {
  int64_t base_number = 0, number = 0;
  std::string base_hash, hash;
  std::vector<SharedBytes> tensors;  // one delta each, in manifest order

  int64_t NumBytes() const;
};

// Both have the same tensors (SameTensors).
std::shared_ptr<const VersionDelta> EncodeVersionDelta(const WeightsVersion& base,
                                                       const WeightsVersion& next);
// A version made of another and its delta, tensor after tensor, as they come.
class VersionPatch {
 public:
  // `base` outlives it.
  VersionPatch(const WeightsVersion& base, int64_t number, std::string hash, Manifest manifest);

  // The next tensor's delta is applied and the result verified; DATA_LOSS otherwise.
  absl::Status Add(absl::Span<const uint8_t> delta);
  // All tensors are here: the new version.
  absl::StatusOr<std::shared_ptr<const WeightsVersion>> Finish();

 private:
  const WeightsVersion& base_;
  const int64_t number_;
  const std::string hash_;
  Manifest manifest_;
  absl::Status error_;
  std::vector<SharedBytes> tensors_;
};
// All or nothing: the new version with every hash verified against `manifest` and `hash`, or an
// error; `base` stays as it is. Tensors that did not change are shared with `base`.
absl::StatusOr<std::shared_ptr<const WeightsVersion>> ApplyVersionDelta(
    const WeightsVersion& base, int64_t number, const std::string& hash, const Manifest& manifest,
    absl::Span<const SharedBytes> deltas);
}  // namespace stretto::engine
