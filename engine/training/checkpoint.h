// Checkpoints of a TrainerEngine: a folder of safetensors files and a manifest with a hash
// (XXH3-128) for every tensor, written so that a crash at any moment leaves the older ones whole:
//   <root>/step-00000012/masters.safetensors, m.safetensors, v.safetensors
//   <root>/step-00000012/manifest.json    last of the folder: without it the folder does not count
//   <root>/latest                         the folder's name, replaced after the manifest
// Of N ranks that each write their share: masters-00001-of-0000N.safetensors, …. A restored engine
// continues with the same bits as one that was never stopped, whatever the number of ranks and the
// layout of either. docs/checkpoints.md tells the whole story; checkpoint_writer.h writes in the
// background.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "base/files.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine {
// Of a policy that is a base and an adapter: a checkpoint has the adapter's tensors alone.
struct CheckpointAdapter {
  LoraOptions lora;
  std::string base_hash;  // HashOfBase
  bool operator==(const CheckpointAdapter&) const = default;
};

struct CheckpointInfo {
  std::string path;             // the folder
  std::string checkpoint_hash;  // tree hash over names and hashes of all tensors and the counters
  TrainerCounters counters;
  std::string extra_json;  // the caller's own state, as given
  absl::optional<CheckpointAdapter> adapter;
  absl::optional<TrainerCounters> critic;  // of a policy that is trained beside a critic
};
// What the critic's tensors are called in a checkpoint: this, and their names in the critic.
inline constexpr char kCriticPrefix[] = "critic.";

struct CheckpointOptions {
  // Empty: this rank of a group takes part in gathering what another one writes; it learns the
  // checkpoint's hash, not whether the other's disk took it.
  std::string root;
  int64_t keep = 3;  // newest checkpoints to keep, at least 1
};

// Blocks until the checkpoint is durable, then prunes older ones. On an error nothing that existed
// before is harmed. In a group all ranks call it at the same time, and one writes for all.
// FailedPrecondition: the engine's last update failed half way.
absl::StatusOr<CheckpointInfo> SaveCheckpoint(Files& files, const CheckpointOptions& options,
                                              TrainerEngine& engine, const std::string& extra_json);

// Folders with a manifest under `root`, oldest first; none is not an error.
absl::StatusOr<std::vector<std::string>> ListCheckpoints(Files& files, const std::string& root);
// What `latest` names. NotFound: there is none.
absl::StatusOr<std::string> LatestCheckpoint(Files& files, const std::string& root);
// Reads the manifest alone.
absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(Files& files, const std::string& path);

// The policy's master weights of a checkpoint, whole and verified, as a model file's tensors; those
// that ranks wrote in parts are joined in memory. DataLoss names the damaged file and tensor.
absl::StatusOr<std::shared_ptr<const TensorSource>> OpenMasters(Files& files,
                                                                const std::string& path);

// The adapter of an engine with LoRA; nullopt: without.
absl::optional<CheckpointAdapter> AdapterOf(const TrainerEngine& engine);

// Restores `engine` from a folder; with LoRA its base has been loaded. Everything is verified
// before the engine is touched; DataLoss names the damaged file and tensor, InvalidArgument a
// checkpoint of another model, adapter or base, or one with a critic where there is none, or
// without. In a group all ranks call it at the same time.
absl::StatusOr<CheckpointInfo> LoadCheckpoint(Files& files, const std::string& path,
                                              TrainerEngine& engine,
                                              TrainerEngine* critic = nullptr);

// Restores the checkpoint that `latest` names or, when it is damaged, the newest one that is whole:
// `on_damage` is told of each that is passed over. NotFound: there is none. DataLoss: none is
// whole. Any other error (another model, a disk that doesn't answer) is returned at once. In a
// group the folder must be the same for all ranks.
using OnDamage = std::function<void(const std::string& folder, const absl::Status& why)>;
absl::StatusOr<CheckpointInfo> LoadNewestCheckpoint(Files& files, const std::string& root,
                                                    TrainerEngine& engine,
                                                    const OnDamage& on_damage,
                                                    TrainerEngine* critic = nullptr);
}  // namespace stretto::engine
