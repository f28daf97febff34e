// A model's weights on a device in the form that the forward pass reads: packed matrices, norms,
// biases and the embedding table. Immutable while a pass uses them; a generator builds the next
// version beside the current one and swaps, the trainer refreshes its own after each step.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/formats/model_config.h"
#include "engine/formats/tensor_file.h"
#include "engine/model/parameters.h"

namespace stretto::engine {
// Gives the elements of one parameter as `dtype` (kF32 or kBF16), row-major, at `dst`.
using ParameterReader =
    std::function<absl::Status(const Parameter& parameter, DType dtype, void* dst)>;
// Reads from a model file after CheckShapes. `source` outlives the reader.
ParameterReader ReadFrom(const TensorSource& source);

class ModelWeights;

// A leaf's part of a layer (LeafParameters).
struct LeafWeights {
  Tensor qkv_bias, k_bias, v_bias, o_bias, gate_up_bias, down_bias;
  std::shared_ptr<PackedWeight> qkv, k, v, o, gate_up, down;
};

struct LayerWeights {
  Tensor input_norm, qkv_bias, q_norm, k_norm, o_bias;
  Tensor post_attention_norm, gate_up_bias, down_bias;  // absent where the model has none
  // Shared with another version's where no parameter in them changed.
  std::shared_ptr<PackedWeight> qkv, o, gate_up, down;
  std::vector<LeafWeights> leaves;  // in a layout of leaves, instead of the matrices above
  // For inference in several leaves, instead of o and down: their inputs' parts.
  std::vector<std::shared_ptr<PackedWeight>> o_leaves, down_leaves;

  size_t packed_bytes() const;
};

// How inference stores the matrices of layers, and which it takes over from an earlier version.
struct WeightsOptions {
  // int4 stores the LM head as int8: its errors enter the logits as they are.
  WeightFormat format = WeightFormat::kPlain;
  // A version of the same model, dtype and format; null: everything is laid out.
  const ModelWeights* base = nullptr;
  // With `base`: whether a parameter differs from the base's. Matrices in which none does are
  // shared, and their parameters not read.
  std::function<bool(const Parameter& parameter)> changed = nullptr;
  int64_t k_leaves = 1;  // TransformerOptions; the base has as many
  // A parameter's elements in the dtype of computation, row-major, where they lie in host memory
  // already, and what keeps them there; or null. A device that reaches them lays matrices out from
  // them without a copy. With `shares_embedding` its table stays there, as long as the weights
  // live.
  std::function<std::shared_ptr<const void>(const Parameter& parameter)> in_memory = nullptr;
  bool shares_embedding = false;
};

class ModelWeights {
 public:
  // For inference: the flat parameters are not kept. Blocks; needs host and device memory for the
  // largest matrix beside the result. Any thread, with a stream of its own. Fails with the reader's
  // error or ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<ModelWeights>> Load(Device& device, Stream& stream,
                                                            const ModelConfig& config, DType dtype,
                                                            const ParameterReader& reader,
                                                            const WeightsOptions& options = {});
  // CheckShapes, then Load from a model file.
  static absl::StatusOr<std::unique_ptr<ModelWeights>> Load(Device& device, Stream& stream,
                                                            const ModelConfig& config, DType dtype,
                                                            const TensorSource& source,
                                                            const WeightsOptions& options = {});
  // For training: vectors and the embedding are views of `flat` (all parameters, in `layout`),
  // which the caller keeps; matrices are packed copies that Refresh brings up to date.
  static absl::StatusOr<std::unique_ptr<ModelWeights>> View(Device& device, Stream& stream,
                                                            const ParameterLayout& layout,
                                                            const Tensor& flat);
  void Refresh(Device& device, Stream& stream, const ParameterLayout& layout, const Tensor& flat);
  // For training that holds some units at a time (ParameterUnits): weights of `layout` without any,
  // and ways to let a layer, or what is outside of layers, be what `flat` (in coordinates of the
  // whole run) holds of it now. `packed` gives the matrices their memory, made at its first use and
  // laid out anew for each layer after that.
  static std::unique_ptr<ModelWeights> Empty(const ParameterLayout& layout);
  absl::Status BindLayer(Device& device, Stream& stream, const ParameterLayout& layout,
                         int64_t layer, const Tensor& flat, LayerWeights& packed);
  void BindEmbedding(const ParameterLayout& layout, const Tensor& flat);
  void BindFinalNorm(const ParameterLayout& layout, const Tensor& flat);
  absl::Status BindHead(Device& device, Stream& stream, const ParameterLayout& layout,
                        const Tensor& flat);

  DType dtype() const { return embedding.dtype; }
  WeightFormat format() const { return format_; }
  // Of weights for inference.
  int64_t k_leaves() const {
    return std::max<int64_t>(1, static_cast<int64_t>(layers[0].o_leaves.size()));
  }
  // Device memory held, what is shared with other versions included.
  size_t bytes() const;
  size_t head_bytes() const;

  Tensor embedding, final_norm;
  std::vector<LayerWeights> layers;
  std::shared_ptr<PackedWeight> lm_head;
  // In a layout of leaves; lm_head is then absent and `embedding` the first leaf's.
  std::vector<Tensor> embedding_leaves;
  std::vector<std::shared_ptr<PackedWeight>> lm_head_leaves;

 private:
  absl::Status BindAll(Device& device, Stream& stream, const ParameterLayout& layout,
                       const Tensor& flat);

  WeightFormat format_ = WeightFormat::kPlain;
  Buffer storage_;                         // vectors and embedding, for inference
  std::shared_ptr<const void> embedding_;  // where it is shared instead
};
}  // namespace stretto::engine
