// Learning rate schedules: a linear warm-up, then constant, or falling to 0 at `total_steps`.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {
struct LrSchedule {
  enum class Kind : uint8_t { kConstant, kLinear, kCosine };
  Kind kind = Kind::kConstant;
  double lr = 1e-6;
  int64_t warmup_steps = 0;  // step s of these has lr · s / warmup_steps
  int64_t total_steps = 0;   // kLinear and kCosine reach 0 after this step

  // The rate of 1-based step `step`.
  double At(int64_t step) const;
};
// "constant", "linear" or "cosine".
absl::StatusOr<LrSchedule::Kind> ParseScheduleKind(absl::string_view name);
absl::string_view Name(LrSchedule::Kind kind);
}  // namespace stretto::engine
