#include "engine/device/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"

namespace stretto::engine {
namespace {
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr float kSmallest = 0x1p-100f;

// The bits of the largest |w|: they order magnitudes, and NaNs above all.
uint32_t LargestMagnitude(const float* w, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(w[i]) & kMagnitude);
  }
  return largest;
}

// To the nearest integer, ties to even, for |x| < 2^22: adding 1.5·2^23 leaves no fraction bits.
float RoundToInteger(float x) { return (x + 12582912.0f) - 12582912.0f; }

// e4m3 bits without the sign of 0 <= x <= 448.
int32_t MagnitudeToFp8(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  const int32_t rounded = bits + 0x7ffff + ((bits >> 20) & 1);  // three bits of mantissa stay
  const int32_t normal = (rounded >> 20) - ((127 - 7) << 3);
  const auto below = static_cast<int32_t>(RoundToInteger(x * 512.0f));  // steps of 2^-9
  return x < 0x1p-6f ? below : normal;
}

// Fills q with zeros where there is nothing to scale by; true if it did, with the scale to return.
bool WithoutScale(uint32_t largest, int64_t count, int8_t* q, float* scale) {
  const auto max = std::bit_cast<float>(largest);
  if (largest < kInfinity && max >= kSmallest) return false;
  std::fill(q, q + count, int8_t{0});
  *scale = largest < kInfinity ? 0.0f : max;
  return true;
}
}  // namespace

absl::string_view Name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kPlain:
      return "plain";
    case WeightFormat::kInt8:
      return "int8";
    case WeightFormat::kInt4:
      return "int4";
    case WeightFormat::kFp8:
      return "fp8";
  }
  return "?";
}

absl::StatusOr<WeightFormat> ParseWeightFormat(absl::string_view name) {
  if (name == "bf16") return WeightFormat::kPlain;
  for (const WeightFormat f :
       {WeightFormat::kPlain, WeightFormat::kInt8, WeightFormat::kInt4, WeightFormat::kFp8}) {
    if (name == Name(f)) return f;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("weight dtype '", name, "': expected bf16, int8, int4 or fp8"));
}

absl::StatusOr<WeightFormat> ParseKvFormat(absl::string_view name) {
  absl::StatusOr<WeightFormat> format = ParseWeightFormat(name);
  if (format.ok() && *format != WeightFormat::kInt4) return format;
  return absl::InvalidArgumentError(
      absl::StrCat("KV dtype '", name, "': expected bf16, int8 or fp8"));
}

float QuantizeInt8(const float* w, int64_t count, int8_t* q) {
  const uint32_t largest = LargestMagnitude(w, count);
  float scale = 0;
  if (WithoutScale(largest, count, q, &scale)) return scale;
  const auto max = std::bit_cast<float>(largest);
  const float inverse = 127.0f / max;
  for (int64_t i = 0; i < count; ++i) {
    q[i] = static_cast<int8_t>(static_cast<int32_t>(RoundToInteger(w[i] * inverse)));
  }
  return max / 127.0f;
}

float QuantizeFp8(const float* w, int64_t count, int8_t* q) {
  const uint32_t largest = LargestMagnitude(w, count);
  float scale = 0;
  if (WithoutScale(largest, count, q, &scale)) return scale;
  const auto max = std::bit_cast<float>(largest);
  const float inverse = 448.0f / max;
  for (int64_t i = 0; i < count; ++i) {
    const float x = w[i] * inverse;
    const auto bits = std::bit_cast<uint32_t>(x);
    const auto sign = static_cast<int32_t>((bits >> 24) & 0x80u);
    q[i] = static_cast<int8_t>(MagnitudeToFp8(std::bit_cast<float>(bits & kMagnitude)) | sign);
  }
  return max / 448.0f;
}

uint16_t QuantizeInt4Group(const float* w, int64_t count, int8_t* q) {
  const uint32_t largest = LargestMagnitude(w, count);
  float scale = 0;
  if (WithoutScale(largest, count, q, &scale)) return F32ToBf16(scale);
  float extreme = 0;  // the first element of that magnitude, with its sign
  for (int64_t i = count - 1; i >= 0; --i) {
    if ((std::bit_cast<uint32_t>(w[i]) & kMagnitude) == largest) extreme = w[i];
  }
  const uint16_t bits = F32ToBf16(extreme / -8.0f);
  const float inverse = 1.0f / Bf16ToF32(bits);
  for (int64_t i = 0; i < count; ++i) {
    const float x = RoundToInteger(w[i] * inverse);
    q[i] = static_cast<int8_t>(static_cast<int32_t>(std::min(7.0f, std::max(-8.0f, x))));
  }
  return bits;
}

float Fp8ToF32(int8_t bits) {
  // Exponent and mantissa in f32's place make the value times 2^-120, subnormal or not.
  const auto placed = (static_cast<uint32_t>(static_cast<int32_t>(bits)) << 20) & 0x87f00000u;
  return std::bit_cast<float>(placed) * 0x1p120f;
}
}  // namespace stretto::engine
