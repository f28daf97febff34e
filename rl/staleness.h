// How old a rollout is, and whether it may still be trained on.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace stretto::rl {
// Trainer version − the oldest version that wrote one of the tokens; 0 for a completion without
// tokens.
int64_t Staleness(int64_t trainer_version, absl::Span<const int64_t> token_versions);

// Whether tokens written by version `written_by` or later may enter the step that starts from
// `trainer_version`.
inline bool WithinStaleness(int64_t trainer_version, int64_t written_by, int64_t max_staleness) {
  return trainer_version - written_by <= max_staleness;
}
}  // namespace stretto::rl
