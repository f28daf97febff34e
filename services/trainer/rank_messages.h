// What the trainers of a group tell one another beside the engine's own exchanges: texts, whether
// something has worked, and what a step's objective came to. Each is a collective: all ranks call
// it, and it blocks until they have, or ends as the group does.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"
#include "services/trainer/step_objective.h"

namespace stretto::services {
// Every rank's text, in order of rank.
absl::StatusOr<std::vector<std::string>> GatherTexts(engine::Communicator& group,
                                                     const std::string& mine);

// The same on every rank: OK if `mine` was on all of them, else the first rank's that was not.
absl::Status AgreeOnStatus(engine::Communicator& group, const absl::Status& mine);

// The sequences that each rank has evaluated, in the order of `order` (all of the step's); what was
// refused, if anything, is that of the earliest sequence. The same on every rank, and what a
// trainer that is alone has.
absl::StatusOr<StepSums> GatherSums(engine::Communicator& group, const StepSums& mine,
                                    const std::vector<engine::CompletionRef>& order);
}  // namespace stretto::services
