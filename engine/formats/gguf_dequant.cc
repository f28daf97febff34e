#include "engine/formats/gguf_dequant.h"

#include <cstring>

#include "base/bfloat16.h"
#include "base/check.h"

namespace stretto::engine {
namespace {
float HalfAt(const uint8_t* src) {
  uint16_t bits;
  std::memcpy(&bits, src, 2);
  return F16ToF32(bits);
}

float Signed(uint8_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }

// Blocks of 32: element j of the first half is the low nibble of byte j, of the second half the
// high nibble.

// {f16 d, u8 q[16]}: d · (q - 8).
void BlockQ4_0(const uint8_t* src, float* dst) {
  const float d = HalfAt(src);
  const uint8_t* q = src + 2;
  for (int j = 0; j < 16; ++j) {
    dst[j] = static_cast<float>((q[j] & 0xf) - 8) * d;
    dst[j + 16] = static_cast<float>((q[j] >> 4) - 8) * d;
  }
}

// {f16 d, f16 m, u8 q[16]}: d · q + m.
void BlockQ4_1(const uint8_t* src, float* dst) {
  const float d = HalfAt(src), m = HalfAt(src + 2);
  const uint8_t* q = src + 4;
  for (int j = 0; j < 16; ++j) {
    dst[j] = static_cast<float>(q[j] & 0xf) * d + m;
    dst[j + 16] = static_cast<float>(q[j] >> 4) * d + m;
  }
}

// The 5-bit value of element `j`: bit j of `high` above its nibble.
int FiveBits(const uint8_t* q, uint32_t high, int j) {
  const int nibble = j < 16 ? q[j] & 0xf : q[j - 16] >> 4;
  return nibble | static_cast<int>((high >> j) & 1u) << 4;
}

// {f16 d, u32 high, u8 q[16]}: d · (q - 16).
void BlockQ5_0(const uint8_t* src, float* dst) {
  const float d = HalfAt(src);
  uint32_t high;
  std::memcpy(&high, src + 2, 4);
  for (int j = 0; j < 32; ++j) dst[j] = static_cast<float>(FiveBits(src + 6, high, j) - 16) * d;
}

// {f16 d, f16 m, u32 high, u8 q[16]}: d · q + m.
void BlockQ5_1(const uint8_t* src, float* dst) {
  const float d = HalfAt(src), m = HalfAt(src + 2);
  uint32_t high;
  std::memcpy(&high, src + 4, 4);
  for (int j = 0; j < 32; ++j) dst[j] = static_cast<float>(FiveBits(src + 8, high, j)) * d + m;
}

// {f16 d, i8 q[32]}: d · q.
void BlockQ8_0(const uint8_t* src, float* dst) {
  const float d = HalfAt(src);
  for (int j = 0; j < 32; ++j) dst[j] = Signed(src[2 + j]) * d;
}

// Blocks of 256 ("K"): two halves of 128, each of packed groups of 32 or 16 with their own scale.

// {u8 scale_min[16], u8 q[64], f16 d, f16 dmin}: groups of 16; low nibble scales, high nibble min.
void BlockQ2_K(const uint8_t* src, float* dst) {
  const uint8_t* scales = src;
  const float d = HalfAt(src + 80), dmin = HalfAt(src + 82);
  for (int group = 0; group < 16; ++group) {
    const uint8_t* q = src + 16 + group / 8 * 32 + group % 2 * 16;
    const int shift = group % 8 / 2 * 2;
    const float scale = d * static_cast<float>(scales[group] & 0xf);
    const float min = dmin * static_cast<float>(scales[group] >> 4);
    for (int l = 0; l < 16; ++l) {
      *dst++ = scale * static_cast<float>((q[l] >> shift) & 3) - min;
    }
  }
}

// {u8 high[32], u8 q[64], u8 scales[12], f16 d}: groups of 16; a 6-bit scale less 32; a value is
// two bits less 4 where its high bit is not set.
void BlockQ3_K(const uint8_t* src, float* dst) {
  const uint8_t* scales = src + 96;
  const float d = HalfAt(src + 108);
  for (int group = 0; group < 16; ++group) {
    const int low = group < 8 ? scales[group] & 0xf : scales[group - 8] >> 4;
    const int high = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    const uint8_t* q = src + 32 + group / 8 * 32 + group % 2 * 16;
    const uint8_t* mask = src + group % 2 * 16;
    const int shift = group % 8 / 2 * 2, bit = group / 2;
    for (int l = 0; l < 16; ++l) {
      const int value = ((q[l] >> shift) & 3) - ((mask[l] >> bit) & 1 ? 0 : 4);
      *dst++ = scale * static_cast<float>(value);
    }
  }
}

// The 6-bit scale and minimum of group `j` of 8, packed in 12 bytes.
struct ScaleMin {
  float scale, min;
};
ScaleMin UnpackScaleMin(const uint8_t* packed, int j) {
  if (j < 4) {
    return {static_cast<float>(packed[j] & 63), static_cast<float>(packed[j + 4] & 63)};
  }
  return {static_cast<float>((packed[j + 4] & 0xf) | (packed[j - 4] >> 6) << 4),
          static_cast<float>((packed[j + 4] >> 4) | (packed[j] >> 6) << 4)};
}

// {f16 d, f16 dmin, u8 scale_min[12], u8 q[128]}: groups of 32, nibbles.
void BlockQ4_K(const uint8_t* src, float* dst) {
  const float d = HalfAt(src), dmin = HalfAt(src + 2);
  for (int group = 0; group < 8; ++group) {
    const ScaleMin packed = UnpackScaleMin(src + 4, group);
    const float scale = d * packed.scale, min = dmin * packed.min;
    const uint8_t* q = src + 16 + group / 2 * 32;
    const int shift = group % 2 * 4;
    for (int l = 0; l < 32; ++l) {
      *dst++ = scale * static_cast<float>((q[l] >> shift) & 0xf) - min;
    }
  }
}

// {f16 d, f16 dmin, u8 scale_min[12], u8 high[32], u8 q[128]}: as Q4_K with a fifth bit.
void BlockQ5_K(const uint8_t* src, float* dst) {
  const float d = HalfAt(src), dmin = HalfAt(src + 2);
  const uint8_t* high = src + 16;
  for (int group = 0; group < 8; ++group) {
    const ScaleMin packed = UnpackScaleMin(src + 4, group);
    const float scale = d * packed.scale, min = dmin * packed.min;
    const uint8_t* q = src + 48 + group / 2 * 32;
    const int shift = group % 2 * 4;
    for (int l = 0; l < 32; ++l) {
      const int value = ((q[l] >> shift) & 0xf) | ((high[l] >> group) & 1) << 4;
      *dst++ = scale * static_cast<float>(value) - min;
    }
  }
}

// {u8 low[128], u8 high[64], i8 scales[16], f16 d}: groups of 16; six bits less 32.
void BlockQ6_K(const uint8_t* src, float* dst) {
  const float d = HalfAt(src + 208);
  for (int quarter = 0; quarter < 8; ++quarter) {  // of 32 values; four of them in each half
    const int half = quarter / 4, part = quarter % 4;
    const uint8_t* low = src + half * 64 + part % 2 * 32;
    const uint8_t* high = src + 128 + half * 32;
    const uint8_t* scales = src + 192 + half * 8 + part * 2;
    for (int l = 0; l < 32; ++l) {
      const int nibble = (low[l] >> (part / 2 * 4)) & 0xf;
      const int value = (nibble | ((high[l] >> (part * 2)) & 3) << 4) - 32;
      *dst++ = d * Signed(scales[l / 16]) * static_cast<float>(value);
    }
  }
}

// {f32 d, i8 q[256], i16 sums[16]}: d · q; the sums serve dot products only.
void BlockQ8_K(const uint8_t* src, float* dst) {
  float d;
  std::memcpy(&d, src, 4);
  for (int j = 0; j < 256; ++j) dst[j] = d * Signed(src[4 + j]);
}

using BlockFunction = void (*)(const uint8_t*, float*);
BlockFunction FunctionOf(StorageType type) {
  switch (type) {
    case StorageType::kQ4_0:
      return BlockQ4_0;
    case StorageType::kQ4_1:
      return BlockQ4_1;
    case StorageType::kQ5_0:
      return BlockQ5_0;
    case StorageType::kQ5_1:
      return BlockQ5_1;
    case StorageType::kQ8_0:
      return BlockQ8_0;
    case StorageType::kQ2_K:
      return BlockQ2_K;
    case StorageType::kQ3_K:
      return BlockQ3_K;
    case StorageType::kQ4_K:
      return BlockQ4_K;
    case StorageType::kQ5_K:
      return BlockQ5_K;
    case StorageType::kQ6_K:
      return BlockQ6_K;
    case StorageType::kQ8_K:
      return BlockQ8_K;
    default:
      return nullptr;
  }
}
}  // namespace

void DequantizeBlocks(StorageType type, const uint8_t* src, int64_t num_blocks, float* dst) {
  const BlockFunction function = FunctionOf(type);
  STRETTO_CHECK(function != nullptr);
  for (int64_t i = 0; i < num_blocks; ++i) {
    function(src, dst);
    src += BlockBytes(type);
    dst += BlockElements(type);
  }
}
}  // namespace stretto::engine
