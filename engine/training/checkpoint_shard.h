// Writes one rank's share of a checkpoint: a file of each kind of state. An incremental one writes
// the runs that are not what the last checkpoint has, and names the older files where the rest
// lies.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/files.h"
#include "engine/training/checkpoint_manifest.h"
#include "engine/training/checkpoint_snapshot.h"
#include "engine/training/tree_hash.h"

namespace stretto::engine {
struct ShardOptions {
  int shard = 0, num_shards = 1;
  // At most so many incremental checkpoints after one that is whole; 0: all are whole.
  int64_t max_chain = 0;
  int64_t chunk_elements = 1 << 14;  // what is compared, and written or not
};

struct ShardResult {
  CheckpointManifest fragment;  // files and tensors of this rank's parts; info is empty
  int64_t bytes_written = 0;
  bool is_incremental = false;
};

// Not thread-safe.
class ShardWriter {
 public:
  ShardWriter(Files& files, const ShardOptions& options) : files_(files), options_(options) {}

  // Writes into `folder`, which will be called `final_name` ("step-…") beside the others. `is_over`
  // is called with a kind whose parts are not read any more.
  struct Source {
    const std::vector<SnapshotPart>& parts;
    RunsOfPart read;
    std::function<void(StateTensor)> is_over;
  };
  absl::StatusOr<ShardResult> Write(const std::string& folder, const std::string& final_name,
                                    const Source& source);
  // Of parts that are in memory.
  absl::StatusOr<ShardResult> Write(const std::string& folder, const std::string& final_name,
                                    const std::vector<SnapshotPart>& parts);
  // The checkpoint of the last Write is complete under its name: the next may refer to it.
  void Commit();
  // It isn't: the next one is whole.
  void Forget();

 private:
  // Where a chunk lies.
  struct Chunk {
    Hash128 hash;
    std::string file;  // relative to the checkpoints' root: "step-…/…"
    int64_t stored_begin = 0;
  };
  struct Run {
    int64_t begin = 0, count = 0;  // in the part's values
    bool is_new = false;
    std::string file;  // of an older checkpoint
    int64_t stored_begin = 0;
  };
  using Chunks = std::vector<Chunk>;
  std::string FileName(StateTensor which) const;
  static std::string KeyOf(const SnapshotPart& part);
  // Runs of chunks that lie in one place; fills in `chunks`, files of new runs excepted.
  std::vector<Run> Cut(const SnapshotPart& part, const RunsOfPart& read, bool incremental,
                       Chunks& chunks) const;
  absl::Status WriteKind(StateTensor which, const Source& source, ShardResult& result);
  absl::Status WriteRuns(const std::string& file, StateTensor which, const Source& source,
                         const std::vector<std::vector<Run>>& runs, ShardResult& result);

  Files& files_;
  const ShardOptions options_;
  std::string folder_, final_name_;
  std::map<std::string, Chunks> committed_, written_;  // by kind, tensor and place
  int64_t chain_ = 0;                                  // incremental ones since the last whole one
  bool last_was_incremental_ = false;
};
}  // namespace stretto::engine
