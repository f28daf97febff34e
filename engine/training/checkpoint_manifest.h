// What a checkpoint's manifest says: which tensors the state has, their hashes, and in which files
// which of their elements lie. Two ways to write the same state on other numbers of ranks, or with
// parts left in older checkpoints, have the same tensors, hashes and checkpoint_hash, but other
// parts.
//
//   {"format": 2, "checkpoint_hash", "version", "optimizer_steps", "extra",
//    "tensors": {"masters.safetensors:NAME": hash of all its elements, …},
//    "files": ["masters.safetensors", "../step-00000010/m.safetensors", …],
//    "parts": {"masters.safetensors:NAME": {"shape": […],
//              "parts": [[file, stored begin, begin, count, hash, box?], …]}, …},
//    "adapter": {"rank", "alpha", "targets", "base_hash"} where the policy is a base and an
//    adapter, "critic": {"optimizer_steps"} where there is one, whose tensors are called
//    "critic.NAME", "manifest_hash": of all the rest}
// Format 1 has no "files", "parts" and "manifest_hash": every tensor lies whole in the file that
// its name begins with.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "base/files.h"
#include "engine/training/checkpoint.h"

namespace stretto::engine {
// Rows and columns of a tensor, as tensor parallelism cuts it; `row_end` 0: all of it.
struct TensorBox {
  int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;
  bool is_all() const { return row_end == 0; }
  int64_t size() const { return (row_end - row_begin) * (col_end - col_begin); }
  bool operator==(const TensorBox&) const = default;
};

// Elements [begin, begin + count) of a tensor, or of a box of it taken row by row. They lie in a
// file's tensor that holds the elements from `stored_begin` on.
struct CheckpointPart {
  int64_t file = 0;  // index into CheckpointManifest::files
  int64_t stored_begin = 0;
  int64_t begin = 0;
  int64_t count = -1;  // −1: all there is (format 1)
  TensorBox box;
  std::string hash;
};

struct CheckpointTensor {
  std::vector<int64_t> shape;  // empty: not known (format 1)
  std::string hash;            // of the whole tensor; empty in a shard that holds a part
  std::vector<CheckpointPart> parts;
};

struct CheckpointManifest {
  CheckpointInfo info;
  std::vector<std::string> files;                   // relative to the checkpoint's folder
  std::map<std::string, CheckpointTensor> tensors;  // "masters.safetensors:NAME"
};

// The kinds of state, and the files that hold them when one rank writes them all.
struct StateFile {
  StateTensor which;
  const char* name;  // "masters.safetensors"
};
inline constexpr StateFile kStateFiles[] = {{StateTensor::kMaster, "masters.safetensors"},
                                            {StateTensor::kM, "m.safetensors"},
                                            {StateTensor::kV, "v.safetensors"}};
std::string TensorKey(StateTensor which, absl::string_view name);

inline constexpr char kManifestFile[] = "manifest.json";
// Of the version's folder: "step-00000012".
std::string CheckpointFolderName(int64_t version);
// The version that a folder's name says; nullopt: it is no checkpoint's.
absl::optional<int64_t> VersionOfFolder(absl::string_view name);

// What a part is called in its file: NAME when it is the whole tensor, else NAME@begin, or
// NAME@r0:r1,c0:c1@begin of a box.
std::string StoredName(absl::string_view name, const TensorBox& box, int64_t begin, bool is_whole);
// A file's path. A file of another checkpoint is spelled "../step-…/…".
std::string FileOfCheckpoint(const std::string& folder, const std::string& file);
// The other checkpoints' folders ("step-…") that this one needs.
std::vector<std::string> FoldersNeeded(const CheckpointManifest& manifest);

// Over counters and hashes: of the content, whatever its layout.
std::string ContentHash(const CheckpointManifest& manifest);
std::string ManifestText(const CheckpointManifest& manifest);
// DataLoss: damaged, with `path` in the message. `path` is that of the manifest file.
absl::StatusOr<CheckpointManifest> ParseManifest(const std::string& path, absl::string_view text);
absl::StatusOr<CheckpointManifest> ReadManifest(Files& files, const std::string& folder);
}  // namespace stretto::engine
