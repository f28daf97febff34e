#include "engine/model/lora_merged.h"

#include <utility>
#include <vector>

#include "base/status.h"

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

}  // namespace

absl::StatusOr<std::shared_ptr<const TensorSource>> MergeAdapter(
    Device& device, LoraAdapter& adapter, absl::Span<const float> values, const std::string& path,
    std::shared_ptr<const TensorSource> base) {
  DeviceMemory memory;
  ASSIGN_OR_RETURN(const Tensor flat,
                   memory.Make(device, DType::kF32, 1, adapter.layout()->size()));
  const auto stream = device.CreateStream();
  device.Upload(*stream, flat, values.data());
  RETURN_IF_ERROR(adapter.SetValues(*stream, flat));
  auto merged = std::make_shared<MergedTensors>(path, std::move(base));
  RETURN_IF_ERROR(merged->Merge(device, adapter));
  return merged;
}

absl::StatusOr<std::shared_ptr<const TensorSource>> OpenMergedPeft(
    Device& device, const ModelConfig& config, const std::string& folder,
    std::shared_ptr<const TensorSource> base) {
  ASSIGN_OR_RETURN(const PeftAdapter peft, OpenPeft(folder, config));
  ASSIGN_OR_RETURN(const std::unique_ptr<LoraAdapter> adapter,
                   LoraAdapter::Create(device, config, peft.lora, /*max_rows=*/0));
  std::vector<float> values(static_cast<size_t>(adapter->layout()->size()), 0.0f);
  for (const Parameter& p : adapter->layout()->parameters()) {
    RETURN_IF_ERROR(peft.tensors->ReadAll(p.spec.name, DType::kF32, values.data() + p.view.offset));
  }
  return MergeAdapter(device, *adapter, values, folder, std::move(base));
}
}  // namespace stretto::engine
