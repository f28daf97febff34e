#include "engine/training/checkpoint_adapter.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/training/checkpoint_reader.h"

namespace stretto::engine {
namespace {
// A base's tensors, with those that are adapted in memory.
class MergedTensors final : public TensorSource {
 public:
  MergedTensors(std::string path, std::shared_ptr<const TensorSource> base)
      : path_(std::move(path)),
        base_(std::move(base)),
        tensors_(base_->tensors().begin(), base_->tensors().end()) {}

  absl::Status Merge(Device& device, LoraAdapter& adapter) {
    const auto stream = device.CreateStream();
    for (TensorInfo& info : tensors_) {
      const LoraTarget* target = adapter.Find(info.name);
      if (target == nullptr) continue;
      DeviceMemory memory;
      ASSIGN_OR_RETURN(const Tensor merged,
                       memory.Make(device, DType::kF32, target->weight.rows, target->weight.cols));
      RETURN_IF_ERROR(adapter.Merge(*stream, *target, *base_, 0, merged));
      std::vector<float>& kept = merged_.emplace_back(static_cast<size_t>(merged.size()));
      device.Download(*stream, merged, kept.data());
      info.type = StorageType::kF32;
      info.bytes = {reinterpret_cast<const uint8_t*>(kept.data()), kept.size() * sizeof(float)};
    }
    return absl::OkStatus();
  }
  const std::string& path() const override { return path_; }
  absl::Span<const TensorInfo> tensors() const override { return tensors_; }
  absl::Span<const uint8_t> RowBytes(const TensorInfo& tensor, int64_t row) const override {
    const TensorInfo* of_base = base_->Find(tensor.name);
    if (of_base->bytes.data() == tensor.bytes.data()) return base_->RowBytes(*of_base, row);
    return TensorSource::RowBytes(tensor, row);
  }

 private:
  std::string path_;
  std::shared_ptr<const TensorSource> base_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::vector<float>> merged_;
};

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
  DeviceMemory memory;
  ASSIGN_OR_RETURN(const Tensor flat,
                   memory.Make(device, DType::kF32, 1, merger->layout()->size()));
  const auto stream = device.CreateStream();
  device.Upload(*stream, flat, values.data());
  RETURN_IF_ERROR(merger->SetValues(*stream, flat));
  auto merged = std::make_shared<MergedTensors>(path, std::move(base));
  RETURN_IF_ERROR(merged->Merge(device, *merger));
  return merged;
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
