#include "engine/training/critic.h"

#include <algorithm>

namespace stretto::engine {
namespace {
constexpr char kHead[] = "score.weight";

class TensorsOfCritic final : public TensorSource {
 public:
  TensorsOfCritic(std::shared_ptr<const TensorSource> model, int64_t hidden_size)
      : model_(std::move(model)) {
    for (const TensorInfo& tensor : model_->tensors()) {
      if (tensor.name != "lm_head.weight") tensors_.push_back(tensor);
    }
    if (model_->Find(kHead) != nullptr) return;
    zeros_.assign(static_cast<size_t>(hidden_size), 0.0f);
    tensors_.push_back(
        {kHead,
         StorageType::kF32,
         {1, hidden_size},
         {reinterpret_cast<const uint8_t*>(zeros_.data()), zeros_.size() * sizeof(float)}});
    std::sort(tensors_.begin(), tensors_.end(),
              [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  }
  const std::string& path() const override { return model_->path(); }
  absl::Span<const TensorInfo> tensors() const override { return tensors_; }
  absl::Span<const uint8_t> RowBytes(const TensorInfo& tensor, int64_t row) const override {
    const TensorInfo* of_model = model_->Find(tensor.name);
    return of_model != nullptr ? model_->RowBytes(*of_model, row)
                               : TensorSource::RowBytes(tensor, row);
  }

 private:
  std::shared_ptr<const TensorSource> model_;
  std::vector<TensorInfo> tensors_;
  std::vector<float> zeros_;
};
}  // namespace

std::shared_ptr<const TensorSource> CriticTensors(std::shared_ptr<const TensorSource> model,
                                                  int64_t hidden_size) {
  return std::make_shared<TensorsOfCritic>(std::move(model), hidden_size);
}
}  // namespace stretto::engine
