// What a checkpoint carries beside the engine's state: the caller's own JSON, and the outcome of
// the step that made the version, so that a repeat of that step can be answered after a restart.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "services/trainer/policy_trainer.h"

namespace stretto::services {
struct CheckpointExtra {
  std::string caller_json;
  absl::optional<StepOutcome> last_outcome;
};

// Times and speeds are left out: equal runs write equal checkpoints, to the byte.
std::string ToJson(const CheckpointExtra& extra);
// DATA_LOSS for text that ToJson does not write.
absl::StatusOr<CheckpointExtra> ParseExtra(const std::string& text);
}  // namespace stretto::services
