// Reads what a checkpoint's manifest describes: parts from their files, each checked against its
// hash, joined to whole tensors. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/tensor_file.h"
#include "engine/training/checkpoint_manifest.h"

namespace stretto::engine {
class CheckpointReader {
 public:
  CheckpointReader(std::string folder, CheckpointManifest manifest)
      : folder_(std::move(folder)),
        manifest_(std::move(manifest)),
        sources_(manifest_.files.size()) {}
  // DataLoss: the manifest is damaged.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(Files& files,
                                                                const std::string& folder);

  const CheckpointManifest& manifest() const { return manifest_; }

  // All elements of a tensor, verified; valid until the next call, or as long as the reader when
  // the tensor lies whole in one file. DataLoss names the damaged file and tensor; InvalidArgument:
  // the checkpoint has no such tensor, or it is of another shape.
  absl::StatusOr<absl::Span<const float>> Read(StateTensor which, const std::string& name,
                                               const std::vector<int64_t>& shape);
  // The shape of a tensor, taken from its file where the manifest doesn't say it.
  absl::StatusOr<std::vector<int64_t>> ShapeOf(StateTensor which, const std::string& name);
  // Names of all tensors of a kind, sorted.
  std::vector<std::string> Names(StateTensor which) const;
  // The hash of a tensor that is made of parts.
  absl::StatusOr<std::string> HashOf(StateTensor which, const std::string& name);

 private:
  absl::StatusOr<const TensorSource*> Source(int64_t file);
  absl::StatusOr<const TensorInfo*> Stored(const std::string& name, const CheckpointPart& part);
  absl::StatusOr<absl::Span<const float>> ReadPart(const std::string& name,
                                                   const CheckpointPart& part);
  absl::StatusOr<absl::Span<const float>> Join(const std::string& name,
                                               const CheckpointTensor& tensor);
  absl::Status Damaged(int64_t file, absl::string_view what) const;

  std::string folder_;
  CheckpointManifest manifest_;
  std::vector<std::shared_ptr<const TensorSource>> sources_;
  std::unique_ptr<float[]> joined_;
  int64_t joined_capacity_ = 0;
};
}  // namespace stretto::engine
