// A group among some members of another one, with connections of its own: so that operations of
// the two can be under way at the same time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"
#include "engine/collectives/direct_communicator.h"

namespace stretto::engine {
// All ranks of `world` call it at the same time, each naming the ranks (rising, its own among them)
// that it is to be with; those agree on the list. The group's name is the world's, "/" and `name`;
// its epoch the world's; its members keep their names. Blocks. Errors as of ConnectGroup.
absl::StatusOr<std::unique_ptr<Communicator>> JoinSubgroup(Communicator& world,
                                                           const std::string& name,
                                                           const std::vector<int>& ranks,
                                                           const CommunicatorOptions& options = {});
}  // namespace stretto::engine
