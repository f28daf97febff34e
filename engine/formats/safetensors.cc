#include "engine/formats/safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "engine/formats/checked.h"
#include "engine/formats/json.h"

namespace stretto::engine {
namespace {
using nlohmann::json;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr absl::string_view kMetadataKey = "__metadata__";

const std::map<absl::string_view, StorageType>& DTypes() {
  static const auto* types = [] {
    auto* map = new std::map<absl::string_view, StorageType>;
    for (int i = 0; i <= static_cast<int>(StorageType::kF64); ++i) {
      map->emplace(Name(static_cast<StorageType>(i)), static_cast<StorageType>(i));
    }
    return map;
  }();
  return *types;
}

absl::Status Bad(const std::string& path, absl::string_view tensor, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": ", tensor.empty() ? "" : absl::StrCat("tensor ", tensor.substr(0, 300), ": "),
      problem));
}

std::optional<int64_t> NonNegative(const json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) return std::nullopt;
  return value.get<int64_t>();
}

// A tensor's entry of the header, with the offsets of its bytes in the data.
struct Entry {
  TensorInfo info;
  int64_t begin = 0, end = 0;
};

absl::StatusOr<Entry> ParseEntry(const std::string& path, const std::string& name,
                                 const json& value) {
  Entry entry;
  entry.info.name = name;
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value.contains("shape") || !value.contains("data_offsets")) {
    return Bad(path, name, "expected exactly the fields dtype, shape and data_offsets");
  }
  const json &dtype = value.at("dtype"), &shape = value.at("shape"),
             &offsets = value.at("data_offsets");
  const auto type =
      dtype.is_string() ? DTypes().find(dtype.get_ref<const std::string&>()) : DTypes().end();
  if (type == DTypes().end()) {
    return Bad(path, name, absl::StrCat("unknown dtype ", dtype.dump().substr(0, 50)));
  }
  entry.info.type = type->second;
  if (!shape.is_array() || shape.size() > kMaxRank) {
    return Bad(path, name, absl::StrCat("shape is not a list of up to ", kMaxRank, " sizes"));
  }
  for (const json& dim : shape) {
    const auto size = NonNegative(dim);
    if (!size.has_value()) return Bad(path, name, "shape holds what is not a size");
    entry.info.shape.push_back(*size);
  }
  if (!offsets.is_array() || offsets.size() != 2 || !NonNegative(offsets[0]).has_value() ||
      !NonNegative(offsets[1]).has_value()) {
    return Bad(path, name, "data_offsets is not [begin, end]");
  }
  entry.begin = *NonNegative(offsets[0]);
  entry.end = *NonNegative(offsets[1]);
  const auto elements = CheckedProduct(entry.info.shape);
  const auto bytes =
      elements.has_value() ? CheckedMul(*elements, BlockBytes(entry.info.type)) : std::nullopt;
  if (!bytes.has_value()) return Bad(path, name, "the product of its shape overflows");
  if (entry.end < entry.begin || entry.end - entry.begin != *bytes) {
    return Bad(path, name,
               absl::StrCat("data_offsets [", entry.begin, ", ", entry.end, "], but ",
                            Name(entry.info.type), " of shape [",
                            absl::StrJoin(entry.info.shape, ", "), "] takes ", *bytes, " bytes"));
  }
  return entry;
}

absl::Status CheckMetadata(const std::string& path, const json& metadata) {
  const bool strings =
      metadata.is_object() && std::all_of(metadata.begin(), metadata.end(),
                                          [](const json& value) { return value.is_string(); });
  return strings ? absl::OkStatus()
                 : Bad(path, "", absl::StrCat(kMetadataKey, " does not map strings to strings"));
}

// Points the tensors at their bytes, which must follow one another and fill `data`.
absl::Status PlaceTensors(const std::string& path, absl::Span<const uint8_t> data,
                          std::vector<Entry>& entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.info.name) < std::tie(b.begin, b.end, b.info.name);
  });
  int64_t covered = 0;
  for (Entry& entry : entries) {
    if (static_cast<uint64_t>(entry.end) > data.size()) {
      return Bad(path, entry.info.name,
                 absl::StrCat("ends at data byte ", entry.end, ", but the file has ", data.size(),
                              " (truncated?)"));
    }
    if (entry.begin != covered) {
      return Bad(
          path, entry.info.name,
          absl::StrCat("begins at data byte ", entry.begin,
                       entry.begin < covered ? ", inside the tensor before it, which ends at "
                                             : ", leaving a hole after ",
                       covered));
    }
    covered = entry.end;
    entry.info.bytes = data.subspan(static_cast<size_t>(entry.begin),
                                    static_cast<size_t>(entry.end - entry.begin));
  }
  if (static_cast<uint64_t>(covered) != data.size()) {
    return Bad(path, "",
               absl::StrCat("has ", data.size(), " bytes of data, but its tensors take ", covered));
  }
  return absl::OkStatus();
}

// The tensors of some mapped files.
class MappedTensors final : public TensorSource {
 public:
  MappedTensors(std::string path, std::vector<TensorInfo> tensors,
                std::vector<std::shared_ptr<const MappedFile>> files)
      : path_(std::move(path)), tensors_(std::move(tensors)), files_(std::move(files)) {}
  const std::string& path() const override { return path_; }
  absl::Span<const TensorInfo> tensors() const override { return tensors_; }
  void LetPagesGo() const override {
    for (const auto& file : files_) file->LetPagesGo();
  }

 private:
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
};

// The index of a sharded folder: tensor → shard.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(const json document, ReadJsonFile(path));
  const json empty = json::object();
  const json* weights =
      document.is_object() && document.contains("weight_map") ? &document.at("weight_map") : &empty;
  if (!weights->is_object() || weights->empty()) {
    return Bad(path, "", "weight_map is missing or empty, expected tensor names to shard files");
  }
  std::map<std::string, std::string> shard_of;
  for (const auto& [name, shard] : weights->items()) {
    if (!shard.is_string()) return Bad(path, name, "its shard is not a file name");
    const std::string file = shard.get<std::string>();
    if (file.empty() || file == "." || file == ".." ||
        file.find_first_of("/\\\0", 0, 3) != std::string::npos) {
      return Bad(path, name, "its shard is not the plain name of a file in this folder");
    }
    shard_of[name] = file;
  }
  return shard_of;
}

// Takes from `found` what the index places in `shard`; both must agree.
absl::Status MatchShard(const std::string& index_path, const std::string& shard,
                        const std::map<std::string, std::string>& shard_of,
                        const std::vector<TensorInfo>& found) {
  std::set<absl::string_view> names;
  for (const TensorInfo& info : found) {
    const auto it = shard_of.find(info.name);
    if (it == shard_of.end() || it->second != shard) {
      return Bad(index_path, info.name,
                 absl::StrCat("lies in ", shard, ", but the index places it ",
                              it == shard_of.end() ? "nowhere" : absl::StrCat("in ", it->second)));
    }
    names.insert(info.name);
  }
  for (const auto& [name, file] : shard_of) {
    if (file == shard && !names.contains(name)) {
      return Bad(index_path, name,
                 absl::StrCat("the index places it in ", shard, ", which lacks it"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const TensorSource>> OpenSharded(const std::string& folder,
                                                                const std::string& index_path) {
  ASSIGN_OR_RETURN(const auto shard_of, ReadIndex(index_path));
  std::set<std::string> shards;
  for (const auto& [name, shard] : shard_of) shards.insert(shard);
  std::vector<TensorInfo> all;
  std::vector<std::shared_ptr<const MappedFile>> files;
  for (const std::string& shard : shards) {
    auto file = MappedFile::Open(JoinPath(folder, shard));
    if (!file.ok()) return Annotate(file.status(), absl::StrCat(index_path, ": shard ", shard));
    ASSIGN_OR_RETURN(auto tensors, ParseSafetensors((*file)->path(), (*file)->bytes()));
    RETURN_IF_ERROR(MatchShard(index_path, shard, shard_of, tensors));
    std::move(tensors.begin(), tensors.end(), std::back_inserter(all));
    files.push_back(*std::move(file));
  }
  std::sort(all.begin(), all.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return std::make_shared<MappedTensors>(folder, std::move(all), std::move(files));
}
}  // namespace

absl::StatusOr<std::vector<TensorInfo>> ParseSafetensors(const std::string& path,
                                                         absl::Span<const uint8_t> bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < 8) {
    return Bad(path, "", absl::StrCat("has ", bytes.size(), " bytes, too few for safetensors"));
  }
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > kMaxHeaderBytes || header_bytes > bytes.size() - 8) {
    return Bad(
        path, "",
        absl::StrCat("header of ", header_bytes, " bytes, but the file has ", bytes.size(),
                     " and the limit is ", kMaxHeaderBytes, " (truncated, or not safetensors?)"));
  }
  const absl::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, header_bytes);
  ASSIGN_OR_RETURN(const json header, ParseJson(absl::StrCat(path, ": header"), text, 4));
  if (!header.is_object()) return Bad(path, "", "its header is not a JSON object");
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataKey) {
      RETURN_IF_ERROR(CheckMetadata(path, value));
      continue;
    }
    ASSIGN_OR_RETURN(Entry entry, ParseEntry(path, name, value));
    entries.push_back(std::move(entry));
  }
  RETURN_IF_ERROR(PlaceTensors(path, bytes.subspan(8 + header_bytes), entries));
  std::vector<TensorInfo> tensors;
  tensors.reserve(entries.size());
  for (Entry& entry : entries) tensors.push_back(std::move(entry.info));
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return tensors;
}

absl::StatusOr<std::shared_ptr<const TensorSource>> OpenSafetensors(const std::string& path) {
  ASSIGN_OR_RETURN(auto file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(auto tensors, ParseSafetensors(path, file->bytes()));
  std::vector<std::shared_ptr<const MappedFile>> files = {std::move(file)};
  return std::make_shared<MappedTensors>(path, std::move(tensors), std::move(files));
}

absl::StatusOr<std::shared_ptr<const TensorSource>> OpenSafetensorsFolder(
    const std::string& folder) {
  const std::string single = JoinPath(folder, "model.safetensors");
  const std::string index = JoinPath(folder, "model.safetensors.index.json");
  if (Files::Real().Exists(single)) return OpenSafetensors(single);
  if (Files::Real().Exists(index)) return OpenSharded(folder, index);
  return absl::NotFoundError(absl::StrCat(folder, ": holds neither model.safetensors nor ",
                                          "model.safetensors.index.json"));
}
}  // namespace stretto::engine
