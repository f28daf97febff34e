#include "engine/formats/peft.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "engine/formats/json.h"
#include "engine/formats/safetensors.h"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr char kConfigFile[] = "adapter_config.json";
constexpr char kWeightsFile[] = "adapter_model.safetensors";
constexpr int64_t kMaxRank = 65536;

bool IsAttention(absl::string_view module) {
  return module != "gate_proj" && module != "up_proj" && module != "down_proj";
}

struct Sizes {
  int64_t outputs = 0, inputs = 0;
};
Sizes SizesOf(const ModelConfig& c, absl::string_view module) {
  const int64_t D = c.hidden_size, F = c.intermediate_size;
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  if (module == "q_proj") return {q, D};
  if (module == "k_proj" || module == "v_proj") return {kv, D};
  if (module == "o_proj") return {D, q};
  if (module == "down_proj") return {D, F};
  return {F, D};
}

std::string ConfigJson(const PeftExport& options, const LoraOptions& lora) {
  Json json;
  json["peft_type"] = "LORA";
  json["task_type"] = "CAUSAL_LM";
  json["base_model_name_or_path"] = options.base;
  json["r"] = lora.rank;
  json["lora_alpha"] = lora.alpha;
  json["target_modules"] = lora.targets;
  json["lora_dropout"] = 0.0;
  json["bias"] = "none";
  json["fan_in_fan_out"] = false;
  json["inference_mode"] = true;
  json["init_lora_weights"] = true;
  json["layers_to_transform"] = nullptr;
  json["modules_to_save"] = nullptr;
  json["use_dora"] = false;
  json["use_rslora"] = false;
  return absl::StrCat(json.dump(2, ' ', true, Json::error_handler_t::replace), "\n");
}

absl::Status WriteFolder(Files& files, const std::string& folder, const PeftExport& options,
                         const ModelConfig& config, const LoraOptions& lora,
                         const LoraReader& read) {
  RETURN_IF_ERROR(files.MakeDirs(folder));
  RETURN_IF_ERROR(files.WriteAtomically(JoinPath(folder, kConfigFile), ConfigJson(options, lora)));
  std::vector<TensorSpec> specs = LoraTensors(config, lora);
  std::sort(specs.begin(), specs.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  std::vector<SafetensorsWriter::Tensor> tensors;
  tensors.reserve(specs.size());
  for (const TensorSpec& spec : specs) tensors.push_back({spec.name, DType::kF32, spec.shape});
  ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::Create(files, JoinPath(folder, kWeightsFile),
                                                          std::move(tensors)));
  std::vector<float> values;
  for (const TensorSpec& spec : specs) {
    values.resize(static_cast<size_t>(spec.shape[0] * spec.shape[1]));
    RETURN_IF_ERROR(Annotate(read(spec, values.data()), spec.name));
    RETURN_IF_ERROR(writer->Append(
        {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)}));
  }
  return writer->Finish();
}

// What would be lost if the folder were replaced.
absl::Status CheckReplaceableAdapter(Files& files, const std::string& path) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(path));
  for (const std::string& name : names) {
    if (name != kConfigFile && name != kWeightsFile && name != "README.md") {
      return absl::FailedPreconditionError(absl::StrCat("adapter folder \"", path, "\" holds ",
                                                        name,
                                                        ", which is no part of an adapter: it is "
                                                        "not replaced; choose another folder"));
    }
  }
  return absl::OkStatus();
}

// Fields that change what an adapter computes in ways that there are not here.
absl::Status CheckSupported(const std::string& path, const nlohmann::json& json) {
  JsonFields fields(path, json);
  if (fields.String("peft_type") != "LORA") fields.FailUnsupported("peft_type", "LORA");
  if (fields.String("bias", "none") != "none") fields.FailUnsupported("bias", "none");
  for (const char* flag : {"use_dora", "use_rslora", "fan_in_fan_out", "lora_bias"}) {
    if (fields.Bool(flag, false)) fields.FailUnsupported(flag, "false");
  }
  for (const char* name :
       {"rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform",
        "layer_replication", "trainable_token_indices", "exclude_modules"}) {
    const nlohmann::json* value = fields.Find(name);
    if (value != nullptr && !value->empty()) fields.FailUnsupported(name, "nothing");
  }
  return fields.status();
}

absl::Status ReadTargets(JsonFields& fields, LoraOptions& lora) {
  const nlohmann::json* targets = fields.Find("target_modules");
  const bool all = targets != nullptr && targets->is_string() && *targets == "all-linear";
  if (all) return absl::OkStatus();
  if (targets == nullptr || !targets->is_array() || targets->empty()) {
    fields.Fail("target_modules", "a list of modules or \"all-linear\"");
    return fields.status();
  }
  for (const auto& target : *targets) {
    if (!target.is_string()) fields.Fail("target_modules", "names");
    if (target.is_string()) lora.targets.push_back(target.get<std::string>());
  }
  return fields.status();
}

absl::Status CheckTensors(const PeftAdapter& adapter, const ModelConfig& config) {
  const std::vector<TensorSpec> specs = LoraTensors(config, adapter.lora);
  const auto shape_text = [](const std::vector<int64_t>& shape) {
    return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  };
  std::set<absl::string_view> expected;
  for (const TensorSpec& spec : specs) {
    expected.insert(spec.name);
    const TensorInfo* found = adapter.tensors->Find(spec.name);
    if (found != nullptr && found->shape == spec.shape && IsReadable(found->type)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        adapter.tensors->path(), ": tensor ", spec.name, " ",
        found == nullptr ? "is missing"
                         : absl::StrCat("is ", Name(found->type), " of ", shape_text(found->shape)),
        ", expected floating-point numbers of ", shape_text(spec.shape),
        ": it was trained on another model, or adapter_config.json says another rank than its "
        "own"));
  }
  for (const TensorInfo& info : adapter.tensors->tensors()) {
    if (!expected.contains(info.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(adapter.tensors->path(), ": tensor ", info.name,
                       " is none of this model's adapter of rank ", adapter.lora.rank, " for ",
                       absl::StrJoin(adapter.lora.targets, ", ")));
    }
  }
  return absl::OkStatus();
}
}  // namespace

absl::Status NormalizeLora(const ModelConfig& config, LoraOptions& lora) {
  const auto fail = [](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("lora: ", what...));
  };
  const int64_t largest = std::min(kMaxRank, config.hidden_size);
  if (lora.rank < 1 || lora.rank > largest) {
    return fail("rank ", lora.rank, ": expected 1 to ", largest, " (the model's hidden size)");
  }
  if (!(lora.alpha > 0 && lora.alpha <= 1e6)) {
    return fail("alpha ", lora.alpha, ": expected a positive number of at most 1e6");
  }
  std::vector<std::string> ordered;
  for (const char* module : kLoraModules) {
    const auto count = std::count(lora.targets.begin(), lora.targets.end(), module);
    if (count > 1) return fail("target '", module, "' is given twice");
    if (count == 1 || lora.targets.empty()) ordered.emplace_back(module);
  }
  for (const std::string& target : lora.targets) {
    if (std::count(ordered.begin(), ordered.end(), target) == 0) {
      return fail("target '", target, "': expected some of ", absl::StrJoin(kLoraModules, ", "));
    }
  }
  lora.targets = std::move(ordered);
  return absl::OkStatus();
}

std::string LoraModulePath(int64_t layer, absl::string_view module) {
  return absl::StrCat("model.layers.", layer, IsAttention(module) ? ".self_attn." : ".mlp.",
                      module);
}

std::string LoraTensorName(absl::string_view module_path, char which) {
  return absl::StrCat("base_model.model.", module_path, ".lora_", std::string(1, which), ".weight");
}

std::vector<TensorSpec> LoraTensors(const ModelConfig& config, const LoraOptions& lora) {
  std::vector<TensorSpec> specs;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    for (const std::string& target : lora.targets) {
      const Sizes sizes = SizesOf(config, target);
      const std::string path = LoraModulePath(layer, target);
      specs.push_back({LoraTensorName(path, 'A'), {lora.rank, sizes.inputs}});
      specs.push_back({LoraTensorName(path, 'B'), {sizes.outputs, lora.rank}});
    }
  }
  return specs;
}

absl::Status ExportPeft(Files& files, const PeftExport& options, const ModelConfig& config,
                        const LoraOptions& lora, const LoraReader& read) {
  std::string path = options.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const bool exists = !path.empty() && files.Exists(path);
  if (path.empty() || (exists && !options.overwrite)) {
    return absl::AlreadyExistsError(absl::StrCat(
        "adapter folder \"", path, "\" exists already (--overwrite replaces it) or has no name"));
  }
  if (exists) RETURN_IF_ERROR(CheckReplaceableAdapter(files, path));
  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  RETURN_IF_ERROR(files.RemoveAll(temporary));
  absl::Status status = WriteFolder(files, temporary, options, config, lora, read);
  if (status.ok() && exists) status = files.RemoveAll(path);
  if (status.ok()) status = files.Rename(temporary, path);
  if (!status.ok()) (void)files.RemoveAll(temporary);
  return status;
}

absl::StatusOr<PeftAdapter> OpenPeft(const std::string& path, const ModelConfig& config) {
  const std::string config_path = JoinPath(path, kConfigFile);
  if (!Files::Real().Exists(config_path)) {
    return absl::NotFoundError(absl::StrCat(path, ": no adapter: a folder with ", kConfigFile,
                                            " and ", kWeightsFile, " is expected"));
  }
  ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(config_path));
  if (!json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(config_path, ": expected an object"));
  }
  RETURN_IF_ERROR(CheckSupported(config_path, json));
  JsonFields fields(config_path, json);
  PeftAdapter adapter{path, {}, nullptr};
  adapter.lora.rank = fields.Int("r", 1, kMaxRank);
  adapter.lora.alpha = fields.Number("lora_alpha", 0, 1e6);
  RETURN_IF_ERROR(ReadTargets(fields, adapter.lora));
  RETURN_IF_ERROR(Annotate(NormalizeLora(config, adapter.lora), config_path));
  ASSIGN_OR_RETURN(adapter.tensors, OpenSafetensors(JoinPath(path, kWeightsFile)));
  RETURN_IF_ERROR(CheckTensors(adapter, config));
  return adapter;
}

absl::StatusOr<PeftAdapter> ResolveLora(const ModelConfig& config, LoraOptions wanted,
                                        const std::string& adapter_folder) {
  const bool said_alpha = wanted.alpha > 0, said_targets = !wanted.targets.empty();
  if (wanted) {
    if (!said_alpha) wanted.alpha = 2 * static_cast<double>(wanted.rank);
    RETURN_IF_ERROR(NormalizeLora(config, wanted));
  }
  if (adapter_folder.empty()) return PeftAdapter{"", std::move(wanted), nullptr};
  ASSIGN_OR_RETURN(PeftAdapter adapter, OpenPeft(adapter_folder, config));
  const auto differs = [&](absl::string_view option, const std::string& has,
                           const std::string& want) {
    return absl::InvalidArgumentError(
        absl::StrCat("lora: ", adapter_folder, " has ", option, " ", has, ", not ", want));
  };
  const auto text = [](const std::vector<std::string>& names) {
    return absl::StrJoin(names, ", ");
  };
  if (wanted && wanted.rank != adapter.lora.rank) {
    return differs("rank", absl::StrCat(adapter.lora.rank), absl::StrCat(wanted.rank));
  }
  if (said_alpha && wanted.alpha != adapter.lora.alpha) {
    return differs("alpha", absl::StrCat(adapter.lora.alpha), absl::StrCat(wanted.alpha));
  }
  if (said_targets && wanted.targets != adapter.lora.targets) {
    return differs("targets", text(adapter.lora.targets), text(wanted.targets));
  }
  return adapter;
}
}  // namespace stretto::engine
