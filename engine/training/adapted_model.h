// The model of a policy that is a base and a LoRA adapter: one copy of weights in memory, those of
// the policy, or a rank's part of them. The base stays in its file, which is mapped, and is read
// from there whenever the adapter has changed and the weights are merged anew.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/formats/tensor_file.h"
#include "engine/model/lora.h"
#include "engine/model/weights.h"
#include "engine/training/parallel.h"

namespace stretto::engine {
// XXH3-128 over names and values (as f32) of all parameters of a model: which base an adapter
// belongs to, whatever kind of file holds it. InvalidArgument names a tensor with a NaN or
// infinity.
absl::StatusOr<std::string> HashOfBase(const ModelConfig& config, const TensorSource& source);

// Not thread-safe.
class AdaptedModel {
 public:
  // Allocates everything. `device` and `stream` outlive it.
  struct Options {
    DType dtype = DType::kBF16;
    LoraOptions lora;
    int64_t max_rows = 0;
    int num_ranks = 1, rank = 0;  // that divide the weights
    bool packs = true;            // false: a UnitStream packs what passes come to
  };
  static absl::StatusOr<std::unique_ptr<AdaptedModel>> Create(
      Device& device, Stream& stream, const ModelConfig& config,
      std::shared_ptr<const ParameterLayout> layout, const Options& options);

  // `source` passed CheckShapes and outlives the model. The weights are the base's until Merge.
  absl::Status LoadBase(const ModelConfig& config, const TensorSource& source);
  bool has_base() const { return base_ != nullptr; }
  const std::string& base_hash() const { return base_hash_; }
  // The weights of an adapter: f32, flat, kept by the caller.
  absl::Status Merge(const Tensor& adapter_flat);
  // Rows of a parameter of the policy before its weights are rounded.
  absl::Status ReadRowsF32(const Parameter& parameter, int64_t row_begin, int64_t row_end,
                           float* dst);

  LoraAdapter& adapter() { return *adapter_; }
  // Empty where a UnitStream binds what is in it.
  ModelWeights& weights() { return *weights_; }
  // All, or the rank's.
  const Tensor& flat_weights() const { return flat_; }
  const ParameterLayout& layout() const { return *layout_; }
  const ShardMap& map() const { return map_; }
  bool is_whole() const { return map_.num_ranks() == 1; }
  size_t weight_bytes() const { return memory_.bytes(); }
  size_t packed_bytes() const { return packs_ ? weights_->bytes() : 0; }
  size_t adapter_bytes() const { return adapter_->bytes() + merge_memory_.bytes(); }

 private:
  AdaptedModel(Device& device, Stream& stream, std::shared_ptr<const ParameterLayout> layout,
               const Options& options)
      : device_(device),
        stream_(stream),
        layout_(std::move(layout)),
        map_(*layout_, options.num_ranks),
        rank_(options.rank),
        packs_(options.packs) {}
  // What this rank holds of the target.
  absl::Status MergeRuns(const LoraTarget& target);

  Device& device_;
  Stream& stream_;
  std::shared_ptr<const ParameterLayout> layout_;
  const ShardMap map_;
  const int rank_;
  const bool packs_;
  std::unique_ptr<LoraAdapter> adapter_;
  DeviceMemory memory_, merge_memory_;
  Tensor flat_;
  Tensor merged_;  // of divided weights: rows of a matrix, of which the rank keeps its own elements
  std::unique_ptr<ModelWeights> weights_;
  const TensorSource* base_ = nullptr;
  std::string base_hash_;
};
}  // namespace stretto::engine
