#include "engine/model/leaf_layout.h"

#include "absl/strings/str_cat.h"

namespace stretto::engine {
LeafSlice SliceOf(const ModelConfig& config, int64_t num_leaves, int64_t leaf) {
  STRETTO_CHECK(config.num_heads % num_leaves == 0 && leaf >= 0 && leaf < num_leaves);
  const auto begin = [&](int64_t total, int64_t i) { return LeafBegin(total, num_leaves, i); };
  LeafSlice s;
  s.num_heads = config.num_heads / num_leaves;
  s.head_begin = leaf * s.num_heads;
  const int64_t heads_per_kv = config.num_heads / config.num_kv_heads;
  s.kv_begin = s.head_begin / heads_per_kv;
  s.num_kv_heads = (s.head_begin + s.num_heads - 1) / heads_per_kv + 1 - s.kv_begin;
  s.mlp_begin = begin(config.intermediate_size, leaf);
  s.mlp_cols = begin(config.intermediate_size, leaf + 1) - s.mlp_begin;
  s.vocab_begin = begin(config.vocab_size, leaf);
  s.vocab_rows = begin(config.vocab_size, leaf + 1) - s.vocab_begin;
  return s;
}

bool LeavesShareKv(const ModelConfig& config, int64_t num_leaves) {
  return config.num_kv_heads % num_leaves != 0;
}

absl::Status CheckLeaves(const std::string& who, const ModelConfig& config, int64_t num_leaves) {
  const auto refuse = [&](absl::string_view what, int64_t count) {
    return absl::InvalidArgumentError(absl::StrCat(who, ": the model's ", count, " ", what,
                                                   " don't divide into k_leaves = ", num_leaves));
  };
  if (num_leaves < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, ": k_leaves must be at least 1, not ", num_leaves));
  }
  if (config.num_heads % num_leaves != 0) return refuse("query heads", config.num_heads);
  if (config.intermediate_size < num_leaves) return refuse("MLP columns", config.intermediate_size);
  if (config.vocab_size < num_leaves) return refuse("tokens of vocabulary", config.vocab_size);
  return absl::OkStatus();
}

// Places the pieces of one layout.
class LeafPlacer {
 public:
  LeafPlacer(const ModelConfig& config, const LeafRange& leaves, ParameterLayout& out)
      : config_(config), leaves_(leaves), whole_(config), out_(out) {
    const auto& parameters = whole_.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) index_[parameters[i].spec.name] = i;
  }

  void PlaceAll() {
    out_.common_sizes_.push_back(0);
    for (int64_t leaf = leaves_.begin; leaf < leaves_.end; ++leaf) {
      out_.embedding_leaves.push_back(PlaceVocabulary("model.embed_tokens.weight", leaf));
    }
    out_.embedding = out_.embedding_leaves[0];
    out_.layers.resize(config_.num_layers);
    for (int64_t l = 0; l < config_.num_layers; ++l) PlaceLayer(l);
    const int64_t begin = out_.size_;
    out_.final_norm = Place(-1, {Whole("model.norm.weight")});
    if (config_.value_head) out_.lm_head = Place(-1, {Whole("score.weight")});
    EndCommon(begin);
    if (config_.value_head) return;
    out_.lm_head_leaves = out_.embedding_leaves;
    if (!config_.tie_word_embeddings) {
      for (int64_t i = 0; i < leaves_.size(); ++i) {
        out_.lm_head_leaves[i] = PlaceVocabulary("lm_head.weight", leaves_.begin + i);
      }
    }
    out_.lm_head = out_.lm_head_leaves[0];
  }

 private:
  // A rectangle of a parameter; of a vector, columns of its one row.
  struct Piece {
    std::string name;
    int64_t row = 0, rows = 0, col = 0, cols = 0;
  };

  const ParameterView& ViewOf(const std::string& name) const {
    return whole_.parameters()[index_.at(name)].view;
  }
  bool IsVector(const std::string& name) const {
    return whole_.parameters()[index_.at(name)].spec.shape.size() == 1;
  }
  Piece Whole(const std::string& name) const {
    return {name, 0, ViewOf(name).rows, 0, ViewOf(name).cols};
  }
  // Outputs [begin, begin + count): rows of a matrix, elements of a bias.
  Piece Outputs(const std::string& name, int64_t begin, int64_t count) const {
    if (IsVector(name)) return {name, 0, 1, begin, count};
    return {name, begin, count, 0, ViewOf(name).cols};
  }
  Piece Inputs(const std::string& name, int64_t begin, int64_t count) const {
    return {name, 0, ViewOf(name).rows, begin, count};
  }

  // Adjacent pieces of one width, or vectors.
  ParameterView Place(int64_t leaf, const std::vector<Piece>& pieces) {
    const bool vectors = IsVector(pieces[0].name);
    ParameterView group{out_.size_, vectors ? 1 : 0, vectors ? 0 : pieces[0].cols};
    for (const Piece& p : pieces) {
      const size_t index = index_.at(p.name);
      TensorSpec spec = whole_.parameters()[index].spec;
      spec.shape = vectors ? std::vector<int64_t>{p.cols} : std::vector<int64_t>{p.rows, p.cols};
      out_.parameters_.push_back({std::move(spec), {group.offset + group.size(), p.rows, p.cols}});
      out_.origins_.push_back({index, leaf, p.row, p.col});
      (vectors ? group.cols : group.rows) += vectors ? p.cols : p.rows;
    }
    Align(group.offset + group.size(), kParameterAlignment);
    return group;
  }
  void Align(int64_t end, int64_t alignment) {
    out_.size_ = (end + alignment - 1) / alignment * alignment;
  }
  void EndCommon(int64_t begin) {
    Align(out_.size_, kLeafAlignment);
    out_.common_sizes_.push_back(out_.size_ - begin);
  }

  ParameterView PlaceVocabulary(const std::string& name, int64_t leaf) {
    const LeafSlice s = SliceOf(config_, leaves_.num_leaves, leaf);
    const ParameterView view = Place(leaf, {Outputs(name, s.vocab_begin, s.vocab_rows)});
    Align(out_.size_, kLeafAlignment);
    return view;
  }

  void PlaceLayer(int64_t layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    const std::string attention = prefix + "self_attn.";
    const int64_t begin = out_.size_;
    LayerParameters& p = out_.layers[layer];
    p.input_norm = Place(-1, {Whole(prefix + "input_layernorm.weight")});
    p.post_attention_norm = Place(-1, {Whole(prefix + "post_attention_layernorm.weight")});
    if (config_.qk_norm) {
      p.q_norm = Place(-1, {Whole(attention + "q_norm.weight")});
      p.k_norm = Place(-1, {Whole(attention + "k_norm.weight")});
    }
    LeafParameters shared;
    const bool shares = LeavesShareKv(config_, leaves_.num_leaves);
    if (shares) {
      shared.k = Place(-1, {Whole(attention + "k_proj.weight")});
      shared.v = Place(-1, {Whole(attention + "v_proj.weight")});
      if (config_.attention_bias_qkv) {
        shared.k_bias = Place(-1, {Whole(attention + "k_proj.bias")});
        shared.v_bias = Place(-1, {Whole(attention + "v_proj.bias")});
      }
    }
    EndCommon(begin);
    for (int64_t leaf = leaves_.begin; leaf < leaves_.end; ++leaf) {
      p.leaves.push_back(PlaceLeaf(prefix, leaf, shares ? &shared : nullptr));
    }
  }

  LeafParameters PlaceLeaf(const std::string& prefix, int64_t leaf, const LeafParameters* shared) {
    const LeafSlice s = SliceOf(config_, leaves_.num_leaves, leaf);
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    const int64_t C = config_.head_dim;
    const auto qkv = [&](const char* kind) {
      std::vector<Piece> pieces = {
          Outputs(absl::StrCat(attention, "q_proj.", kind), s.head_begin * C, s.num_heads * C)};
      if (shared != nullptr) return pieces;
      for (const char* name : {"k_proj.", "v_proj."}) {
        pieces.push_back(
            Outputs(absl::StrCat(attention, name, kind), s.kv_begin * C, s.num_kv_heads * C));
      }
      return pieces;
    };
    const auto gate_up = [&](const char* kind) -> std::vector<Piece> {
      return {Outputs(absl::StrCat(mlp, "gate_proj.", kind), s.mlp_begin, s.mlp_cols),
              Outputs(absl::StrCat(mlp, "up_proj.", kind), s.mlp_begin, s.mlp_cols)};
    };
    LeafParameters p;
    if (shared != nullptr) p = KvOf(*shared, s);
    p.qkv = Place(leaf, qkv("weight"));
    if (config_.attention_bias_qkv) p.qkv_bias = Place(leaf, qkv("bias"));
    p.o = Place(leaf, {Inputs(attention + "o_proj.weight", s.head_begin * C, s.num_heads * C)});
    if (config_.attention_bias_o && leaf == 0) {
      p.o_bias = Place(leaf, {Whole(attention + "o_proj.bias")});
    }
    p.gate_up = Place(leaf, gate_up("weight"));
    p.down = Place(leaf, {Inputs(mlp + "down_proj.weight", s.mlp_begin, s.mlp_cols)});
    if (config_.mlp_bias) {
      p.gate_up_bias = Place(leaf, gate_up("bias"));
      if (leaf == 0) p.down_bias = Place(leaf, {Whole(mlp + "down_proj.bias")});
    }
    Align(out_.size_, kLeafAlignment);
    return p;
  }

  // The rows of the heads that a leaf attends to.
  LeafParameters KvOf(const LeafParameters& shared, const LeafSlice& s) const {
    const int64_t first = s.kv_begin * config_.head_dim, count = s.num_kv_heads * config_.head_dim;
    LeafParameters p;
    p.k = {shared.k.offset + first * shared.k.cols, count, shared.k.cols};
    p.v = {shared.v.offset + first * shared.v.cols, count, shared.v.cols};
    if (shared.k_bias) {
      p.k_bias = {shared.k_bias.offset + first, 1, count};
      p.v_bias = {shared.v_bias.offset + first, 1, count};
    }
    return p;
  }

  const ModelConfig& config_;
  const LeafRange leaves_;
  const ParameterLayout whole_;
  ParameterLayout& out_;
  absl::flat_hash_map<std::string, size_t> index_;
};

ParameterLayout::ParameterLayout(const ModelConfig& config, const LeafRange& leaves)
    : leaves_(leaves) {
  STRETTO_CHECK(leaves.num_leaves > 1 && leaves.begin >= 0 && leaves.end <= leaves.num_leaves);
  STRETTO_CHECK(leaves.begin < leaves.end);
  LeafPlacer(config, leaves, *this).PlaceAll();
}
}  // namespace stretto::engine
