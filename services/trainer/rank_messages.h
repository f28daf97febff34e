// What the trainers of a group tell one another beside the engine's own exchanges: what a step's
// objective came to. It is a collective: all ranks call it, and it blocks until they have, or ends
// as the group does.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"
#include "services/trainer/step_objective.h"

namespace stretto::services {
// The sequences that each rank has evaluated, in the order of `order` (all of the step's); what was
// refused, if anything, is that of the earliest sequence. The same on every rank, and what a
// trainer that is alone has.
absl::StatusOr<StepSums> GatherSums(engine::Communicator& group, const StepSums& mine,
                                    const std::vector<engine::CompletionRef>& order);
}  // namespace stretto::services
