// Which checkpoint of a run is meant.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace stretto::cli {
// The folder of a run's checkpoint: `latest` or nothing (the newest), a step's number, a folder's
// name in the run's checkpoints, or a path (absolute, or relative to the current folder). NotFound
// lists the checkpoints that there are.
absl::StatusOr<std::string> FindCheckpoint(const std::string& run_dir, const std::string& which);
}  // namespace stretto::cli
