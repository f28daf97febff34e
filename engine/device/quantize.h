// Quantised weights: what a row of W_NK becomes; and quantised keys and values, where a row is what
// one token has in one head (int8 and fp8 only). Pure functions, the same bits on every machine, so
// that backends agree on the stored values as they do on sums.
//
//   int8  w_nk ≈ scale_n · q_nk, q in [−127, 127], scale_n = max_k |w_nk| / 127
//   fp8   w_nk ≈ scale_n · v_nk, v an OCP e4m3 number (no infinities, 448 the largest),
//         scale_n = max_k |w_nk| / 448
//   int4  w_nk ≈ scale_ng · q_nk, q in [−8, 7], for groups g of 32 successive k; scale_ng is the
//         element of largest magnitude / −8, rounded to bf16 (as GGUF's Q4_0 does with f16), so
//         that scale · q is exact in f32
//
// Values are rounded to nearest, ties to even. A row (or group) with a NaN or infinity gets that as
// its scale: the products show it. One whose magnitudes are all below 2^-100 becomes zeros.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {
// How a packed weight matrix, or a KV cache, is stored.
enum class WeightFormat : uint8_t { kPlain, kInt8, kInt4, kFp8 };  // kPlain: in its own dtype
// "plain", "int8", "int4", "fp8".
absl::string_view Name(WeightFormat format);
// "bf16" (or "plain"), "int8", "int4", "fp8"; InvalidArgument names the choices.
absl::StatusOr<WeightFormat> ParseWeightFormat(absl::string_view name);
// The same for a KV cache, which can't be int4.
absl::StatusOr<WeightFormat> ParseKvFormat(absl::string_view name);

inline constexpr int64_t kInt4Group = 32;  // elements of k that share a scale

// `count` elements to q; the scale is returned.
float QuantizeInt8(const float* w, int64_t count, int8_t* q);
float QuantizeFp8(const float* w, int64_t count, int8_t* q);
inline float QuantizeKv(WeightFormat format, const float* row, int64_t count, int8_t* q) {
  return format == WeightFormat::kInt8 ? QuantizeInt8(row, count, q) : QuantizeFp8(row, count, q);
}
// At most kInt4Group elements; the scale as bf16 bits.
uint16_t QuantizeInt4Group(const float* w, int64_t count, int8_t* q);

// The value of e4m3 bits.
float Fp8ToF32(int8_t bits);
}  // namespace stretto::engine
