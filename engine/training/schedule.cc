#include "engine/training/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/status.h"

namespace stretto::engine {
double LrSchedule::At(int64_t step) const {
  if (step <= warmup_steps)
    return lr * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (kind == Kind::kConstant) return lr;
  const auto falling = static_cast<double>(std::max<int64_t>(1, total_steps - warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - warmup_steps) / falling);
  if (kind == Kind::kLinear) return lr * (1.0 - progress);
  return lr * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

absl::StatusOr<LrSchedule::Kind> ParseScheduleKind(absl::string_view name) {
  for (LrSchedule::Kind kind :
       {LrSchedule::Kind::kConstant, LrSchedule::Kind::kLinear, LrSchedule::Kind::kCosine}) {
    if (name == Name(kind)) return kind;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "learning rate schedule: expected constant, linear or cosine, found '", name, "'"));
}

absl::string_view Name(LrSchedule::Kind kind) {
  switch (kind) {
    case LrSchedule::Kind::kConstant:
      return "constant";
    case LrSchedule::Kind::kLinear:
      return "linear";
    case LrSchedule::Kind::kCosine:
      return "cosine";
  }
  return "?";
}
}  // namespace stretto::engine
