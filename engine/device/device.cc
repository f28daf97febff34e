#include "engine/device/device.h"

#include "absl/strings/str_cat.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/device/reference/reference_device.h"

namespace stretto::engine {
std::string NumericProfile::ToString() const {
  return absl::StrCat(backend, "/", instruction_set, "/", DTypeName(), "/", k_leaves);
}

std::string NumericProfile::DTypeName() const {
  std::string name(Name(dtype));
  if (weights != WeightFormat::kPlain) absl::StrAppend(&name, "+", Name(weights));
  if (kv != WeightFormat::kPlain) absl::StrAppend(&name, "+kv-", Name(kv));
  return name;
}

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options) {
  if (options.backend == "cpu") return CreateCpuDevice(options);
  if (options.backend == "reference") return CreateReferenceDevice(options);
  return absl::InvalidArgumentError(absl::StrCat("device: unknown backend \"", options.backend,
                                                 "\"; expected \"cpu\" or \"reference\""));
}
}  // namespace stretto::engine
