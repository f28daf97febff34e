// The folder that checkpoints lie in: how one becomes complete, and which ones stay.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "base/files.h"
#include "engine/training/checkpoint_manifest.h"

namespace stretto::engine {
// The folder that a checkpoint of this name is written into. `attempt` tells those of several ranks
// apart that belong to one attempt to write it; empty: there is one rank.
std::string PartialFolder(const std::string& root, const std::string& name,
                          const std::string& attempt = "");

// Makes what lies in `partial` the checkpoint manifest.info.path: writes the manifest, renames the
// folder, points `latest` to it, removes old ones. When it fails, `latest` still names a whole one.
absl::Status CommitCheckpoint(Files& files, const std::string& root, const std::string& partial,
                              const CheckpointManifest& manifest, int64_t keep);
}  // namespace stretto::engine
