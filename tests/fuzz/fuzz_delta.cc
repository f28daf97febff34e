// A weights delta against a base: whatever the bytes, an error or a tensor of the base's size; and
// the encoder's own delta of any two tensors gives the second back.
//
// Input: dtype (1 byte, bf16 or f32 or u8 by its low bits) · number of base elements (1 byte) ·
// base · delta.
#include <algorithm>
#include <cstdlib>

#include "engine/weights/delta.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using stretto::DType;
  if (size < 2) return 0;
  constexpr DType kTypes[] = {DType::kBF16, DType::kF32, DType::kU8, DType::kF16};
  const DType dtype = kTypes[data[0] & 3];
  const size_t base_size = std::min<size_t>(data[1] * stretto::SizeOf(dtype), size - 2) /
                           stretto::SizeOf(dtype) * stretto::SizeOf(dtype);
  const absl::Span<const uint8_t> base(data + 2, base_size);
  const absl::Span<const uint8_t> delta(data + 2 + base_size, size - 2 - base_size);
  const auto applied = stretto::engine::ApplyDelta(dtype, base, delta);
  if (applied.ok() && applied->size() != base.size()) std::abort();

  if (delta.size() < base.size()) return 0;
  const absl::Span<const uint8_t> next = delta.first(base.size());
  const auto back =
      stretto::engine::ApplyDelta(dtype, base, stretto::engine::EncodeDelta(dtype, base, next));
  if (!back.ok() || absl::MakeConstSpan(*back) != next) std::abort();
  return 0;
}
