// The safetensors format: 8 bytes little-endian header length, a JSON header
// {"name": {"dtype", "shape", "data_offsets": [begin, end]}, …, "__metadata__": {string: string}},
// then the data (https://github.com/huggingface/safetensors, "Format").
//
// The reader trusts nothing: header length within the file and 100 MB, well-formed JSON without
// duplicate keys, known dtypes, sizes that agree with shapes without overflow, and tensors that
// cover the data exactly, without holes or overlaps. Messages name file and tensor.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/files.h"
#include "engine/formats/tensor_file.h"

namespace stretto::engine {
// One file, mapped.
absl::StatusOr<std::shared_ptr<const TensorSource>> OpenSafetensors(const std::string& path);
// The tensors of a Hugging Face folder: `model.safetensors`, or all shards named by
// `model.safetensors.index.json`. A shard that is missing, a tensor that the index places in a
// shard that lacks it, and a tensor in a shard that the index does not know are errors.
absl::StatusOr<std::shared_ptr<const TensorSource>> OpenSafetensorsFolder(
    const std::string& folder);

// The checked contents of one file held in memory; the spans point into `bytes`. `path` is for
// messages. This is the parser itself, for tests and fuzzing.
absl::StatusOr<std::vector<TensorInfo>> ParseSafetensors(const std::string& path,
                                                         absl::Span<const uint8_t> bytes);

// Writes one file without holding it in memory: the tensors are declared first, then their bytes
// are appended in `tensors()` order, in pieces of any size. The file appears under its name only in
// Finish (temporary file, sync, rename). Not thread-safe.
class SafetensorsWriter {
 public:
  struct Tensor {
    std::string name;
    DType type = DType::kF32;
    std::vector<int64_t> shape;
  };
  // `files` outlives the writer. InvalidArgument: names that repeat or that the format reserves,
  // negative dimensions, sizes that overflow.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      Files& files, const std::string& path, std::vector<Tensor> tensors,
      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  // Removes the temporary file unless Finish succeeded.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The order in which bytes are expected: wider elements first (so that all are aligned), then by
  // name.
  absl::Span<const Tensor> tensors() const { return tensors_; }
  absl::Status Append(absl::Span<const uint8_t> bytes);
  // FailedPrecondition unless exactly all bytes were appended.
  absl::Status Finish();

 private:
  SafetensorsWriter(Files& files, std::string path, std::vector<Tensor> tensors);
  Files& files_;
  std::string path_, temporary_path_;
  std::vector<Tensor> tensors_;
  std::unique_ptr<WritableFile> file_;
  uint64_t data_bytes_ = 0, appended_ = 0;
  bool finished_ = false;
};
}  // namespace stretto::engine
