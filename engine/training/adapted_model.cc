#include "engine/training/adapted_model.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/model_files.h"
#include "engine/training/tree_hash.h"

namespace stretto::engine {
absl::StatusOr<std::string> HashOfBase(const ModelConfig& config, const TensorSource& source) {
  TreeHash tree;
  std::vector<float> values;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    const TensorInfo* info = source.Find(spec.name);
    if (info == nullptr) {
      return absl::NotFoundError(absl::StrCat(source.path(), ": there is no tensor ", spec.name));
    }
    values.resize(static_cast<size_t>(NumElements(*info)));
    RETURN_IF_ERROR(source.ReadAll(spec.name, DType::kF32, values.data()));
    if (!std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); })) {
      return absl::InvalidArgumentError(
          absl::StrCat(source.path(), ": tensor ", spec.name, " holds a NaN or infinity"));
    }
    tree.Add(spec.name, HashBytes({reinterpret_cast<const uint8_t*>(values.data()),
                                   values.size() * sizeof(float)}));
  }
  return tree.Finish();
}

absl::StatusOr<std::unique_ptr<AdaptedModel>> AdaptedModel::Create(
    Device& device, Stream& stream, const ModelConfig& config,
    std::shared_ptr<const ParameterLayout> layout, const Options& options) {
  std::unique_ptr<AdaptedModel> model(new AdaptedModel(device, stream, std::move(layout), options));
  ASSIGN_OR_RETURN(model->adapter_,
                   LoraAdapter::Create(device, config, options.lora, options.max_rows));
  const int64_t held = std::max<int64_t>(1, model->map_.owned(options.rank));
  ASSIGN_OR_RETURN(model->flat_, model->memory_.Make(device, options.dtype, 1, held));
  device.Fill(stream, model->flat_, 0.0f);
  if (!model->is_whole()) {
    const int64_t rows = LoraMergeElements(model->adapter_->layout()->parameters());
    ASSIGN_OR_RETURN(model->merged_, model->merge_memory_.Make(device, options.dtype, 1, rows));
  }
  if (!options.packs) {
    model->weights_ = ModelWeights::Empty(*model->layout_);
    return model;
  }
  ASSIGN_OR_RETURN(model->weights_,
                   ModelWeights::View(device, stream, *model->layout_, model->flat_));
  return model;
}

absl::Status AdaptedModel::LoadBase(const ModelConfig& config, const TensorSource& source) {
  if (base_ == &source) return absl::OkStatus();
  ASSIGN_OR_RETURN(base_hash_, HashOfBase(config, source));
  base_ = &source;
  std::vector<uint8_t> host;
  for (const Parameter& p : layout_->parameters()) {
    host.resize(static_cast<size_t>(p.view.size()) * SizeOf(flat_.dtype));
    RETURN_IF_ERROR(source.ReadAll(p.spec.name, flat_.dtype, host.data()));
    for (const ShardMap::Run& run :
         map_.RunsOf(rank_, p.view.offset, p.view.offset + p.view.size())) {
      const auto from = static_cast<size_t>(run.begin - p.view.offset) * SizeOf(flat_.dtype);
      device_.Upload(stream_, flat_.Cols(run.local, run.count), host.data() + from);
    }
  }
  if (packs_) weights_->Refresh(device_, stream_, *layout_, flat_);
  device_.Synchronize(stream_);
  return absl::OkStatus();
}

absl::Status AdaptedModel::Merge(const Tensor& adapter_flat) {
  STRETTO_CHECK(has_base());
  RETURN_IF_ERROR(adapter_->SetValues(stream_, adapter_flat));
  for (size_t l = 0; l < layout_->layers.size(); ++l) {
    const auto layer = static_cast<int64_t>(l);
    for (const LoraGroup group :
         {LoraGroup::kQkv, LoraGroup::kO, LoraGroup::kGateUp, LoraGroup::kDown}) {
      for (const LoraTarget& target : adapter_->targets(layer, group)) {
        RETURN_IF_ERROR(is_whole()
                            ? adapter_->Merge(stream_, target, *base_, 0, target.weight.In(flat_))
                            : MergeRuns(target));
      }
    }
    if (!packs_) continue;
    RETURN_IF_ERROR(
        weights_->BindLayer(device_, stream_, *layout_, layer, flat_, weights_->layers[l]));
  }
  device_.Synchronize(stream_);
  return absl::OkStatus();
}

absl::Status AdaptedModel::MergeRuns(const LoraTarget& target) {
  const int64_t first = target.weight.offset, K = target.weight.cols;
  for (const ShardMap::Run& run : map_.RunsOf(rank_, first, first + target.weight.size())) {
    const int64_t begin = run.begin - first, end = begin + run.count;  // in the matrix
    const int64_t last_row = (end + K - 1) / K, rows_at_once = merged_.cols / K;
    for (int64_t row = begin / K; row < last_row; row += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, last_row - row);
      const Tensor merged = merged_.Cols(0, rows * K).Reshape(rows);
      RETURN_IF_ERROR(adapter_->Merge(stream_, target, *base_, row, merged));
      const int64_t from = std::max(begin, row * K), to = std::min(end, (row + rows) * K);
      device_.Copy(stream_, flat_.Cols(run.local + from - begin, to - from),
                   merged_.Cols(from - row * K, to - from));
    }
  }
  return absl::OkStatus();
}

absl::Status AdaptedModel::ReadRowsF32(const Parameter& parameter, int64_t row_begin,
                                       int64_t row_end, float* dst) {
  STRETTO_CHECK(has_base());
  const LoraTarget* target = adapter_->Find(parameter.spec.name);
  if (target == nullptr || row_begin == row_end) {
    return base_->ReadRows(parameter.spec.name, row_begin, row_end, DType::kF32, dst);
  }
  DeviceMemory memory;
  ASSIGN_OR_RETURN(const Tensor merged,
                   memory.Make(device_, DType::kF32, row_end - row_begin, target->weight.cols));
  RETURN_IF_ERROR(adapter_->Merge(stream_, *target, *base_, row_begin, merged));
  device_.Download(stream_, merged, dst);
  return absl::OkStatus();
}
}  // namespace stretto::engine
