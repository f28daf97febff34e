#include "services/common/model_host.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/file_status.h"
#include "base/status.h"
#include "engine/model/lora_merged.h"

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
  engine::PromptOptions prompts;
  prompts.chat_format = run.model.chat_format;
  if (!run.data.system_prompt.empty()) prompts.system_prompt = run.data.system_prompt;
  return {.path = run.model.path,
          .adapter = "",
          .dtype = run.model.dtype,
          .prompts = prompts,
          .k_leaves = run.train.k_leaves,
          .max_sequence_length = run.model.max_sequence_length,
          .most_by_default = ModelSection::kMostAuto,
          .backend = run.cluster.backend,
          .threads = threads};
}

namespace {
// The positions that the model was made for, or can be stretched to.
int64_t MaxPositions(const engine::ModelConfig& config) {
  const engine::RopeScaling& scaling = config.rope_scaling;
  const int64_t original = scaling.original_max_position_embeddings > 0
                               ? scaling.original_max_position_embeddings
                               : config.max_position_embeddings;
  const auto stretched = static_cast<double>(original) * scaling.factor;
  return std::max(config.max_position_embeddings, static_cast<int64_t>(stretched));
}

}  // namespace

absl::StatusOr<int64_t> ContextOf(const ModelHostOptions& options,
                                  const engine::ModelConfig& config) {
  if (options.max_sequence_length <= 0) {
    return std::min(options.most_by_default, config.max_position_embeddings);
  }
  if (options.max_sequence_length == 1) {
    return absl::InvalidArgumentError(
        "a context of 1 token has no room for a prompt and a completion: expected at least 2 "
        "(--max-sequence-length, or model.max_sequence_length in the run file)");
  }
  const int64_t most = MaxPositions(config);
  if (options.max_sequence_length <= most) return options.max_sequence_length;
  return absl::InvalidArgumentError(absl::StrCat(
      "the longest sequence is to have ", options.max_sequence_length, " tokens, but the model ",
      options.path, " was made for ", most, ", beyond which it writes nonsense: expected at most ",
      most, " (--max-sequence-length, or model.max_sequence_length in the run file)"));
}

absl::StatusOr<engine::ModelFiles> OpenFiles(const ModelHostOptions& options) {
  ASSIGN_OR_RETURN(auto files, options.scores ? engine::OpenModelOfAnyHead(options.path)
                                              : engine::OpenModel(options.path));
  if (options.scores && !files.config.value_head) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.path,
        ": a model that writes (…ForCausalLM): expected a reward model, which gives a score "
        "(…ForSequenceClassification with one label; `stretto reward-model` makes one)"));
  }
  RETURN_IF_ERROR(BlameFile(engine::CheckShapes(files.config, *files.tensors)));
  return files;
}

namespace {
// Makes what the files' headers and the options decide.
absl::Status MakeDevice(const ModelHostOptions& options, ModelHost* host) {
  ASSIGN_OR_RETURN(const engine::WeightFormat kv_format, engine::ParseKvFormat(options.kv_dtype));
  ASSIGN_OR_RETURN(host->device, engine::CreateDevice({.backend = options.backend,
                                                       .num_threads = options.threads,
                                                       .exact = options.exact}));
  engine::TransformerOptions transformer;
  transformer.dtype = host->dtype;
  transformer.kv_format = kv_format;
  transformer.k_leaves = options.k_leaves;
  ASSIGN_OR_RETURN(transformer.max_sequence_length, ContextOf(options, host->files.config));
  ASSIGN_OR_RETURN(host->transformer,
                   engine::Transformer::Create(*host->device, host->files.config, transformer));
  engine::NumericProfile profile = host->device->Profile(host->dtype);
  profile.weights = host->weight_format;
  profile.kv = kv_format;
  profile.k_leaves = static_cast<int>(options.k_leaves);
  host->profile = ToProto(profile);
  return absl::OkStatus();
}

absl::Status MergeInto(const std::string& adapter, ModelHost* host) {
  auto merged = engine::OpenMergedPeft(*host->device, host->files.config, adapter,
                                       std::move(host->files.tensors));
  if (!merged.ok()) {
    return BlameFile(Annotate(merged.status(), absl::StrCat("adapter ", adapter)));
  }
  host->files.tensors = *std::move(merged);
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<std::unique_ptr<ModelHost>> OpenModelHost(
    const ModelHostOptions& options, const std::function<absl::Status(ModelHost&)>& meanwhile) {
  auto host = std::make_unique<ModelHost>();
  ASSIGN_OR_RETURN(host->dtype, ParseDType(options.dtype));
  ASSIGN_OR_RETURN(host->weight_format, engine::ParseWeightFormat(options.weight_dtype));
  ASSIGN_OR_RETURN(host->files, OpenFiles(options));
  absl::StatusOr<std::unique_ptr<engine::PromptEncoder>> prompts;
  std::thread reader([&] { prompts = engine::PromptEncoder::Open(host->files, options.prompts); });
  absl::Status made = MakeDevice(options, host.get());
  if (made.ok() && !options.adapter.empty()) made = MergeInto(options.adapter, host.get());
  if (made.ok() && meanwhile) made = meanwhile(*host);
  reader.join();
  RETURN_IF_ERROR(prompts.status());
  RETURN_IF_ERROR(made);
  host->prompts = *std::move(prompts);
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

namespace {
// How many of `count` elements of integer type Bits are NaN or infinite: all bits of `exponent`
// set.
template <class Bits, Bits exponent>
int64_t CountNonFinite(const uint8_t* bytes, int64_t count) {
  constexpr int64_t kBlock = 4096;
  std::array<Bits, kBlock> block;
  int64_t num_bad = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    block.fill(0);
    std::memcpy(block.data(), bytes + begin * sizeof(Bits), size * sizeof(Bits));
    Bits largest = 0;
    for (const Bits x : block) largest = std::max(largest, static_cast<Bits>(x & exponent));
    if (largest != exponent) continue;
    num_bad += std::count_if(block.begin(), block.end(),
                             [](Bits x) { return (x & exponent) == exponent; });
  }
  return num_bad;
}

// The tensor's elements in the host's dtype: the mapped file's own bytes where it has them so.
absl::StatusOr<SharedBytes> ReadTensor(const ModelHost& host, const engine::TensorEntry& entry) {
  const engine::TensorInfo* info = host.files.tensors->Find(entry.name);
  SharedBytes bytes;
  if (info != nullptr && host.files.kind == engine::ModelFiles::Kind::kFolder &&
      info->type == engine::ToStorage(host.dtype)) {
    bytes = SharedBytes(host.files.tensors, info->bytes);
  } else {
    engine::Bytes own(static_cast<size_t>(entry.NumBytes()));
    RETURN_IF_ERROR(host.files.tensors->ReadAll(entry.name, host.dtype, own.data()));
    bytes = SharedBytes(std::move(own));
  }
  const uint8_t* data = bytes.span().data();
  const int64_t num_bad = host.dtype == DType::kBF16
                              ? CountNonFinite<int16_t, 0x7f80>(data, entry.NumElements())
                              : CountNonFinite<int32_t, 0x7f800000>(data, entry.NumElements());
  if (num_bad == 0) return bytes;
  return absl::DataLossError(absl::StrCat(host.files.path, ": tensor ", entry.name, " has ",
                                          num_bad, " values that are NaN or infinite"));
}
}  // namespace

absl::StatusOr<std::shared_ptr<const WeightsVersion>> ReadInitialVersion(const ModelHost& host) {
  Manifest manifest = ManifestOf(host);
  std::vector<SharedBytes> tensors(manifest.size());
  std::vector<absl::Status> statuses(manifest.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < manifest.size();) {
      absl::StatusOr<SharedBytes> bytes = ReadTensor(host, manifest[i]);
      statuses[i] = bytes.status();
      if (bytes.ok()) tensors[i] = *std::move(bytes);
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < host.device->num_threads(); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
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
  options.k_leaves = host.transformer->options().k_leaves;
  options.in_memory = [&](const Parameter& parameter) -> std::shared_ptr<const void> {
    const auto found = index.find(parameter.spec.name);
    if (found == index.end() || version.manifest[found->second].dtype != host.dtype) return nullptr;
    return version.tensors[found->second].shared();
  };
  // The first version's bytes are a file's, whose pages are let go.
  options.shares_embedding = version.number > 0;
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
