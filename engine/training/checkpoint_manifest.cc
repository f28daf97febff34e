#include "engine/training/checkpoint_manifest.h"

#include <algorithm>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "engine/training/tree_hash.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr char kPrefix[] = "step-", kOther[] = "../";
constexpr int kFormat = 2, kFormatOfWholeFiles = 1;

std::string Dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::string BodyHash(const Json& body) { return HashBytes(AsBytes(Dump(body, -1))); }

Json ToJson(const CheckpointPart& p) {
  Json json = {p.file, p.stored_begin, p.begin, p.count, p.hash};
  if (!p.box.is_all()) {
    json.push_back({p.box.row_begin, p.box.row_end, p.box.col_begin, p.box.col_end});
  }
  return json;
}

bool IsInteger(const Json& json) { return json.is_number_integer(); }

// A size: an integer of at least 0, of which products with 4 do not overflow.
bool IsSize(const Json& json) {
  return IsInteger(json) && json.get<int64_t>() >= 0 && json.get<int64_t>() < (int64_t{1} << 60);
}

bool ParsePart(const Json& json, size_t num_files, CheckpointPart& part) {
  if (!json.is_array() || json.size() < 5 || json.size() > 6 || !json[4].is_string()) return false;
  for (int i = 0; i < 4; ++i) {
    if (!IsSize(json[i])) return false;
  }
  part.file = json[0].get<int64_t>();
  part.stored_begin = json[1].get<int64_t>();
  part.begin = json[2].get<int64_t>();
  part.count = json[3].get<int64_t>();
  part.hash = json[4].get<std::string>();
  if (json.size() == 6) {
    const Json& box = json[5];
    if (!box.is_array() || box.size() != 4 || !std::all_of(box.begin(), box.end(), IsSize)) {
      return false;
    }
    part.box = {box[0].get<int64_t>(), box[1].get<int64_t>(), box[2].get<int64_t>(),
                box[3].get<int64_t>()};
    if (part.box.row_begin >= part.box.row_end || part.box.col_begin >= part.box.col_end) {
      return false;
    }
  }
  return part.file < static_cast<int64_t>(num_files) && part.stored_begin <= part.begin;
}

bool ParseTensor(const Json& json, size_t num_files, CheckpointTensor& tensor) {
  if (!json.is_object() || !json.contains("shape") || !json.contains("parts")) return false;
  if (!json["shape"].is_array() || !json["parts"].is_array()) return false;
  for (const Json& size : json["shape"]) {
    if (!IsSize(size)) return false;
    tensor.shape.push_back(size.get<int64_t>());
  }
  return std::all_of(json["parts"].begin(), json["parts"].end(), [&](const Json& part) {
    return ParsePart(part, num_files, tensor.parts.emplace_back());
  });
}

Json AdapterJson(const CheckpointAdapter& adapter) {
  return {{"rank", adapter.lora.rank},
          {"alpha", adapter.lora.alpha},
          {"targets", adapter.lora.targets},
          {"base_hash", adapter.base_hash}};
}

bool ParseAdapter(const Json& json, CheckpointAdapter& adapter) {
  if (!json.is_object()) return false;
  const Json none;
  const auto at = [&](const char* key) -> const Json& {
    return json.contains(key) ? json[key] : none;
  };
  if (!IsSize(at("rank")) || !at("alpha").is_number() || !at("base_hash").is_string()) return false;
  if (!at("targets").is_array() ||
      !std::all_of(at("targets").begin(), at("targets").end(),
                   [](const Json& target) { return target.is_string(); })) {
    return false;
  }
  adapter.lora = {at("rank").get<int64_t>(), at("alpha").get<double>(),
                  at("targets").get<std::vector<std::string>>()};
  adapter.base_hash = at("base_hash").get<std::string>();
  return true;
}

// A plain name, or one of another checkpoint's folder.
bool IsFileName(absl::string_view name) {
  if (absl::ConsumePrefix(&name, kOther)) {
    const size_t slash = name.find('/');
    if (slash == absl::string_view::npos || !VersionOfFolder(name.substr(0, slash))) return false;
    name.remove_prefix(slash + 1);
  }
  return !name.empty() && name != "." && name != ".." && !absl::StrContains(name, '/');
}

absl::Status ParseParts(const Json& json, CheckpointManifest& m, const std::string& path) {
  const auto damaged = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, ": damaged checkpoint manifest: ", why));
  };
  if (!json.contains("files") || !json["files"].is_array()) return damaged("no 'files'");
  for (const Json& file : json["files"]) {
    if (!file.is_string() || !IsFileName(file.get_ref<const std::string&>())) {
      return damaged("a file's name is none");
    }
    m.files.push_back(file.get<std::string>());
  }
  if (!json.contains("parts") || !json["parts"].is_object()) return damaged("no 'parts'");
  for (const auto& [name, tensor] : json["parts"].items()) {
    const auto known = m.tensors.find(name);
    if (known == m.tensors.end() || !ParseTensor(tensor, m.files.size(), known->second)) {
      return damaged(absl::StrCat("parts of ", name));
    }
  }
  return absl::OkStatus();
}

// Format 1: every tensor whole, in its kind's file.
void AddWholeParts(CheckpointManifest& m) {
  for (const StateFile& file : kStateFiles) {
    for (auto& [key, tensor] : m.tensors) {
      if (!absl::StartsWith(key, absl::StrCat(file.name, ":"))) continue;
      tensor.parts.push_back({static_cast<int64_t>(m.files.size()), 0, 0, -1, {}, tensor.hash});
    }
    m.files.emplace_back(file.name);
  }
}

absl::Status CheckBody(Json json, const std::string& path) {
  const auto found = json.find("manifest_hash");
  const bool has_hash = found != json.end() && found->is_string();
  const std::string hash = has_hash ? found->get<std::string>() : "";
  if (has_hash) json.erase(found);
  if (has_hash && BodyHash(json) == hash) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(path, ": damaged checkpoint manifest: its content does not have its hash"));
}
}  // namespace

std::string TensorKey(StateTensor which, absl::string_view name) {
  return absl::StrCat(kStateFiles[static_cast<int>(which)].name, ":", name);
}

std::string CheckpointFolderName(int64_t version) {
  return absl::StrFormat("%s%08d", kPrefix, version);
}

absl::optional<int64_t> VersionOfFolder(absl::string_view name) {
  int64_t version = 0;
  if (!absl::ConsumePrefix(&name, kPrefix) || name.size() < 8) return absl::nullopt;
  if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return absl::nullopt;
  }
  if (!absl::SimpleAtoi(name, &version)) return absl::nullopt;
  return version;
}

std::string StoredName(absl::string_view name, const TensorBox& box, int64_t begin, bool is_whole) {
  if (is_whole) return std::string(name);
  if (box.is_all()) return absl::StrCat(name, "@", begin);
  return absl::StrCat(name, "@", box.row_begin, ":", box.row_end, ",", box.col_begin, ":",
                      box.col_end, "@", begin);
}

std::string FileOfCheckpoint(const std::string& folder, const std::string& file) {
  absl::string_view rest = file;
  if (!absl::ConsumePrefix(&rest, kOther)) return JoinPath(folder, file);
  const size_t slash = folder.rfind('/');
  return JoinPath(slash == std::string::npos ? "" : folder.substr(0, slash), rest);
}

std::vector<std::string> FoldersNeeded(const CheckpointManifest& manifest) {
  std::set<std::string> folders;
  for (absl::string_view file : manifest.files) {
    if (absl::ConsumePrefix(&file, kOther)) folders.emplace(file.substr(0, file.find('/')));
  }
  return {folders.begin(), folders.end()};
}

std::string ContentHash(const CheckpointManifest& manifest) {
  TreeHash tree;
  tree.Add("version", absl::StrCat(manifest.info.counters.version));
  tree.Add("optimizer_steps", absl::StrCat(manifest.info.counters.optimizer_steps));
  if (manifest.info.adapter.has_value()) {
    tree.Add("adapter", AdapterJson(*manifest.info.adapter).dump());
  }
  if (manifest.info.critic.has_value()) {
    tree.Add("critic", absl::StrCat(manifest.info.critic->optimizer_steps));
  }
  for (const auto& [name, tensor] : manifest.tensors) tree.Add(name, tensor.hash);
  return tree.Finish();
}

std::string ManifestText(const CheckpointManifest& manifest) {
  Json json;
  json["format"] = kFormat;
  json["checkpoint_hash"] = manifest.info.checkpoint_hash;
  json["version"] = manifest.info.counters.version;
  json["optimizer_steps"] = manifest.info.counters.optimizer_steps;
  json["extra"] = manifest.info.extra_json;
  if (manifest.info.adapter.has_value()) json["adapter"] = AdapterJson(*manifest.info.adapter);
  if (manifest.info.critic.has_value()) {
    json["critic"] = {{"optimizer_steps", manifest.info.critic->optimizer_steps}};
  }
  Json hashes = Json::object(), parts = Json::object();
  for (const auto& [name, tensor] : manifest.tensors) {
    hashes[name] = tensor.hash;
    Json list = Json::array();
    for (const CheckpointPart& part : tensor.parts) list.push_back(ToJson(part));
    parts[name] = {{"shape", tensor.shape}, {"parts", std::move(list)}};
  }
  json["tensors"] = std::move(hashes);
  json["files"] = manifest.files;
  json["parts"] = std::move(parts);
  // As it will be read: what is not UTF-8 is replaced.
  json = Json::parse(Dump(json, -1));
  json["manifest_hash"] = BodyHash(json);
  return Dump(json, 1);
}

absl::StatusOr<CheckpointManifest> ParseManifest(const std::string& path, absl::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto damaged = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, ": damaged checkpoint manifest: ", why));
  };
  if (!json.is_object()) return damaged("not a JSON object");
  for (const char* key : {"format", "version", "optimizer_steps"}) {
    if (!json.contains(key) || !IsInteger(json[key])) {
      return damaged(absl::StrCat("no integer '", key, "'"));
    }
  }
  for (const char* key : {"checkpoint_hash", "extra"}) {
    if (!json.contains(key) || !json[key].is_string()) {
      return damaged(absl::StrCat("no string '", key, "'"));
    }
  }
  const bool is_old = json["format"] == kFormatOfWholeFiles && !json.contains("manifest_hash");
  if (!is_old) {
    RETURN_IF_ERROR(CheckBody(json, path));
    if (json["format"] != kFormat) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": checkpoint format ",
                                                     json["format"].dump(), ", this program reads ",
                                                     kFormatOfWholeFiles, " and ", kFormat));
    }
  }
  if (!json.contains("tensors") || !json["tensors"].is_object()) return damaged("no 'tensors'");
  CheckpointManifest m;
  for (const auto& [name, hash] : json["tensors"].items()) {
    if (!hash.is_string()) return damaged(absl::StrCat("hash of ", name, " is no string"));
    m.tensors[name].hash = hash.get<std::string>();
  }
  m.info.counters = {json["version"].get<int64_t>(), json["optimizer_steps"].get<int64_t>()};
  m.info.extra_json = json["extra"].get<std::string>();
  m.info.checkpoint_hash = json["checkpoint_hash"].get<std::string>();
  if (json.contains("adapter")) {
    m.info.adapter.emplace();
    if (!ParseAdapter(json["adapter"], *m.info.adapter)) return damaged("'adapter'");
  }
  if (json.contains("critic")) {
    const Json& critic = json["critic"];
    if (!critic.is_object() || !critic.contains("optimizer_steps") ||
        !IsSize(critic["optimizer_steps"])) {
      return damaged("'critic'");
    }
    m.info.critic = {m.info.counters.version, critic["optimizer_steps"].get<int64_t>()};
  }
  if (ContentHash(m) != m.info.checkpoint_hash) {
    return damaged("its content does not have its checkpoint_hash");
  }
  if (is_old) {
    AddWholeParts(m);
    return m;
  }
  RETURN_IF_ERROR(ParseParts(json, m, path));
  return m;
}

absl::StatusOr<CheckpointManifest> ReadManifest(Files& files, const std::string& folder) {
  const std::string path = JoinPath(folder, kManifestFile);
  ASSIGN_OR_RETURN(const std::string text, files.ReadAll(path));
  ASSIGN_OR_RETURN(CheckpointManifest manifest, ParseManifest(path, text));
  manifest.info.path = folder;
  return manifest;
}
}  // namespace stretto::engine
