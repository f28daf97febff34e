// The element types that tensors of this program have, in memory and in files. Quantised types of
// model files are not here: they exist only inside the readers, which give f32 or bf16 rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace stretto {
enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kI64, kU8 };

// Bytes of one element.
constexpr size_t SizeOf(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

// "f32", "bf16", "f16", "i32", "i64", "u8".
constexpr absl::string_view Name(DType type) {
  switch (type) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}
}  // namespace stretto
