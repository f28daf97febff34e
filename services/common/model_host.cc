#include "services/common/model_host.h"

#include <algorithm>
#include <cstring>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
using engine::Manifest;
using engine::Parameter;
using engine::SharedBytes;
using engine::WeightsVersion;

namespace {
absl::StatusOr<DType> ParseDType(const std::string& name) {
  if (name == "bf16") return DType::kBF16;
  if (name == "f32") return DType::kF32;
  return absl::InvalidArgumentError(absl::StrCat("dtype '", name, "': expected bf16 or f32"));
}

}  // namespace

ModelHostOptions OptionsOfRun(const RunConfig& run, int threads) {
  return {
      .path = run.model.path,
      .dtype = run.model.dtype,
      .prompts = {.chat_format = run.model.chat_format, .system_prompt = run.data.system_prompt},
      .max_sequence_length = run.model.max_sequence_length,
      .backend = run.cluster.backend,
      .threads = threads};
}

absl::StatusOr<std::unique_ptr<ModelHost>> OpenModelHost(const ModelHostOptions& options) {
  auto host = std::make_unique<ModelHost>();
  ASSIGN_OR_RETURN(host->dtype, ParseDType(options.dtype));
  ASSIGN_OR_RETURN(host->weight_format, engine::ParseWeightFormat(options.weight_dtype));
  ASSIGN_OR_RETURN(host->files, engine::OpenModel(options.path));
  RETURN_IF_ERROR(engine::CheckShapes(host->files.config, *host->files.tensors));
  ASSIGN_OR_RETURN(host->prompts, engine::PromptEncoder::Open(host->files, options.prompts));
  ASSIGN_OR_RETURN(host->device, engine::CreateDevice(
                                     {.backend = options.backend, .num_threads = options.threads}));
  engine::TransformerOptions transformer;
  transformer.dtype = host->dtype;
  transformer.max_sequence_length =
      options.max_sequence_length > 0
          ? options.max_sequence_length
          : std::min(kDefaultMaxSequence, host->files.config.max_position_embeddings);
  ASSIGN_OR_RETURN(host->transformer,
                   engine::Transformer::Create(*host->device, host->files.config, transformer));
  engine::NumericProfile profile = host->device->Profile(host->dtype);
  profile.weights = host->weight_format;
  host->profile = ToProto(profile);
  return host;
}

Manifest ManifestOf(const ModelHost& host) {
  Manifest manifest;
  const engine::ParameterLayout layout(host.files.config);
  for (const Parameter& parameter : layout.parameters()) {
    manifest.push_back({.name = parameter.spec.name,
                        .dtype = host.dtype,
                        .shape = parameter.spec.shape,
                        .hash = ""});
  }
  return manifest;
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> ReadInitialVersion(const ModelHost& host) {
  RETURN_IF_ERROR(engine::ScanForNonFinite(host.files.config, *host.files.tensors));
  Manifest manifest = ManifestOf(host);
  std::vector<SharedBytes> tensors;
  for (const engine::TensorEntry& entry : manifest) {
    engine::Bytes bytes(static_cast<size_t>(entry.NumBytes()));
    RETURN_IF_ERROR(host.files.tensors->ReadAll(entry.name, host.dtype, bytes.data()));
    tensors.emplace_back(std::move(bytes));
  }
  return engine::MakeVersion(0, std::move(manifest), std::move(tensors));
}

absl::StatusOr<std::shared_ptr<const engine::ModelWeights>> BuildWeights(
    const ModelHost& host, const WeightsVersion& version, const BuiltVersion& base) {
  absl::flat_hash_map<absl::string_view, size_t> index;
  for (size_t i = 0; i < version.manifest.size(); ++i) index[version.manifest[i].name] = i;
  const engine::ParameterReader reader = [&](const Parameter& parameter, DType dtype,
                                             void* dst) -> absl::Status {
    const auto found = index.find(parameter.spec.name);
    if (found == index.end() || version.manifest[found->second].dtype != dtype) {
      return absl::InvalidArgumentError(absl::StrCat("version ", version.number, " has no ",
                                                     Name(dtype), " tensor ", parameter.spec.name));
    }
    const absl::Span<const uint8_t> bytes = version.tensors[found->second].span();
    std::memcpy(dst, bytes.data(), bytes.size());
    return absl::OkStatus();
  };
  engine::WeightsOptions options{.format = host.weight_format};
  if (base.weights != nullptr && engine::SameTensors(base.version->manifest, version.manifest)) {
    options.base = base.weights;
    options.changed = [&](const Parameter& parameter) {
      const size_t i = index.at(parameter.spec.name);
      return version.manifest[i].hash != base.version->manifest[i].hash;
    };
  }
  const std::unique_ptr<engine::Stream> stream = host.device->CreateStream();
  ASSIGN_OR_RETURN(std::unique_ptr<engine::ModelWeights> weights,
                   engine::ModelWeights::Load(*host.device, *stream, host.files.config, host.dtype,
                                              reader, options));
  return std::shared_ptr<const engine::ModelWeights>(std::move(weights));
}

v1::NumericProfile ToProto(const engine::NumericProfile& profile) {
  v1::NumericProfile proto;
  proto.set_backend(profile.backend);
  proto.set_instruction_set(profile.instruction_set);
  proto.set_dtype(profile.DTypeName());
  proto.set_k_leaves(profile.k_leaves);
  return proto;
}
}  // namespace stretto::services
