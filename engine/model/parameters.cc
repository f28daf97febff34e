#include "engine/model/parameters.h"

#include <numeric>

#include "absl/strings/str_cat.h"

namespace stretto::engine {
namespace {
int64_t NumElements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}
}  // namespace

Tensor ParameterView::In(const Tensor& flat) const {
  STRETTO_CHECK(flat.rows == 1 && rows > 0);
  Tensor t = flat.Cols(offset, size());
  t.rows = rows;
  t.cols = t.row_stride = cols;
  return t;
}

ParameterLayout::ParameterLayout(const ModelConfig& config) {
  const int64_t D = config.hidden_size;
  embedding = Place({"model.embed_tokens.weight"}, {config.vocab_size}, D);
  layers.resize(config.num_layers);
  for (int64_t l = 0; l < config.num_layers; ++l) PlaceLayer(config, l);
  final_norm = PlaceVector({"model.norm.weight"}, {D});
  if (config.value_head) {
    lm_head = Place({"score.weight"}, {1}, D);
  } else {
    lm_head =
        config.tie_word_embeddings ? embedding : Place({"lm_head.weight"}, {config.vocab_size}, D);
  }
  for (TensorSpec& spec : ExpectedTensors(config)) {
    const auto it = placed_.find(spec.name);
    STRETTO_CHECK_MSG(it != placed_.end(), spec.name.c_str());
    STRETTO_CHECK_MSG(NumElements(spec.shape) == it->second.size(), spec.name.c_str());
    parameters_.push_back({std::move(spec), it->second});
  }
  STRETTO_CHECK(parameters_.size() == placed_.size());
}

void ParameterLayout::PlaceLayer(const ModelConfig& config, int64_t layer) {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  const int64_t D = config.hidden_size, F = config.intermediate_size, C = config.head_dim;
  const int64_t q_rows = config.num_heads * C, kv_rows = config.num_kv_heads * C;
  LayerParameters& p = layers[layer];
  p.input_norm = PlaceVector({prefix + "input_layernorm.weight"}, {D});
  const std::vector<int64_t> qkv_rows = {q_rows, kv_rows, kv_rows};
  p.qkv =
      Place({attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"},
            qkv_rows, D);
  if (config.attention_bias_qkv) {
    p.qkv_bias = PlaceVector(
        {attention + "q_proj.bias", attention + "k_proj.bias", attention + "v_proj.bias"},
        qkv_rows);
  }
  if (config.qk_norm) {
    p.q_norm = PlaceVector({attention + "q_norm.weight"}, {C});
    p.k_norm = PlaceVector({attention + "k_norm.weight"}, {C});
  }
  p.o = Place({attention + "o_proj.weight"}, {D}, q_rows);
  if (config.attention_bias_o) p.o_bias = PlaceVector({attention + "o_proj.bias"}, {D});
  p.post_attention_norm = PlaceVector({prefix + "post_attention_layernorm.weight"}, {D});
  p.gate_up = Place({mlp + "gate_proj.weight", mlp + "up_proj.weight"}, {F, F}, D);
  p.down = Place({mlp + "down_proj.weight"}, {D}, F);
  if (config.mlp_bias) {
    p.gate_up_bias = PlaceVector({mlp + "gate_proj.bias", mlp + "up_proj.bias"}, {F, F});
    p.down_bias = PlaceVector({mlp + "down_proj.bias"}, {D});
  }
}

ParameterView ParameterLayout::Place(const std::vector<std::string>& names,
                                     const std::vector<int64_t>& rows, int64_t cols) {
  ParameterView group{size_, 0, cols};
  for (size_t i = 0; i < names.size(); ++i) {
    placed_[names[i]] = {group.offset + group.size(), rows[i], cols};
    group.rows += rows[i];
  }
  const int64_t aligned = (group.size() + kParameterAlignment - 1) / kParameterAlignment;
  size_ += aligned * kParameterAlignment;
  return group;
}

ParameterView ParameterLayout::PlaceVector(const std::vector<std::string>& names,
                                           const std::vector<int64_t>& sizes) {
  const ParameterView column = Place(names, sizes, 1);
  for (const std::string& name : names) {
    ParameterView& view = placed_[name];
    view = {view.offset, 1, view.rows};
  }
  return {column.offset, 1, column.rows};
}

const Parameter* ParameterLayout::Find(absl::string_view name) const {
  for (const Parameter& p : parameters_) {
    if (p.spec.name == name) return &p;
  }
  return nullptr;
}
}  // namespace stretto::engine
