// What every model file looks like to the rest of the program: named tensors whose rows can be read
// as f32 or bf16. A loader never sees quantised blocks, shards, or another tool's tensor names.
//
// Words: a tensor of shape [d0, …, dn] is stored row-major; its rows are its last dimension, so it
// has d0·…·d(n-1) rows of dn elements (a vector is one row, a scalar one row of one element).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/dtype.h"

namespace stretto::engine {
// How a tensor's elements are stored in a file. The first group are plain elements, the second are
// the block formats of GGUF.
enum class StorageType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF8E4M3,
  kF8E5M2,
  kF16,
  kBF16,
  kF32,
  kF64,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ8_K,
};
// Elements in one block, and bytes of one block; plain types have blocks of one element.
int64_t BlockElements(StorageType type);
int64_t BlockBytes(StorageType type);
// "F32", "Q4_K", …: as safetensors and GGUF spell them.
absl::string_view Name(StorageType type);
// Whether ReadRows can give this type as f32 and bf16: F16, BF16, F32, F64 and all blocks.
bool IsReadable(StorageType type);
// The file type of a type of this program.
StorageType ToStorage(DType type);

struct TensorInfo {
  std::string name;  // as Hugging Face names it, whatever the file says
  StorageType type = StorageType::kF32;
  std::vector<int64_t> shape;
  // The stored bytes, valid as long as the source lives. Their rows may be in another order than
  // the tensor's (see gguf.h): read elements with TensorSource::ReadRows only.
  absl::Span<const uint8_t> bytes;
};
int64_t NumElements(const TensorInfo& tensor);
int64_t RowLength(const TensorInfo& tensor);
int64_t NumRows(const TensorInfo& tensor);

// The tensors of one model. Immutable and thread-safe; holds its files mapped while it lives.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  // The file or folder it was opened from, for messages.
  virtual const std::string& path() const = 0;
  // Sorted by name, names unique.
  virtual absl::Span<const TensorInfo> tensors() const = 0;

  // Null where there is none.
  const TensorInfo* Find(absl::string_view name) const;
  // Writes rows [row_begin, row_end) of `name` to `dst`, which has room for
  // (row_end - row_begin) · RowLength elements of `out` (kF32 or kBF16), converting or
  // dequantising. Values are computed in f32 as the format defines them, then rounded to nearest
  // even for bf16 (F64 goes to f32 first). Needs no memory of its own beyond one block row.
  // NotFound: no such tensor. OutOfRange: no such rows. InvalidArgument: a type that can't be read.
  absl::Status ReadRows(absl::string_view name, int64_t row_begin, int64_t row_end, DType out,
                        void* dst) const;
  // All rows.
  absl::Status ReadAll(absl::string_view name, DType out, void* dst) const;
  // The bytes of row `row` of `tensor`, one of tensors(); the default takes them in stored order.
  virtual absl::Span<const uint8_t> RowBytes(const TensorInfo& tensor, int64_t row) const;
  // What has been read of mapped files no longer counts as this process's memory, until it is read
  // again.
  virtual void LetPagesGo() const {}
};

// Converts `count` elements (a multiple of BlockElements) at `src` to f32. The type is readable.
void ToF32(StorageType type, const uint8_t* src, int64_t count, float* dst);
}  // namespace stretto::engine
