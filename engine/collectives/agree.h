// What ranks tell one another in words: texts, and whether something has worked on all of them.
// Each is a collective: all ranks call it, and it blocks until they have, or ends as the group
// does.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"

namespace stretto::engine {
// Every rank's text, in order of rank.
absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& group, const std::string& mine);

// The same on every rank: OK if `mine` was on all of them, else the first rank's that was not.
absl::Status AgreeOnStatus(Communicator& group, const absl::Status& mine);

}  // namespace stretto::engine
