#include "engine/training/checkpoint.h"

#include <algorithm>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "engine/formats/safetensors.h"
#include "engine/training/tree_hash.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using StateTensor = TrainerEngine::StateTensor;
constexpr char kPrefix[] = "step-", kPartial[] = ".partial", kReplaced[] = ".replaced";
constexpr char kManifest[] = "manifest.json", kLatest[] = "latest";
constexpr int kFormatVersion = 1;

struct StateFile {
  StateTensor which;
  const char* name;
};
constexpr StateFile kStateFiles[] = {{StateTensor::kMaster, "masters.safetensors"},
                                     {StateTensor::kM, "m.safetensors"},
                                     {StateTensor::kV, "v.safetensors"}};

// "file:tensor" → hash, in the order that the tree hash takes.
using TensorHashes = std::map<std::string, std::string>;

std::string FolderName(int64_t version) { return absl::StrFormat("%s%08d", kPrefix, version); }

bool IsFolderName(absl::string_view name) {
  int64_t version = 0;
  return absl::ConsumePrefix(&name, kPrefix) && absl::SimpleAtoi(name, &version);
}

std::string CheckpointHash(const TrainerCounters& counters, const TensorHashes& hashes) {
  TreeHash tree;
  tree.Add("version", absl::StrCat(counters.version));
  tree.Add("optimizer_steps", absl::StrCat(counters.optimizer_steps));
  for (const auto& [name, hash] : hashes) tree.Add(name, hash);
  return tree.Finish();
}

// With `writes` false nothing is written, but this rank takes part in gathering what is: an error
// of one rank's disk must not keep the others waiting.
absl::Status WriteStateFile(Files& files, const std::string& folder, const StateFile& file,
                            bool writes, TrainerEngine& engine, TensorHashes& hashes) {
  std::vector<SafetensorsWriter::Tensor> tensors;
  std::vector<std::string> names;  // the writer's order, since all are of one type
  for (const Parameter& p : engine.layout().parameters()) {
    tensors.push_back({p.spec.name, DType::kF32, p.spec.shape});
    names.push_back(p.spec.name);
  }
  std::sort(names.begin(), names.end());
  absl::Status status;
  std::unique_ptr<SafetensorsWriter> writer;
  if (writes) {
    auto created = SafetensorsWriter::Create(files, JoinPath(folder, file.name), tensors);
    status = created.status();
    if (created.ok()) writer = *std::move(created);
  }
  std::vector<float> host;
  for (size_t i = 0; i < names.size(); ++i) {
    STRETTO_CHECK(writer == nullptr || writer->tensors()[i].name == names[i]);
    const Parameter* p = engine.layout().Find(names[i]);
    STRETTO_CHECK(p != nullptr);
    host.resize(p->view.size());
    RETURN_IF_ERROR(engine.DownloadState(file.which, *p, host.data()));
    const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(host.data()),
                                          host.size() * sizeof(float));
    hashes[absl::StrCat(file.name, ":", names[i])] = HashBytes(bytes);
    if (writer != nullptr && status.ok()) status = writer->Append(bytes);
  }
  if (writer != nullptr && status.ok()) status = writer->Finish();
  return status;
}

std::string ManifestText(const CheckpointInfo& info, const TensorHashes& hashes) {
  nlohmann::ordered_json manifest;
  manifest["format"] = kFormatVersion;
  manifest["checkpoint_hash"] = info.checkpoint_hash;
  manifest["version"] = info.counters.version;
  manifest["optimizer_steps"] = info.counters.optimizer_steps;
  manifest["extra"] = info.extra_json;
  manifest["tensors"] = hashes;
  return manifest.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// `folder` empty: this rank only takes part.
absl::Status WriteFolder(Files& files, const std::string& root, const std::string& folder,
                         TrainerEngine& engine, CheckpointInfo& info) {
  absl::Status status;
  if (!folder.empty()) {
    status = files.MakeDirs(root);
    if (status.ok()) status = files.RemoveAll(folder);
    if (status.ok()) status = files.MakeDirs(folder);
  }
  TensorHashes hashes;
  for (const StateFile& file : kStateFiles) {
    const bool writes = !folder.empty() && status.ok();
    const absl::Status s = WriteStateFile(files, folder, file, writes, engine, hashes);
    if (status.ok()) status = s;
  }
  RETURN_IF_ERROR(status);
  info.checkpoint_hash = CheckpointHash(info.counters, hashes);
  if (folder.empty()) return absl::OkStatus();
  return files.WriteAtomically(JoinPath(folder, kManifest), ManifestText(info, hashes));
}

absl::Status Prune(Files& files, const std::string& root, int64_t keep) {
  ASSIGN_OR_RETURN(const std::vector<std::string> complete, ListCheckpoints(files, root));
  const auto count = static_cast<int64_t>(complete.size());
  for (int64_t i = 0; i < count - std::max<int64_t>(1, keep); ++i) {
    RETURN_IF_ERROR(files.RemoveAll(complete[i]));
  }
  // What an interrupted save left behind.
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  for (absl::string_view name : names) {
    absl::string_view stem = name;
    if (!absl::ConsumeSuffix(&stem, kPartial) && !absl::ConsumeSuffix(&stem, kReplaced)) continue;
    if (IsFolderName(stem)) RETURN_IF_ERROR(files.RemoveAll(JoinPath(root, name)));
  }
  return absl::OkStatus();
}

struct Manifest {
  CheckpointInfo info;
  TensorHashes hashes;
};

absl::StatusOr<Manifest> ReadManifest(Files& files, const std::string& folder) {
  const std::string path = JoinPath(folder, kManifest);
  ASSIGN_OR_RETURN(const std::string text, files.ReadAll(path));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto damaged = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, ": damaged checkpoint manifest: ", why));
  };
  if (!json.is_object()) return damaged("not a JSON object");
  for (const char* key : {"format", "version", "optimizer_steps"}) {
    if (!json.contains(key) || !json[key].is_number_integer()) {
      return damaged(absl::StrCat("no integer '", key, "'"));
    }
  }
  for (const char* key : {"checkpoint_hash", "extra"}) {
    if (!json.contains(key) || !json[key].is_string()) {
      return damaged(absl::StrCat("no string '", key, "'"));
    }
  }
  if (json["format"] != kFormatVersion) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": checkpoint format ",
                                                   json["format"].dump(), ", this program reads ",
                                                   kFormatVersion));
  }
  if (!json.contains("tensors") || !json["tensors"].is_object()) return damaged("no 'tensors'");
  Manifest m;
  for (const auto& [name, hash] : json["tensors"].items()) {
    if (!hash.is_string()) return damaged(absl::StrCat("hash of ", name, " is no string"));
    m.hashes[name] = hash.get<std::string>();
  }
  m.info.path = folder;
  m.info.counters = {json["version"].get<int64_t>(), json["optimizer_steps"].get<int64_t>()};
  m.info.extra_json = json["extra"].get<std::string>();
  m.info.checkpoint_hash = json["checkpoint_hash"].get<std::string>();
  if (CheckpointHash(m.info.counters, m.hashes) != m.info.checkpoint_hash) {
    return damaged("its content does not have its checkpoint_hash");
  }
  return m;
}

absl::Status DamagedTensor(const TensorSource& source, const std::string& name) {
  return absl::DataLossError(absl::StrCat(source.path(), ": tensor ", name,
                                          ": content does not match the manifest's hash"));
}

// The file holds exactly the engine's parameters, with the hashes of the manifest.
absl::Status VerifyStateFile(const TensorSource& source, const StateFile& file,
                             const ParameterLayout& layout, const TensorHashes& hashes) {
  for (const Parameter& p : layout.parameters()) {
    const TensorInfo* t = source.Find(p.spec.name);
    if (t == nullptr || t->shape != p.spec.shape || t->type != StorageType::kF32) {
      return absl::InvalidArgumentError(absl::StrCat(
          source.path(), ": tensor ", p.spec.name, ": absent or of another shape; the checkpoint ",
          "belongs to another model"));
    }
    const auto hash = hashes.find(absl::StrCat(file.name, ":", p.spec.name));
    if (hash == hashes.end() || hash->second != HashBytes(t->bytes)) {
      return DamagedTensor(source, p.spec.name);
    }
  }
  if (source.tensors().size() != layout.parameters().size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source.path(), ": ", source.tensors().size(), " tensors, the model has ",
                     layout.parameters().size(), "; the checkpoint belongs to another model"));
  }
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<CheckpointInfo> SaveCheckpoint(Files& files, const CheckpointOptions& options,
                                              TrainerEngine& engine,
                                              const std::string& extra_json) {
  CheckpointInfo info;
  info.counters = engine.counters();
  info.extra_json = extra_json;
  if (options.root.empty()) {
    RETURN_IF_ERROR(WriteFolder(files, "", "", engine, info));
    return info;
  }
  const std::string name = FolderName(info.counters.version);
  info.path = JoinPath(options.root, name);
  const std::string partial = info.path + kPartial, replaced = info.path + kReplaced;
  if (absl::Status written = WriteFolder(files, options.root, partial, engine, info);
      !written.ok()) {
    files.RemoveAll(partial).IgnoreError();  // the first error is the one to tell
    return Annotate(written, absl::StrCat("checkpoint of version ", info.counters.version));
  }
  RETURN_IF_ERROR(files.RemoveAll(replaced));
  if (files.Exists(info.path)) RETURN_IF_ERROR(files.Rename(info.path, replaced));
  RETURN_IF_ERROR(files.Rename(partial, info.path));
  RETURN_IF_ERROR(files.WriteAtomically(JoinPath(options.root, kLatest), name + "\n"));
  RETURN_IF_ERROR(Prune(files, options.root, options.keep));
  return info;
}

absl::StatusOr<std::vector<std::string>> ListCheckpoints(Files& files, const std::string& root) {
  std::vector<std::string> folders;
  if (!files.Exists(root)) return folders;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  for (const std::string& name : names) {
    const std::string folder = JoinPath(root, name);
    if (IsFolderName(name) && files.Exists(JoinPath(folder, kManifest))) folders.push_back(folder);
  }
  std::sort(folders.begin(), folders.end(), [](const std::string& a, const std::string& b) {
    return std::pair(a.size(), a) < std::pair(b.size(), b);  // numbers may outgrow their zeros
  });
  return folders;
}

absl::StatusOr<std::string> LatestCheckpoint(Files& files, const std::string& root) {
  const std::string pointer = JoinPath(root, kLatest);
  if (files.Exists(pointer)) {
    ASSIGN_OR_RETURN(const std::string text, files.ReadAll(pointer));
    const absl::string_view name = absl::StripSuffix(text, "\n");
    const std::string folder = JoinPath(root, name);
    if (IsFolderName(name) && files.Exists(JoinPath(folder, kManifest))) return folder;
  }
  // A crash between two renames leaves the pointer without its folder.
  ASSIGN_OR_RETURN(const std::vector<std::string> folders, ListCheckpoints(files, root));
  if (folders.empty()) return absl::NotFoundError(absl::StrCat(root, ": no checkpoint"));
  return folders.back();
}

absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(Files& files, const std::string& path) {
  ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(files, path));
  return std::move(manifest.info);
}

absl::Status VerifyMasters(Files& files, const std::string& path, const TensorSource& masters) {
  ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(files, path));
  for (const TensorInfo& tensor : masters.tensors()) {
    const auto hash = manifest.hashes.find(absl::StrCat(kStateFiles[0].name, ":", tensor.name));
    if (hash == manifest.hashes.end() || hash->second != HashBytes(tensor.bytes)) {
      return DamagedTensor(masters, tensor.name);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointInfo> LoadCheckpoint(Files& files, const std::string& path,
                                              TrainerEngine& engine) {
  ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(files, path));
  std::vector<std::shared_ptr<const TensorSource>> sources;
  for (const StateFile& file : kStateFiles) {
    auto source = OpenSafetensors(JoinPath(path, file.name));
    if (!source.ok()) {
      return absl::DataLossError(
          absl::StrCat("damaged checkpoint file: ", source.status().message()));
    }
    RETURN_IF_ERROR(VerifyStateFile(**source, file, engine.layout(), manifest.hashes));
    sources.push_back(*std::move(source));
  }
  std::vector<float> host;
  for (size_t i = 0; i < sources.size(); ++i) {
    for (const Parameter& p : engine.layout().parameters()) {
      host.resize(p.view.size());
      RETURN_IF_ERROR(sources[i]->ReadAll(p.spec.name, DType::kF32, host.data()));
      engine.UploadState(kStateFiles[i].which, p, host.data());
    }
  }
  RETURN_IF_ERROR(engine.FinishRestore(manifest.info.counters));
  return std::move(manifest.info);
}
}  // namespace stretto::engine
