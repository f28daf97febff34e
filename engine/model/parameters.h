// Where every parameter of a model lies in one flat run of elements, and under which name Hugging
// Face knows it. Weights that a fused product needs together are adjacent (q, k, v; gate, up; and
// their biases), so that [q; k; v] is a plain view; the groups begin at multiples of
// kParameterAlignment elements. Masters, moments and gradients share the layout.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/device/tensor.h"
#include "engine/formats/model_config.h"

namespace stretto::engine {
inline constexpr int64_t kParameterAlignment = 32;  // elements: 64 bytes of bf16

// A matrix (or a vector: one row) inside the flat run. Absent: rows == 0.
struct ParameterView {
  int64_t offset = 0;  // elements
  int64_t rows = 0, cols = 0;

  explicit operator bool() const { return rows > 0; }
  int64_t size() const { return rows * cols; }
  // The view in a flat buffer: a contiguous tensor of one row, or of any shape of that many
  // elements.
  Tensor In(const Tensor& flat) const;
};

// A parameter as files and other processes know it.
struct Parameter {
  TensorSpec spec;
  ParameterView view;
};

struct LayerParameters {
  ParameterView input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias;
  ParameterView post_attention_norm, gate_up, gate_up_bias, down, down_bias;
};

class ParameterLayout {
 public:
  // `config` is valid (ValidateConfig).
  explicit ParameterLayout(const ModelConfig& config);

  // Elements of the flat run, gaps included; a multiple of kParameterAlignment.
  int64_t size() const { return size_; }
  // In the order of ExpectedTensors: the order of weight synchronisation, hashes and export.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Parameter* Find(absl::string_view name) const;

  ParameterView embedding, final_norm;
  ParameterView lm_head;  // the embedding itself when tied
  std::vector<LayerParameters> layers;

 private:
  void PlaceLayer(const ModelConfig& config, int64_t layer);
  // One group of adjacent matrices of the same width, named in order.
  ParameterView Place(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                      int64_t cols);
  ParameterView PlaceVector(const std::vector<std::string>& names,
                            const std::vector<int64_t>& sizes);

  int64_t size_ = 0;
  absl::flat_hash_map<std::string, ParameterView> placed_;
  std::vector<Parameter> parameters_;
};
}  // namespace stretto::engine
