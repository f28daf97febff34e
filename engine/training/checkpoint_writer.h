// Saves checkpoints while training goes on. Start takes a snapshot, which costs the training thread
// next to nothing (checkpoint_snapshot.h); a thread of the writer's hashes, writes, syncs and
// renames. A save is under way until it is durable, and there is one at a time.
//
// In a group every rank has a writer on the same folder of a file system that they share, and calls
// Start at the same time. Each writes its share; rank 0 waits for the others' files, and completes
// the checkpoint. Ranks meet in the folder alone: a save goes on when the group has ended.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "base/clock.h"
#include "base/files.h"
#include "engine/training/checkpoint.h"
#include "engine/training/checkpoint_shard.h"

namespace stretto::engine {
// How a save went.
struct SaveReport {
  absl::Status status;  // OK: durable
  CheckpointInfo info;
  bool is_incremental = false;
  int64_t bytes_written = 0;   // by this rank
  double blocked_seconds = 0;  // of the training thread
  double copy_seconds = 0;     // until the snapshot was whole
  double seconds = 0;          // from Start until it was durable, or failed
};

struct CheckpointWriterOptions {
  std::string root;
  int64_t keep = 3;       // newest checkpoints to keep, at least 1
  int64_t max_chain = 0;  // incremental checkpoints after one that is whole; 0: all are whole
  int64_t chunk_elements = 1 << 14;
  double peer_timeout_seconds = 600;  // for the other ranks' files
  int nice = 0;                       // of the thread that writes; see setpriority(2)
  // Called by that thread when a save is over; must not call the writer.
  std::function<void(const SaveReport&)> on_done;
};

class CheckpointWriter {
 public:
  // `files` and `clock` outlive the writer.
  CheckpointWriter(Files& files, CheckpointWriterOptions options, Clock& clock = Clock::Real());
  // Waits for the save under way, but not for other ranks.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Begins a save of the engine's state as it is now. Blocks while an earlier one is under way (one
  // of a group that has ended doesn't wait for its ranks any longer). All
  // ranks of a group call it at the same time. FailedPrecondition: the engine's last update failed
  // half way. What goes wrong later is in the report. `engine` may end before the save does. A
  // critic that is trained beside it, at the same version, is saved with it.
  absl::Status Start(TrainerEngine& engine, const std::string& extra_json,
                     TrainerEngine* critic = nullptr);
  bool busy() const;
  // Blocks until no save is under way; how the last one went, or nullopt: there was none.
  absl::optional<SaveReport> Wait();
  // How the last one went that is over.
  absl::optional<SaveReport> last() const;

 private:
  struct Job {
    TrainerCounters counters;
    std::string extra_json;
    absl::optional<CheckpointAdapter> adapter;
    absl::optional<TrainerCounters> critic;
    std::string attempt;  // the same on all ranks; empty: one rank
    int rank = 0, num_ranks = 1;
    int64_t epoch = 0;  // of the group
    double start_seconds = 0, blocked_seconds = 0;
  };
  void Loop();
  SaveReport Run(const Job& job);
  absl::Status Save(const Job& job, SaveReport& report);
  absl::Status SaveAlone(const Job& job, ShardResult shard, SaveReport& report);
  absl::Status Complete(const Job& job, ShardResult shard, SaveReport& report);
  absl::Status AwaitCommit(const Job& job, const ShardResult& shard, SaveReport& report);
  absl::StatusOr<CheckpointManifest> ReadShard(const Job& job, int shard);
  // Tells the other ranks that they wait in vain.
  void GiveUp(const Job& job, const absl::Status& why);
  // Polls until `done`; DeadlineExceeded or Cancelled else, naming what was waited for.
  absl::Status WaitUntil(const std::function<bool()>& done, const std::string& what);
  std::string PartialOf(const Job& job) const;
  std::string ShardFile(const Job& job, int shard) const;
  std::string FailureFile(const Job& job, int shard) const;

  Files& files_;
  const CheckpointWriterOptions options_;
  Clock& clock_;
  const std::shared_ptr<StateSnapshot> snapshot_;
  std::unique_ptr<ShardWriter> shard_;  // of the writing thread
  int shard_ranks_ = 0, shard_rank_ = 0;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool alone_ ABSL_GUARDED_BY(mutex_) = false;       // nobody is waited for any longer
  absl::optional<Job> job_ ABSL_GUARDED_BY(mutex_);  // until it is over
  absl::optional<SaveReport> last_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};
}  // namespace stretto::engine
