// The CPU backend: memory is host memory, streams carry nothing, operations complete before they
// return. Operations may be called from several threads; they then compute side by side, one of
// them with the workers.
#pragma once

#include <memory>
#include <optional>

#include "engine/device/cpu/kernels.h"
#include "engine/device/device.h"

namespace stretto::engine {
// InvalidArgument for a negative number of threads. `set`: compute with this instruction set
// (Unavailable if the machine lacks it) instead of the widest; for tests and benchmarks.
absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(
    const DeviceOptions& options, std::optional<cpu::InstructionSet> set = std::nullopt);
}  // namespace stretto::engine
