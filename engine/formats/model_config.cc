#include "engine/formats/model_config.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/config_limits.h"

namespace stretto::engine {
namespace {
// Collects the first violated rule.
class Rules {
 public:
  explicit Rules(const std::string& where) : where_(where) {}
  void Range(absl::string_view field, int64_t value, int64_t min, int64_t max) {
    Require(value >= min && value <= max, field, value, absl::StrCat("from ", min, " to ", max));
  }
  void Range(absl::string_view field, double value, double min, double max) {
    Require(value >= min && value <= max, field, value, absl::StrCat("from ", min, " to ", max));
  }
  template <class T>
  void Require(bool holds, absl::string_view field, const T& value, absl::string_view expected) {
    if (holds || !status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat(where_, ": ", field, " is ", value, ", expected ", expected));
  }
  absl::Status status() const { return status_; }

 private:
  const std::string& where_;
  absl::Status status_;
};

void CheckSizes(const ModelConfig& c, Rules& rules) {
  rules.Range("vocab_size", c.vocab_size, 1, kMaxVocabSize);
  rules.Range("hidden_size", c.hidden_size, 1, kMaxHiddenSize);
  rules.Range("intermediate_size", c.intermediate_size, 1, kMaxIntermediateSize);
  rules.Range("num_hidden_layers", c.num_layers, 1, kMaxLayers);
  rules.Range("num_attention_heads", c.num_heads, 1, kMaxHeads);
  rules.Range("num_key_value_heads", c.num_kv_heads, 1, kMaxHeads);
  rules.Range("head_dim", c.head_dim, 2, kMaxHeadDim);
  rules.Range("max_position_embeddings", c.max_position_embeddings, 1, kMaxPositions);
  rules.Range("sliding_window", c.sliding_window, 0, kMaxPositions);
  rules.Range("rms_norm_eps", c.rms_norm_eps, 0.0, 1.0);
  rules.Range("rope_theta", c.rope_theta, 1.0, 1e15);
  rules.Require(c.head_dim % 2 == 0, "head_dim", c.head_dim, "an even number (RoPE turns pairs)");
  rules.Require(c.num_kv_heads > 0 && c.num_heads % c.num_kv_heads == 0, "num_key_value_heads",
                c.num_kv_heads, absl::StrCat("a divisor of num_attention_heads ", c.num_heads));
}

void CheckRope(const ModelConfig& c, Rules& rules) {
  const RopeScaling& rope = c.rope_scaling;
  using Type = RopeScaling::Type;
  if (rope.type == Type::kFactors) {
    rules.Require(static_cast<int64_t>(rope.frequency_factors.size()) == c.head_dim / 2,
                  "number of RoPE frequency factors", rope.frequency_factors.size(),
                  absl::StrCat("head_dim / 2 = ", c.head_dim / 2));
    for (const float factor : rope.frequency_factors) {
      rules.Range("RoPE frequency factor", double{factor}, 1e-6, 1e6);
    }
    return;
  }
  if (rope.type == Type::kNone) return;
  rules.Range("rope_scaling.factor", rope.factor, 1.0, 1e6);
  if (rope.type == Type::kLinear) return;
  rules.Range("rope_scaling.original_max_position_embeddings",
              rope.original_max_position_embeddings, 1, kMaxPositions);
  if (rope.type == Type::kLlama3) {
    rules.Range("rope_scaling.low_freq_factor", rope.low_freq_factor, 1e-6, 1e6);
    rules.Require(rope.high_freq_factor > rope.low_freq_factor && rope.high_freq_factor <= 1e6,
                  "rope_scaling.high_freq_factor", rope.high_freq_factor,
                  "more than low_freq_factor");
  }
  if (rope.type == Type::kYarn) {
    rules.Range("rope_scaling.beta_slow", rope.beta_slow, 1e-6, 1e6);
    rules.Require(rope.beta_fast > rope.beta_slow && rope.beta_fast <= 1e6,
                  "rope_scaling.beta_fast", rope.beta_fast, "more than beta_slow");
    rules.Range("rope_scaling.attention_factor", rope.attention_factor.value_or(1), 1e-6, 1e6);
    rules.Range("rope_scaling.mscale", rope.mscale.value_or(1), 0.0, 1e6);
    rules.Range("rope_scaling.mscale_all_dim", rope.mscale_all_dim.value_or(1), 0.0, 1e6);
  }
}

// What Hugging Face's classes can express, so that an exported folder is the same model.
void CheckFamily(const ModelConfig& c, Rules& rules) {
  const bool llama = c.architecture == Architecture::kLlama;
  const bool qwen2 = c.architecture == Architecture::kQwen2;
  const bool qwen3 = c.architecture == Architecture::kQwen3;
  const bool bias_fits = qwen2            ? c.attention_bias_qkv && !c.attention_bias_o
                         : llama || qwen3 ? c.attention_bias_qkv == c.attention_bias_o
                                          : !c.attention_bias_qkv && !c.attention_bias_o;
  const std::string expected = absl::StrCat("what ", Name(c.architecture), " models have");
  rules.Require(bias_fits, "bias of q, k, v and output projection",
                absl::StrCat(c.attention_bias_qkv, " and ", c.attention_bias_o), expected);
  rules.Require(llama || !c.mlp_bias, "mlp_bias", c.mlp_bias, expected);
  rules.Require(c.qk_norm == qwen3, "norm of q and k", c.qk_norm, expected);
  rules.Require(!llama || c.sliding_window == 0, "sliding_window", c.sliding_window, expected);
}

void CheckTokenIds(const ModelConfig& c, Rules& rules) {
  const int64_t last = c.vocab_size - 1;
  if (c.bos_token_id.has_value()) rules.Range("bos_token_id", *c.bos_token_id, 0, last);
  if (c.pad_token_id.has_value()) rules.Range("pad_token_id", *c.pad_token_id, 0, last);
  for (const int64_t id : c.eos_token_ids) rules.Range("eos_token_id", id, 0, last);
}
}  // namespace

absl::string_view Name(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "llama";
    case Architecture::kMistral:
      return "mistral";
    case Architecture::kQwen2:
      return "qwen2";
    case Architecture::kQwen3:
      return "qwen3";
  }
  return "?";
}

absl::string_view Name(RopeScaling::Type type) {
  switch (type) {
    case RopeScaling::Type::kNone:
      return "none";
    case RopeScaling::Type::kLinear:
      return "linear";
    case RopeScaling::Type::kDynamic:
      return "dynamic";
    case RopeScaling::Type::kLlama3:
      return "llama3";
    case RopeScaling::Type::kYarn:
      return "yarn";
    case RopeScaling::Type::kFactors:
      return "factors";
  }
  return "?";
}

absl::Status ValidateConfig(const std::string& where, const ModelConfig& config) {
  Rules rules(where);
  CheckSizes(config, rules);
  CheckFamily(config, rules);
  CheckRope(config, rules);
  CheckTokenIds(config, rules);
  rules.Require(config.torch_dtype == DType::kF32 || config.torch_dtype == DType::kBF16 ||
                    config.torch_dtype == DType::kF16,
                "torch_dtype", Name(config.torch_dtype), "f32, bf16 or f16");
  return rules.status();
}

ModelConfig WithValueHead(ModelConfig config) {
  config.value_head = true;
  config.tie_word_embeddings = false;
  return config;
}

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& c) {
  std::vector<TensorSpec> specs;
  const int64_t hidden = c.hidden_size, mlp = c.intermediate_size;
  const int64_t q_out = c.num_heads * c.head_dim, kv_out = c.num_kv_heads * c.head_dim;
  const auto linear = [&](const std::string& name, int64_t out, int64_t in, bool bias) {
    specs.push_back({name + ".weight", {out, in}});
    if (bias) specs.push_back({name + ".bias", {out}});
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    specs.push_back({name + ".weight", {size}});
  };
  specs.push_back({"model.embed_tokens.weight", {c.vocab_size, hidden}});
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    norm(prefix + "input_layernorm", hidden);
    linear(prefix + "self_attn.q_proj", q_out, hidden, c.attention_bias_qkv);
    linear(prefix + "self_attn.k_proj", kv_out, hidden, c.attention_bias_qkv);
    linear(prefix + "self_attn.v_proj", kv_out, hidden, c.attention_bias_qkv);
    if (c.qk_norm) {
      norm(prefix + "self_attn.q_norm", c.head_dim);
      norm(prefix + "self_attn.k_norm", c.head_dim);
    }
    linear(prefix + "self_attn.o_proj", hidden, q_out, c.attention_bias_o);
    norm(prefix + "post_attention_layernorm", hidden);
    linear(prefix + "mlp.gate_proj", mlp, hidden, c.mlp_bias);
    linear(prefix + "mlp.up_proj", mlp, hidden, c.mlp_bias);
    linear(prefix + "mlp.down_proj", hidden, mlp, c.mlp_bias);
  }
  norm("model.norm", hidden);
  if (c.value_head) {
    specs.push_back({"score.weight", {1, hidden}});
  } else if (!c.tie_word_embeddings) {
    specs.push_back({"lm_head.weight", {c.vocab_size, hidden}});
  }
  return specs;
}
}  // namespace stretto::engine
