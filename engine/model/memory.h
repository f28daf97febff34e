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
    STRETTO_CHECK(rows > 0 && cols > 0);
    ASSIGN_OR_RETURN(Buffer buffer,
                     device.Allocate(static_cast<size_t>(rows * cols) * SizeOf(dtype)));
    buffers_.push_back(std::move(buffer));
    return buffers_.back().View(dtype, rows, cols);
  }
  size_t bytes() const {
    size_t total = 0;
    for (const Buffer& b : buffers_) total += b.bytes();
    return total;
  }

 private:
  std::vector<Buffer> buffers_;
};
}  // namespace stretto::engine
