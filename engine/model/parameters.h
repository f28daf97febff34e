// Where every parameter of a model lies in one flat run of elements, and under which name Hugging
// Face knows it. Weights that a fused product needs together are adjacent (q, k, v; gate, up; and
// their biases), so that [q; k; v] is a plain view; the groups begin at multiples of
// kParameterAlignment elements. Masters, moments and gradients share the layout.
//
// A layout of leaves (leaf_layout.h) holds a part of the model instead: its parameters are pieces
// of the model's, grouped by leaf.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/device/tensor.h"
#include "engine/formats/model_config.h"

namespace stretto::engine {
struct LoraOptions;
inline constexpr int64_t kParameterAlignment = 32;  // elements: 64 bytes of bf16
inline constexpr int64_t kLeafAlignment = 4096;     // elements: the blocks that ranks own

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

// A leaf's part of a layer. Biases that are added to a sum over leaves belong to leaf 0.
struct LeafParameters {
  ParameterView qkv, qkv_bias;  // where the leaf has key/value heads of its own; else q alone
  ParameterView k, v, k_bias, v_bias;  // else: rows of what all leaves share
  ParameterView o, o_bias, gate_up, gate_up_bias, down, down_bias;
};

struct LayerParameters {
  ParameterView input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias;
  ParameterView post_attention_norm, gate_up, gate_up_bias, down, down_bias;
  std::vector<LeafParameters> leaves;  // in a layout of leaves, instead of the matrices above
};

// Leaves [begin, end) of a model that is divided into num_leaves.
struct LeafRange {
  int64_t num_leaves = 1, begin = 0, end = 1;

  int64_t size() const { return end - begin; }
};

// Where a piece lies in the model's parameter.
struct PieceOrigin {
  size_t parameter = 0;      // in parameters() of the whole layout
  int64_t leaf = -1;         // −1: what all leaves share
  int64_t row = 0, col = 0;  // of its first element
};

class ParameterLayout {
 public:
  // `config` is valid (ValidateConfig).
  explicit ParameterLayout(const ModelConfig& config);
  // The pieces of these leaves (at least two in all). Units (embedding, each layer, head) follow
  // one another; a unit is what all leaves share, then leaf after leaf, each filled up with zeros
  // to a multiple of kLeafAlignment elements.
  ParameterLayout(const ModelConfig& config, const LeafRange& leaves);
  // Of an adapter instead of the model (lora.h): its units are the layers alone, and of all views
  // only the offsets of norms mean something, which say where units begin.
  ParameterLayout(const ModelConfig& config, const LoraOptions& lora);

  // Elements of the flat run, gaps included; a multiple of kParameterAlignment.
  int64_t size() const { return size_; }
  // In the order of ExpectedTensors: the order of weight synchronisation, hashes and export.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Parameter* Find(absl::string_view name) const;

  ParameterView embedding, final_norm;
  ParameterView lm_head;  // the embedding itself when tied; of a critic the value head
  std::vector<LayerParameters> layers;

  // Of a layout of leaves; embedding and lm_head are then the first leaf's.
  bool has_leaves() const { return leaves_.num_leaves > 1; }
  const LeafRange& leaves() const { return leaves_; }
  std::vector<ParameterView> embedding_leaves, lm_head_leaves;
  const std::vector<PieceOrigin>& origins() const { return origins_; }  // one a parameter
  // Elements at a unit's beginning that all leaves share.
  int64_t common_size(int64_t unit) const { return common_sizes_[unit]; }

 private:
  friend class LeafPlacer;
  void PlaceLayer(const ModelConfig& config, int64_t layer);
  // One group of adjacent matrices of the same width, named in order.
  ParameterView Place(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                      int64_t cols);
  ParameterView PlaceVector(const std::vector<std::string>& names,
                            const std::vector<int64_t>& sizes);

  int64_t size_ = 0;
  absl::flat_hash_map<std::string, ParameterView> placed_;
  std::vector<Parameter> parameters_;
  LeafRange leaves_;
  std::vector<PieceOrigin> origins_;
  std::vector<int64_t> common_sizes_;
};
}  // namespace stretto::engine
