// Tensors that lie in the host's memory already (a version's bytes), for devices that reach them
// there: what is laid out from them need not be copied before.
#pragma once

#include "engine/device/device.h"

namespace stretto::engine {
class ReadsHostMemory {
 public:
  virtual ~ReadsHostMemory() = default;
  // See below.
  virtual Tensor AtHost(const void* data, DType dtype, int64_t rows, int64_t cols) = 0;
};

// rows × cols contiguous elements at `data`, which outlives the tensor, to be read alone; no tensor
// where the device can't, or `data` is not aligned for its elements.
inline Tensor HostTensor(Device& device, const void* data, DType dtype, int64_t rows,
                         int64_t cols) {
  auto* reader = dynamic_cast<ReadsHostMemory*>(&device);
  if (reader == nullptr || reinterpret_cast<uintptr_t>(data) % SizeOf(dtype) != 0) return {};
  return reader->AtHost(data, dtype, rows, cols);
}
}  // namespace stretto::engine
