// What code above the table of operations sees of device memory: opaque owners (Buffer) and matrix
// views (Tensor). Nothing above the table may dereference a handle; bytes enter and leave through
// Device::Upload and Device::Download alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/check.h"
#include "base/dtype.h"

namespace stretto::engine {
class Device;

// A view of a row-major matrix in device memory: rows × cols elements, consecutive rows
// `row_stride` elements apart, columns contiguous. Vectors are matrices of one row. Copyable; owns
// nothing.
struct Tensor {
  uint64_t handle = 0;  // the first element; meaningful to its device only. 0: no tensor
  DType dtype = DType::kF32;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0;

  explicit operator bool() const { return handle != 0; }
  int64_t size() const { return rows * cols; }
  bool contiguous() const { return row_stride == cols || rows <= 1; }

  // Rows [begin, begin + count).
  Tensor Rows(int64_t begin, int64_t count) const {
    STRETTO_CHECK(begin >= 0 && count >= 0 && begin + count <= rows);
    Tensor t = *this;
    t.handle += static_cast<uint64_t>(begin * row_stride) * SizeOf(dtype);
    t.rows = count;
    return t;
  }
  // Columns [begin, begin + count) of every row.
  Tensor Cols(int64_t begin, int64_t count) const {
    STRETTO_CHECK(begin >= 0 && count >= 0 && begin + count <= cols);
    Tensor t = *this;
    t.handle += static_cast<uint64_t>(begin) * SizeOf(dtype);
    t.cols = count;
    return t;
  }
  // The same contiguous elements as new_rows × (size / new_rows).
  Tensor Reshape(int64_t new_rows) const {
    STRETTO_CHECK(contiguous() && new_rows > 0 && size() % new_rows == 0);
    Tensor t = *this;
    t.rows = new_rows;
    t.cols = t.row_stride = size() / new_rows;
    return t;
  }
};

// Owns device memory; movable. Freed with the object, which must not outlive its device.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device* device, uint64_t handle, size_t bytes)
      : device_(device), handle_(handle), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  size_t bytes() const { return bytes_; }
  uint64_t handle() const { return handle_; }
  // A contiguous matrix that begins `byte_offset` bytes into the buffer.
  Tensor View(DType dtype, int64_t rows, int64_t cols, size_t byte_offset = 0) const {
    STRETTO_CHECK(byte_offset + static_cast<size_t>(rows * cols) * SizeOf(dtype) <= bytes_);
    return {handle_ + byte_offset, dtype, rows, cols, cols};
  }

 private:
  Device* device_ = nullptr;
  uint64_t handle_ = 0;
  size_t bytes_ = 0;
};
}  // namespace stretto::engine
