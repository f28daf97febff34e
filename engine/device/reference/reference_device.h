// The reference backend: the table of operations as plain loops in fp32, without SIMD or threads.
// It is the oracle of the conformance tests, and because its handles are not addresses it proves
// that nothing above the table touches device memory. Fresh memory is full of NaN, so that a value
// used before it was written shows. Sums follow the order of device.h.
#pragma once

#include <memory>

#include "engine/device/device.h"

namespace stretto::engine {
// `num_threads` is ignored; without `allow_fma` chains round after each product.
std::unique_ptr<Device> CreateReferenceDevice(const DeviceOptions& options);
}  // namespace stretto::engine
