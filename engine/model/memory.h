// Device memory of the model's passes: tensors that live as long as their owner.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "engine/device/device.h"

namespace stretto::engine {
class DeviceMemory {
 public:
  absl::StatusOr<Tensor> Make(Device& device, DType dtype, int64_t rows, int64_t cols) {
    return Add(device.Allocate(Bytes(dtype, rows, cols)), dtype, rows, cols);
  }
  absl::StatusOr<Tensor> MakeZeros(Device& device, DType dtype, int64_t rows, int64_t cols) {
    return Add(device.AllocateZeros(Bytes(dtype, rows, cols)), dtype, rows, cols);
  }
  size_t bytes() const {
    size_t total = 0;
    for (const Buffer& b : buffers_) total += b.bytes();
    return total;
  }

 private:
  static size_t Bytes(DType dtype, int64_t rows, int64_t cols) {
    STRETTO_CHECK(rows > 0 && cols > 0);
    return static_cast<size_t>(rows * cols) * SizeOf(dtype);
  }
  absl::StatusOr<Tensor> Add(absl::StatusOr<Buffer> buffer, DType dtype, int64_t rows,
                             int64_t cols) {
    RETURN_IF_ERROR(buffer.status());
    buffers_.push_back(*std::move(buffer));
    return buffers_.back().View(dtype, rows, cols);
  }

  std::vector<Buffer> buffers_;
};
}  // namespace stretto::engine
