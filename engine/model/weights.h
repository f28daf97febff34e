// A model's weights on a device in the form that the forward pass reads: packed matrices, norms,
// biases and the embedding table. Immutable while a pass uses them; a generator builds the next
// version beside the current one and swaps, the trainer refreshes its own after each step.
#pragma once

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

struct LayerWeights {
  Tensor input_norm, qkv_bias, q_norm, k_norm, o_bias;
  Tensor post_attention_norm, gate_up_bias, down_bias;  // absent where the model has none
  std::unique_ptr<PackedWeight> qkv, o, gate_up, down;
};

class ModelWeights {
 public:
  // For inference: the flat parameters are not kept. Blocks; needs host and device memory for the
  // largest matrix beside the result. Any thread, with a stream of its own. Fails with the reader's
  // error or ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<ModelWeights>> Load(Device& device, Stream& stream,
                                                            const ModelConfig& config, DType dtype,
                                                            const ParameterReader& reader);
  // CheckShapes, then Load from a model file.
  static absl::StatusOr<std::unique_ptr<ModelWeights>> Load(Device& device, Stream& stream,
                                                            const ModelConfig& config, DType dtype,
                                                            const TensorSource& source);
  // For training: vectors and the embedding are views of `flat` (all parameters, in `layout`),
  // which the caller keeps; matrices are packed copies that Refresh brings up to date.
  static absl::StatusOr<std::unique_ptr<ModelWeights>> View(Device& device, Stream& stream,
                                                            const ParameterLayout& layout,
                                                            const Tensor& flat);
  void Refresh(Device& device, Stream& stream, const ParameterLayout& layout, const Tensor& flat);

  DType dtype() const { return embedding.dtype; }
  // Device memory held.
  size_t bytes() const;

  Tensor embedding, final_norm;
  std::vector<LayerWeights> layers;
  std::unique_ptr<PackedWeight> lm_head;

 private:
  Buffer storage_;  // vectors and embedding, for inference
};
}  // namespace stretto::engine
