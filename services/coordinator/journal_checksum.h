// Checksums of what a run's journal holds of rollouts, so that bytes that changed on disk are
// noticed before anything is trained on them: SQLite looks after its pages' structure, not after
// their content. XXH3 of 64 bits, over all that a row says.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "services/coordinator/journal.h"

namespace stretto::services {
int64_t PromptChecksum(absl::Span<const int32_t> ids);
// What a generator made.
int64_t RolloutChecksum(uint64_t group, const RolloutRecord& rollout);
// What a scorer made of it, with its components as the journal has them.
int64_t ScoreChecksum(uint64_t group, const RolloutRecord& rollout, const std::string& components);
}  // namespace stretto::services
