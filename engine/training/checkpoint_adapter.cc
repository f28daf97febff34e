#include "engine/training/checkpoint_adapter.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/model/lora_merged.h"
#include "engine/training/checkpoint_reader.h"

namespace stretto::engine {
namespace {
// All of an adapter's values in its layout.
absl::StatusOr<std::vector<float>> ReadValues(CheckpointReader& reader,
                                              const ParameterLayout& layout) {
  std::vector<float> values(static_cast<size_t>(layout.size()), 0.0f);
  for (const Parameter& p : layout.parameters()) {
    ASSIGN_OR_RETURN(const auto read, reader.Read(StateTensor::kMaster, p.spec.name, p.spec.shape));
    std::copy(read.begin(), read.end(), values.begin() + p.view.offset);
  }
  return values;
}
}  // namespace

absl::StatusOr<std::shared_ptr<const TensorSource>> OpenPolicy(
    Files& files, const std::string& path, Device& device, const ModelConfig& config,
    std::shared_ptr<const TensorSource> base) {
  ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                   CheckpointReader::Open(files, path));
  const absl::optional<CheckpointAdapter> adapter = reader->manifest().info.adapter;
  if (!adapter.has_value()) return OpenMasters(files, path);
  ASSIGN_OR_RETURN(const std::string base_hash, HashOfBase(config, *base));
  if (base_hash != adapter->base_hash) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": its adapter belongs to another base (",
                                                   adapter->base_hash, "); ", base->path(), " is ",
                                                   base_hash));
  }
  LoraOptions lora = adapter->lora;
  RETURN_IF_ERROR(Annotate(NormalizeLora(config, lora), path));
  ASSIGN_OR_RETURN(const std::unique_ptr<LoraAdapter> merger,
                   LoraAdapter::Create(device, config, lora, /*max_rows=*/0));
  ASSIGN_OR_RETURN(const std::vector<float> values, ReadValues(*reader, *merger->layout()));
  return MergeAdapter(device, *merger, values, path, std::move(base));
}

absl::Status ExportCheckpointAdapter(Files& files, const std::string& path,
                                     const ModelConfig& config, const PeftExport& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                   CheckpointReader::Open(files, path));
  const absl::optional<CheckpointAdapter>& adapter = reader->manifest().info.adapter;
  if (!adapter.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": all weights were trained; there is no adapter (lora.rank was 0)"));
  }
  return ExportPeft(files, options, config, adapter->lora,
                    [&](const TensorSpec& spec, float* dst) -> absl::Status {
                      ASSIGN_OR_RETURN(const auto values,
                                       reader->Read(StateTensor::kMaster, spec.name, spec.shape));
                      std::copy(values.begin(), values.end(), dst);
                      return absl::OkStatus();
                    });
}

absl::Status ExportEngineAdapter(Files& files, TrainerEngine& engine, const PeftExport& options) {
  if (!engine.options().lora) {
    return absl::FailedPreconditionError("all weights are trained; there is no adapter");
  }
  std::vector<float> values(static_cast<size_t>(engine.trained_layout().size()));
  for (const Parameter& p : engine.trained_layout().parameters()) {
    RETURN_IF_ERROR(engine.DownloadState(StateTensor::kMaster, p, &values[p.view.offset]));
  }
  if (options.path.empty()) return absl::OkStatus();
  return ExportPeft(files, options, engine.config(), engine.options().lora,
                    [&](const TensorSpec& spec, float* dst) {
                      const Parameter* p = engine.trained_layout().Find(spec.name);
                      std::copy_n(values.begin() + p->view.offset, p->view.size(), dst);
                      return absl::OkStatus();
                    });
}
}  // namespace stretto::engine
