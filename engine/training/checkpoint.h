// Checkpoints of a TrainerEngine: a folder of safetensors files and a manifest with a hash
// (XXH3-128) for every tensor, written so that a crash at any moment leaves the older ones whole:
//   <root>/step-00000012/masters.safetensors, m.safetensors, v.safetensors
//   <root>/step-00000012/manifest.json    last of the folder: without it the folder does not count
//   <root>/latest                         the folder's name, replaced after the manifest
// A restored engine continues with the same bits as one that was never stopped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/files.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine {
struct CheckpointInfo {
  std::string path;             // the folder
  std::string checkpoint_hash;  // tree hash over names and hashes of all tensors and the counters
  TrainerCounters counters;
  std::string extra_json;  // the caller's own state, as given
};

struct CheckpointOptions {
  // Empty: this rank of a group takes part in gathering what another one writes; it learns the
  // checkpoint's hash, not whether the other's disk took it.
  std::string root;
  int64_t keep = 3;  // newest checkpoints to keep, at least 1
};

// Blocks until the checkpoint is durable, then prunes older ones. On an error nothing that existed
// before is harmed. In a group all ranks call it at the same time, and one writes for all; the
// files are the same for every layout.
absl::StatusOr<CheckpointInfo> SaveCheckpoint(Files& files, const CheckpointOptions& options,
                                              TrainerEngine& engine, const std::string& extra_json);

// Folders with a manifest under `root`, oldest first; none is not an error.
absl::StatusOr<std::vector<std::string>> ListCheckpoints(Files& files, const std::string& root);
// What `latest` names. NotFound: there is none.
absl::StatusOr<std::string> LatestCheckpoint(Files& files, const std::string& root);
// Reads the manifest alone.
absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(Files& files, const std::string& path);

// Whether a folder's master weights are those that were written. Reads them all; DataLoss names the
// damaged tensor.
absl::Status VerifyMasters(Files& files, const std::string& path, const TensorSource& masters);

// Restores `engine` from a folder. Everything is verified before the engine is touched; DataLoss
// names the damaged file and tensor, InvalidArgument a checkpoint of another model. Whether to fall
// back to an older checkpoint is the caller's choice.
absl::StatusOr<CheckpointInfo> LoadCheckpoint(Files& files, const std::string& path,
                                              TrainerEngine& engine);
}  // namespace stretto::engine
