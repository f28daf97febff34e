#include "engine/formats/tensor_file.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/formats/gguf_dequant.h"

// Files are little-endian and are read in place.
static_assert(std::endian::native == std::endian::little);

namespace stretto::engine {
namespace {
struct TypeTraits {
  absl::string_view name;
  int64_t elements, bytes;
  bool readable;
};

const TypeTraits& Traits(StorageType type) {
  static constexpr TypeTraits kTraits[] = {
      {"BOOL", 1, 1, false},    {"U8", 1, 1, false},      {"I8", 1, 1, false},
      {"U16", 1, 2, false},     {"I16", 1, 2, false},     {"U32", 1, 4, false},
      {"I32", 1, 4, false},     {"U64", 1, 8, false},     {"I64", 1, 8, false},
      {"F8_E4M3", 1, 1, false}, {"F8_E5M2", 1, 1, false}, {"F16", 1, 2, true},
      {"BF16", 1, 2, true},     {"F32", 1, 4, true},      {"F64", 1, 8, true},
      {"Q4_0", 32, 18, true},   {"Q4_1", 32, 20, true},   {"Q5_0", 32, 22, true},
      {"Q5_1", 32, 24, true},   {"Q8_0", 32, 34, true},   {"Q2_K", 256, 84, true},
      {"Q3_K", 256, 110, true}, {"Q4_K", 256, 144, true}, {"Q5_K", 256, 176, true},
      {"Q6_K", 256, 210, true}, {"Q8_K", 256, 292, true},
  };
  static_assert(std::size(kTraits) == static_cast<size_t>(StorageType::kQ8_K) + 1);
  return kTraits[static_cast<size_t>(type)];
}

template <class T>
T Load(const uint8_t* src, int64_t index) {
  T value;
  std::memcpy(&value, src + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Converts one row to bf16 by way of f32 pieces that are whole blocks.
void RowToBf16(StorageType type, const uint8_t* src, int64_t count, uint16_t* dst) {
  if (type == StorageType::kBF16) {
    if (count > 0) std::memcpy(dst, src, static_cast<size_t>(count) * 2);
    return;
  }
  constexpr int64_t kPiece = 1024;
  float piece[kPiece];
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t size = std::min(kPiece, count - begin);
    ToF32(type, src + begin / BlockElements(type) * BlockBytes(type), size, piece);
    for (int64_t i = 0; i < size; ++i) dst[begin + i] = F32ToBf16(piece[i]);
  }
}
}  // namespace

int64_t BlockElements(StorageType type) { return Traits(type).elements; }
int64_t BlockBytes(StorageType type) { return Traits(type).bytes; }
absl::string_view Name(StorageType type) { return Traits(type).name; }
bool IsReadable(StorageType type) { return Traits(type).readable; }

StorageType ToStorage(DType type) {
  switch (type) {
    case DType::kF32:
      return StorageType::kF32;
    case DType::kBF16:
      return StorageType::kBF16;
    case DType::kF16:
      return StorageType::kF16;
    case DType::kI32:
      return StorageType::kI32;
    case DType::kI64:
      return StorageType::kI64;
    case DType::kU8:
      return StorageType::kU8;
  }
  return StorageType::kU8;
}

int64_t NumElements(const TensorInfo& tensor) { return NumRows(tensor) * RowLength(tensor); }
int64_t RowLength(const TensorInfo& tensor) {
  return tensor.shape.empty() ? 1 : tensor.shape.back();
}
int64_t NumRows(const TensorInfo& tensor) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < tensor.shape.size(); ++i) rows *= tensor.shape[i];
  return rows;
}

void ToF32(StorageType type, const uint8_t* src, int64_t count, float* dst) {
  STRETTO_CHECK(IsReadable(type) && count % BlockElements(type) == 0);
  if (count == 0) return;
  switch (type) {
    case StorageType::kF32:
      std::memcpy(dst, src, static_cast<size_t>(count) * 4);
      return;
    case StorageType::kF16:
      for (int64_t i = 0; i < count; ++i) dst[i] = F16ToF32(Load<uint16_t>(src, i));
      return;
    case StorageType::kBF16:
      for (int64_t i = 0; i < count; ++i) dst[i] = Bf16ToF32(Load<uint16_t>(src, i));
      return;
    case StorageType::kF64:
      for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<float>(Load<double>(src, i));
      return;
    default:
      DequantizeBlocks(type, src, count / BlockElements(type), dst);
  }
}

const TensorInfo* TensorSource::Find(absl::string_view name) const {
  const auto all = tensors();
  const auto it = std::lower_bound(
      all.begin(), all.end(), name,
      [](const TensorInfo& info, absl::string_view wanted) { return info.name < wanted; });
  return it != all.end() && it->name == name ? &*it : nullptr;
}

absl::Span<const uint8_t> TensorSource::RowBytes(const TensorInfo& tensor, int64_t row) const {
  const int64_t size = RowLength(tensor) / BlockElements(tensor.type) * BlockBytes(tensor.type);
  return tensor.bytes.subspan(static_cast<size_t>(row * size), static_cast<size_t>(size));
}

absl::Status TensorSource::ReadRows(absl::string_view name, int64_t row_begin, int64_t row_end,
                                    DType out, void* dst) const {
  STRETTO_CHECK(out == DType::kF32 || out == DType::kBF16);
  const TensorInfo* tensor = Find(name);
  if (tensor == nullptr) {
    return absl::NotFoundError(absl::StrCat(path(), ": there is no tensor ", name));
  }
  if (!IsReadable(tensor->type)) {
    return absl::InvalidArgumentError(absl::StrCat(path(), ": tensor ", name, " is of type ",
                                                   Name(tensor->type),
                                                   ", expected floating-point weights"));
  }
  if (row_begin < 0 || row_begin > row_end || row_end > NumRows(*tensor)) {
    return absl::OutOfRangeError(absl::StrCat(path(), ": tensor ", name, " has ", NumRows(*tensor),
                                              " rows, asked for [", row_begin, ", ", row_end, ")"));
  }
  const int64_t length = RowLength(*tensor);
  auto* to = static_cast<uint8_t*>(dst);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const uint8_t* from = RowBytes(*tensor, row).data();
    if (out == DType::kF32) {
      ToF32(tensor->type, from, length, reinterpret_cast<float*>(to));
    } else {
      RowToBf16(tensor->type, from, length, reinterpret_cast<uint16_t*>(to));
    }
    to += static_cast<size_t>(length) * SizeOf(out);
  }
  return absl::OkStatus();
}

absl::Status TensorSource::ReadAll(absl::string_view name, DType out, void* dst) const {
  const TensorInfo* tensor = Find(name);
  return ReadRows(name, 0, tensor != nullptr ? NumRows(*tensor) : 0, out, dst);
}
}  // namespace stretto::engine
