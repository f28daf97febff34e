#include "engine/training/checkpoint.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "engine/collectives/agree.h"
#include "engine/formats/safetensors.h"
#include "engine/training/checkpoint_folder.h"
#include "engine/training/checkpoint_manifest.h"
#include "engine/training/checkpoint_reader.h"
#include "engine/training/tree_hash.h"

namespace stretto::engine {
namespace {
// With `writes` false nothing is written, but this rank takes part in gathering what is: an error
// of one rank's disk must not keep the others waiting.
absl::Status WriteStateFile(Files& files, const std::string& folder, const StateFile& file,
                            bool writes, TrainerEngine& engine, CheckpointManifest& manifest) {
  std::vector<const Parameter*> parameters;  // the writer's order, since all are of one type
  for (const Parameter& p : engine.trained_layout().parameters()) parameters.push_back(&p);
  std::sort(parameters.begin(), parameters.end(),
            [](const auto* a, const auto* b) { return a->spec.name < b->spec.name; });
  absl::Status status;
  std::unique_ptr<SafetensorsWriter> writer;
  if (writes) {
    std::vector<SafetensorsWriter::Tensor> tensors;
    for (const auto* p : parameters) tensors.push_back({p->spec.name, DType::kF32, p->spec.shape});
    auto created = SafetensorsWriter::Create(files, JoinPath(folder, file.name), tensors);
    status = created.status();
    if (created.ok()) writer = *std::move(created);
  }
  const auto index = static_cast<int64_t>(manifest.files.size());
  manifest.files.emplace_back(file.name);
  std::vector<float> host;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = *parameters[i];
    STRETTO_CHECK(writer == nullptr || writer->tensors()[i].name == p.spec.name);
    host.resize(p.view.size());
    RETURN_IF_ERROR(engine.DownloadState(file.which, p, host.data()));
    const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(host.data()),
                                          host.size() * sizeof(float));
    const std::string hash = HashBytes(bytes);
    manifest.tensors[TensorKey(file.which, p.spec.name)] = {
        p.spec.shape, hash, {{index, 0, 0, p.view.size(), {}, hash}}};
    if (writer != nullptr && status.ok()) status = writer->Append(bytes);
  }
  if (writer != nullptr && status.ok()) status = writer->Finish();
  return status;
}

// `folder` empty: this rank only takes part.
absl::Status WriteFolder(Files& files, const std::string& folder, TrainerEngine& engine,
                         CheckpointManifest& manifest) {
  absl::Status status;
  if (!folder.empty()) {
    status = files.RemoveAll(folder);
    if (status.ok()) status = files.MakeDirs(folder);
  }
  for (const StateFile& file : kStateFiles) {
    const bool writes = !folder.empty() && status.ok();
    const absl::Status s = WriteStateFile(files, folder, file, writes, engine, manifest);
    if (status.ok()) status = s;
  }
  manifest.info.checkpoint_hash = ContentHash(manifest);
  return status;
}

std::string Describe(const absl::optional<CheckpointAdapter>& adapter) {
  if (!adapter.has_value()) return "all weights";
  return absl::StrCat("an adapter of rank ", adapter->lora.rank, " and alpha ", adapter->lora.alpha,
                      " for ", absl::StrJoin(adapter->lora.targets, ", "));
}

// The model of the manifest is the engine's: names here, shapes where tensors are read.
absl::Status CheckModel(const CheckpointReader& reader, const TrainerEngine& engine,
                        const TrainerEngine* critic) {
  const CheckpointInfo& info = reader.manifest().info;
  if (info.critic.has_value() != (critic != nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat(info.path, ": the checkpoint has ", info.critic.has_value() ? "a" : "no",
                     " critic, the run has ", critic != nullptr ? "one" : "none"));
  }
  const absl::optional<CheckpointAdapter> mine = AdapterOf(engine);
  if (info.adapter.has_value() != mine.has_value() ||
      (mine.has_value() && info.adapter->lora != mine->lora)) {
    return absl::InvalidArgumentError(absl::StrCat(
        info.path, ": the checkpoint has ", Describe(info.adapter), ", expected ", Describe(mine)));
  }
  if (mine.has_value() && mine->base_hash.empty()) {
    return absl::FailedPreconditionError("lora: a checkpoint needs the base, which isn't loaded");
  }
  if (mine.has_value() && info.adapter->base_hash != mine->base_hash) {
    return absl::InvalidArgumentError(
        absl::StrCat(info.path, ": its adapter belongs to another base (", info.adapter->base_hash,
                     "), this one is ", mine->base_hash));
  }
  const size_t of_critic = critic != nullptr ? critic->trained_layout().parameters().size() : 0;
  const size_t expected =
      (engine.trained_layout().parameters().size() + of_critic) * std::size(kStateFiles);
  const size_t found = reader.manifest().tensors.size();
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(info.path, ": ", found,
                                                 " tensors of state, the model has ", expected,
                                                 "; the checkpoint belongs to another model"));
}

// What all ranks have come to, the same on each.
absl::Status Agree(const TrainerEngine& engine, const absl::Status& mine) {
  Communicator* group = engine.group();
  return group == nullptr || group->size() == 1 ? mine : AgreeOnStatus(*group, mine);
}

// Reads and verifies all tensors of one model in a checkpoint, and uploads them where asked to.
absl::Status ReadState(CheckpointReader& reader, absl::string_view prefix, TrainerEngine& engine,
                       bool upload) {
  for (const StateFile& file : kStateFiles) {
    for (const Parameter& p : engine.trained_layout().parameters()) {
      ASSIGN_OR_RETURN(const absl::Span<const float> values,
                       reader.Read(file.which, absl::StrCat(prefix, p.spec.name), p.spec.shape));
      if (upload) engine.UploadState(file.which, p, values.data());
    }
  }
  return absl::OkStatus();
}

// Checkpoints to load, the best last; in a group those that rank 0 sees.
absl::StatusOr<std::vector<std::string>> Candidates(Files& files, const std::string& root,
                                                    const TrainerEngine& engine) {
  absl::StatusOr<std::vector<std::string>> folders = ListCheckpoints(files, root);
  // What `latest` names comes first; a folder that is newer was not finished.
  if (const auto latest = LatestCheckpoint(files, root); folders.ok() && latest.ok()) {
    folders->erase(std::remove(folders->begin(), folders->end(), *latest), folders->end());
    folders->push_back(*latest);
  }
  RETURN_IF_ERROR(Agree(engine, folders.status()));
  Communicator* group = engine.group();
  if (group == nullptr || group->size() == 1) return folders;
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   GatherTexts(*group, absl::StrJoin(*folders, "\n")));
  return absl::StrSplit(texts[0], '\n', absl::SkipEmpty());
}

// Tensors of which some were joined in memory.
class JoinedTensors final : public TensorSource {
 public:
  explicit JoinedTensors(std::unique_ptr<CheckpointReader> reader) : reader_(std::move(reader)) {}
  absl::Status Load() {
    for (const std::string& name : reader_->Names(StateTensor::kMaster)) {
      if (absl::StartsWith(name, kCriticPrefix)) continue;
      ASSIGN_OR_RETURN(std::vector<int64_t> shape, reader_->ShapeOf(StateTensor::kMaster, name));
      ASSIGN_OR_RETURN(const auto values, reader_->Read(StateTensor::kMaster, name, shape));
      absl::Span<const float> kept = values;
      if (reader_->manifest().tensors.at(TensorKey(StateTensor::kMaster, name)).parts.size() > 1) {
        kept = joined_.emplace_back(values.begin(), values.end());
      }
      tensors_.push_back(
          {name,
           StorageType::kF32,
           std::move(shape),
           {reinterpret_cast<const uint8_t*>(kept.data()), kept.size() * sizeof(float)}});
    }
    return absl::OkStatus();
  }
  const std::string& path() const override { return reader_->manifest().info.path; }
  absl::Span<const TensorInfo> tensors() const override { return tensors_; }

 private:
  std::unique_ptr<CheckpointReader> reader_;
  std::vector<std::vector<float>> joined_;
  std::vector<TensorInfo> tensors_;
};
}  // namespace

absl::optional<CheckpointAdapter> AdapterOf(const TrainerEngine& engine) {
  if (!engine.options().lora) return absl::nullopt;
  return CheckpointAdapter{engine.options().lora, engine.base_hash()};
}

absl::StatusOr<CheckpointInfo> SaveCheckpoint(Files& files, const CheckpointOptions& options,
                                              TrainerEngine& engine,
                                              const std::string& extra_json) {
  if (!engine.state_status().ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "checkpoint: the last update ended half done: ", engine.state_status().message()));
  }
  CheckpointManifest manifest;
  manifest.info.counters = engine.counters();
  manifest.info.extra_json = extra_json;
  manifest.info.adapter = AdapterOf(engine);
  if (options.root.empty()) {
    RETURN_IF_ERROR(WriteFolder(files, "", engine, manifest));
    return std::move(manifest.info);
  }
  const std::string name = CheckpointFolderName(manifest.info.counters.version);
  manifest.info.path = JoinPath(options.root, name);
  const std::string partial = PartialFolder(options.root, name);
  absl::Status status = WriteFolder(files, partial, engine, manifest);
  if (status.ok()) {
    status = CommitCheckpoint(files, options.root, partial, manifest, options.keep);
  }
  if (status.ok()) return std::move(manifest.info);
  files.RemoveAll(partial).IgnoreError();  // the first error is the one to tell
  return Annotate(status, absl::StrCat("checkpoint of version ", manifest.info.counters.version));
}

absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(Files& files, const std::string& path) {
  ASSIGN_OR_RETURN(CheckpointManifest manifest, ReadManifest(files, path));
  return std::move(manifest.info);
}

absl::StatusOr<std::shared_ptr<const TensorSource>> OpenMasters(Files& files,
                                                                const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<CheckpointReader> reader, CheckpointReader::Open(files, path));
  auto masters = std::make_shared<JoinedTensors>(std::move(reader));
  RETURN_IF_ERROR(masters->Load());
  return masters;
}

absl::StatusOr<CheckpointInfo> LoadCheckpoint(Files& files, const std::string& path,
                                              TrainerEngine& engine, TrainerEngine* critic) {
  auto reader = CheckpointReader::Open(files, path);
  const auto read = [&](bool upload) -> absl::Status {
    RETURN_IF_ERROR(ReadState(**reader, "", engine, upload));
    return critic == nullptr ? absl::OkStatus()
                             : ReadState(**reader, kCriticPrefix, *critic, upload);
  };
  absl::Status status = reader.status();
  if (status.ok()) status = CheckModel(**reader, engine, critic);
  if (status.ok()) status = read(/*upload=*/false);
  // No rank begins with what another one can't read.
  RETURN_IF_ERROR(Agree(engine, status));
  RETURN_IF_ERROR(read(/*upload=*/true));
  const CheckpointInfo& info = (*reader)->manifest().info;
  RETURN_IF_ERROR(engine.FinishRestore(info.counters));
  if (critic != nullptr) RETURN_IF_ERROR(critic->FinishRestore(*info.critic));
  return info;
}

absl::StatusOr<CheckpointInfo> LoadNewestCheckpoint(Files& files, const std::string& root,
                                                    TrainerEngine& engine,
                                                    const OnDamage& on_damage,
                                                    TrainerEngine* critic) {
  ASSIGN_OR_RETURN(const std::vector<std::string> folders, Candidates(files, root, engine));
  if (folders.empty()) return absl::NotFoundError(absl::StrCat(root, ": no checkpoint"));
  absl::Status last;
  for (auto folder = folders.rbegin(); folder != folders.rend(); ++folder) {
    absl::StatusOr<CheckpointInfo> info = LoadCheckpoint(files, *folder, engine, critic);
    if (info.ok()) return info;
    last = info.status();
    if (!absl::IsDataLoss(last) && !absl::IsNotFound(last)) return last;
    on_damage(*folder, last);
  }
  return absl::DataLossError(
      absl::StrCat("none of the checkpoints in ", root,
                   " is whole (move the folder away to begin anew); last: ", last.message()));
}
}  // namespace stretto::engine
