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

// Hashes elements of a part.
void AddTo(RunningHash& hash, const RunsOfPart& read, const SnapshotPart& part, int64_t begin,
           int64_t count) {
  read(part, begin, count, [&](absl::Span<const float> run) { hash.Add(Bytes(run)); });
}
std::string HashOfRuns(const RunsOfPart& read, const SnapshotPart& part, int64_t begin,
                       int64_t count) {
  RunningHash hash;
  AddTo(hash, read, part, begin, count);
  return hash.Text();
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

std::vector<ShardWriter::Run> ShardWriter::Cut(const SnapshotPart& part, const RunsOfPart& read,
                                               bool incremental, Chunks& chunks) const {
  const auto size = static_cast<int64_t>(part.values.size());
  if (options_.max_chain == 0) return {{0, size, true, "", part.begin}};
  const auto base = committed_.find(KeyOf(part));
  std::vector<Run> runs;
  for (int64_t begin = 0; begin < size; begin += options_.chunk_elements) {
    const int64_t count = std::min(options_.chunk_elements, size - begin);
    Chunk chunk;
    RunningHash hash;
    AddTo(hash, read, part, begin, count);
    chunk.hash = hash.Raw();
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
                                    const Source& source, const std::vector<std::vector<Run>>& runs,
                                    ShardResult& result) {
  const std::vector<SnapshotPart>& parts = source.parts;
  std::vector<SafetensorsWriter::Tensor> tensors;
  std::map<std::string, std::pair<const SnapshotPart*, const Run*>> places;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].which != which) continue;
    for (const Run& run : runs[i]) {
      if (!run.is_new) continue;
      const bool is_whole = run.count == SizeOfTensor(parts[i]);
      std::string name = StoredName(parts[i].name, parts[i].box, run.stored_begin, is_whole);
      places[name] = {&parts[i], &run};
      tensors.push_back({std::move(name), DType::kF32,
                         is_whole ? parts[i].shape : std::vector<int64_t>{run.count}});
    }
  }
  if (tensors.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto writer,
                   SafetensorsWriter::Create(files_, JoinPath(folder_, file), std::move(tensors)));
  for (const auto& tensor : writer->tensors()) {
    const auto& [part, run] = places.at(tensor.name);
    absl::Status status;
    source.read(*part, run->begin, run->count, [&](absl::Span<const float> values) {
      if (status.ok()) status = writer->Append(Bytes(values));
    });
    RETURN_IF_ERROR(status);
    result.bytes_written += run->count * static_cast<int64_t>(sizeof(float));
  }
  return writer->Finish();
}

absl::Status ShardWriter::WriteKind(StateTensor which, const Source& source, ShardResult& result) {
  const std::vector<SnapshotPart>& parts = source.parts;
  const std::string file = FileName(which);
  const std::string path = absl::StrCat(final_name_, "/", file);
  std::vector<std::vector<Run>> runs(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const SnapshotPart& part = parts[i];
    if (part.which != which) continue;
    Chunks& chunks = written_[KeyOf(part)];
    runs[i] = Cut(part, source.read, result.is_incremental, chunks);
    for (Chunk& c : chunks) {
      if (c.file.empty()) c.file = path;
    }
    CheckpointTensor& tensor = result.fragment.tensors[TensorKey(which, part.name)];
    tensor.shape = part.shape;
    for (const Run& run : runs[i]) {
      const std::string name = run.is_new ? file : absl::StrCat("../", run.file);
      tensor.parts.push_back({FileIndex(result.fragment.files, name), run.stored_begin,
                              part.begin + run.begin, run.count, part.box,
                              HashOfRuns(source.read, part, run.begin, run.count)});
    }
    const auto size = static_cast<int64_t>(part.values.size());
    if (size != SizeOfTensor(part)) continue;
    tensor.hash =
        tensor.parts.size() == 1 ? tensor.parts[0].hash : HashOfRuns(source.read, part, 0, size);
  }
  RETURN_IF_ERROR(WriteRuns(file, which, source, runs, result));
  source.is_over(which);
  return absl::OkStatus();
}

absl::StatusOr<ShardResult> ShardWriter::Write(const std::string& folder,
                                               const std::string& final_name,
                                               const std::vector<SnapshotPart>& parts) {
  const RunsOfPart in_memory = [](const SnapshotPart& part, int64_t begin, int64_t count,
                                  absl::FunctionRef<void(absl::Span<const float>)> run) {
    run(part.values.subspan(begin, count));
  };
  return Write(folder, final_name, {parts, in_memory, [](StateTensor) {}});
}

absl::StatusOr<ShardResult> ShardWriter::Write(const std::string& folder,
                                               const std::string& final_name,
                                               const Source& source) {
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
    RETURN_IF_ERROR(WriteKind(file.which, source, result));
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
