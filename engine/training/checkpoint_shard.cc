#include "engine/training/checkpoint_shard.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/formats/safetensors.h"

namespace stretto::engine {
namespace {
absl::Span<const uint8_t> Bytes(absl::Span<const float> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

int64_t SizeOfTensor(const SnapshotPart& part) {
  int64_t size = 1;
  for (const int64_t s : part.shape) size *= s;
  return size;
}

int64_t FileIndex(std::vector<std::string>& files, const std::string& name) {
  const auto found = std::find(files.begin(), files.end(), name);
  if (found != files.end()) return found - files.begin();
  files.push_back(name);
  return static_cast<int64_t>(files.size()) - 1;
}
}  // namespace

std::string ShardWriter::FileName(StateTensor which) const {
  const char* name = kStateFiles[static_cast<int>(which)].name;
  if (options_.num_shards == 1) return name;
  return absl::StrFormat("%s-%05d-of-%05d.safetensors", absl::StripSuffix(name, ".safetensors"),
                         options_.shard + 1, options_.num_shards);
}

std::string ShardWriter::KeyOf(const SnapshotPart& part) {
  return absl::StrCat(TensorKey(part.which, StoredName(part.name, part.box, part.begin, false)),
                      "+", part.values.size());
}

std::vector<ShardWriter::Run> ShardWriter::Cut(const SnapshotPart& part, bool incremental,
                                               Chunks& chunks) const {
  const auto size = static_cast<int64_t>(part.values.size());
  if (options_.max_chain == 0) return {{0, size, true, "", part.begin}};
  const auto base = committed_.find(KeyOf(part));
  std::vector<Run> runs;
  for (int64_t begin = 0; begin < size; begin += options_.chunk_elements) {
    const int64_t count = std::min(options_.chunk_elements, size - begin);
    Chunk chunk;
    chunk.hash = RawHash(Bytes(part.values.subspan(begin, count)));
    const Chunk* old =
        incremental && base != committed_.end() ? &base->second[chunks.size()] : nullptr;
    const bool is_new = old == nullptr || old->hash != chunk.hash;
    if (!is_new) chunk = *old;
    chunks.push_back(chunk);
    if (runs.empty() || runs.back().is_new != is_new || runs.back().file != chunk.file ||
        (!is_new && runs.back().stored_begin != chunk.stored_begin)) {
      runs.push_back(
          {begin, 0, is_new, chunk.file, is_new ? part.begin + begin : chunk.stored_begin});
    }
    runs.back().count += count;
    if (is_new) chunks.back().stored_begin = runs.back().stored_begin;
  }
  return runs;
}

absl::Status ShardWriter::WriteRuns(const std::string& file, StateTensor which,
                                    const std::vector<SnapshotPart>& parts,
                                    const std::vector<std::vector<Run>>& runs,
                                    ShardResult& result) {
  std::vector<SafetensorsWriter::Tensor> tensors;
  std::map<std::string, absl::Span<const float>> values;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].which != which) continue;
    for (const Run& run : runs[i]) {
      if (!run.is_new) continue;
      const bool is_whole = run.count == SizeOfTensor(parts[i]);
      std::string name = StoredName(parts[i].name, parts[i].box, run.stored_begin, is_whole);
      values[name] = parts[i].values.subspan(run.begin, run.count);
      tensors.push_back({std::move(name), DType::kF32,
                         is_whole ? parts[i].shape : std::vector<int64_t>{run.count}});
    }
  }
  if (tensors.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto writer,
                   SafetensorsWriter::Create(files_, JoinPath(folder_, file), std::move(tensors)));
  for (const auto& tensor : writer->tensors()) {
    const auto bytes = Bytes(values.at(tensor.name));
    RETURN_IF_ERROR(writer->Append(bytes));
    result.bytes_written += static_cast<int64_t>(bytes.size());
  }
  return writer->Finish();
}

absl::Status ShardWriter::WriteKind(StateTensor which, const std::vector<SnapshotPart>& parts,
                                    ShardResult& result) {
  const std::string file = FileName(which);
  const std::string path = absl::StrCat(final_name_, "/", file);
  std::vector<std::vector<Run>> runs(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const SnapshotPart& part = parts[i];
    if (part.which != which) continue;
    Chunks& chunks = written_[KeyOf(part)];
    runs[i] = Cut(part, result.is_incremental, chunks);
    for (Chunk& c : chunks) {
      if (c.file.empty()) c.file = path;
    }
    CheckpointTensor& tensor = result.fragment.tensors[TensorKey(which, part.name)];
    tensor.shape = part.shape;
    for (const Run& run : runs[i]) {
      const std::string name = run.is_new ? file : absl::StrCat("../", run.file);
      tensor.parts.push_back({FileIndex(result.fragment.files, name), run.stored_begin,
                              part.begin + run.begin, run.count, part.box,
                              HashBytes(Bytes(part.values.subspan(run.begin, run.count)))});
    }
    if (static_cast<int64_t>(part.values.size()) != SizeOfTensor(part)) continue;
    tensor.hash = tensor.parts.size() == 1 ? tensor.parts[0].hash : HashBytes(Bytes(part.values));
  }
  return WriteRuns(file, which, parts, runs, result);
}

absl::StatusOr<ShardResult> ShardWriter::Write(const std::string& folder,
                                               const std::string& final_name,
                                               const std::vector<SnapshotPart>& parts) {
  folder_ = folder;
  final_name_ = final_name;
  written_.clear();
  ShardResult result;
  const std::string own = final_name + "/";
  // A checkpoint that is about to be replaced can't be referred to.
  const bool replaces = std::any_of(committed_.begin(), committed_.end(), [&](const auto& entry) {
    return std::any_of(entry.second.begin(), entry.second.end(),
                       [&](const Chunk& c) { return absl::StartsWith(c.file, own); });
  });
  result.is_incremental = !committed_.empty() && chain_ < options_.max_chain && !replaces;
  last_was_incremental_ = result.is_incremental;
  for (const StateFile& file : kStateFiles) {
    RETURN_IF_ERROR(WriteKind(file.which, parts, result));
  }
  return result;
}

void ShardWriter::Commit() {
  if (options_.max_chain == 0) return;
  committed_ = std::move(written_);
  written_.clear();
  chain_ = last_was_incremental_ ? chain_ + 1 : 0;
}

void ShardWriter::Forget() {
  committed_.clear();
  written_.clear();
  chain_ = 0;
}
}  // namespace stretto::engine
