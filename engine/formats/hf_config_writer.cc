// Writing config.json and generation_config.json: see model_config.h. RoPE is written in the layout
// of transformers 4, which version 5 reads as well.
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "engine/formats/json.h"
#include "engine/formats/model_config.h"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;

const char* ClassPrefix(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "Llama";
    case Architecture::kMistral:
      return "Mistral";
    case Architecture::kQwen2:
      return "Qwen2";
    case Architecture::kQwen3:
      return "Qwen3";
  }
  return "";
}

const char* TorchName(DType type) {
  switch (type) {
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    default:
      return "float32";
  }
}

Json RopeJson(const ModelConfig& c) {
  const RopeScaling& rope = c.rope_scaling;
  using Type = RopeScaling::Type;
  if (rope.type == Type::kNone) return Json();
  Json out;
  if (rope.type == Type::kFactors) {
    return Json{{"rope_type", "longrope"},
                {"factor", 1.0},
                {"attention_factor", 1.0},
                {"original_max_position_embeddings", c.max_position_embeddings},
                {"short_factor", rope.frequency_factors},
                {"long_factor", rope.frequency_factors}};
  }
  out["rope_type"] = std::string(Name(rope.type));
  out["factor"] = rope.factor;
  if (rope.type == Type::kLinear) return out;
  out["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (rope.type == Type::kLlama3) {
    out["low_freq_factor"] = rope.low_freq_factor;
    out["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == Type::kYarn) {
    out["beta_fast"] = rope.beta_fast;
    out["beta_slow"] = rope.beta_slow;
    if (rope.attention_factor.has_value()) out["attention_factor"] = *rope.attention_factor;
    if (rope.mscale.has_value()) out["mscale"] = *rope.mscale;
    if (rope.mscale_all_dim.has_value()) out["mscale_all_dim"] = *rope.mscale_all_dim;
    if (!rope.truncate) out["truncate"] = false;
  }
  return out;
}

void AddWindow(const ModelConfig& c, Json& out) {
  const bool slides = c.sliding_window > 0;
  if (c.architecture == Architecture::kMistral) {
    out["sliding_window"] = slides ? Json(c.sliding_window) : Json();
  } else if (c.architecture != Architecture::kLlama) {
    out["use_sliding_window"] = slides;
    if (slides) {
      out["sliding_window"] = c.sliding_window;
      out["max_window_layers"] = 0;
    }
  }
}

void AddTokenIds(const ModelConfig& c, Json& out) {
  out["bos_token_id"] = c.bos_token_id.has_value() ? Json(*c.bos_token_id) : Json();
  out["pad_token_id"] = c.pad_token_id.has_value() ? Json(*c.pad_token_id) : Json();
  if (c.eos_token_ids.empty()) {
    out["eos_token_id"] = Json();
  } else if (c.eos_token_ids.size() == 1) {
    out["eos_token_id"] = c.eos_token_ids[0];
  } else {
    out["eos_token_id"] = c.eos_token_ids;
  }
}
}  // namespace

std::string ToHfConfigJson(const ModelConfig& c, DType type) {
  Json out;
  out["architectures"] = {absl::StrCat(ClassPrefix(c.architecture),
                                       c.value_head ? "ForSequenceClassification" : "ForCausalLM")};
  if (c.value_head) out["id2label"] = {{"0", "LABEL_0"}};
  out["model_type"] = std::string(Name(c.architecture));
  out["vocab_size"] = c.vocab_size;
  out["hidden_size"] = c.hidden_size;
  out["intermediate_size"] = c.intermediate_size;
  out["num_hidden_layers"] = c.num_layers;
  out["num_attention_heads"] = c.num_heads;
  out["num_key_value_heads"] = c.num_kv_heads;
  out["head_dim"] = c.head_dim;
  out["hidden_act"] = "silu";
  out["max_position_embeddings"] = c.max_position_embeddings;
  out["rms_norm_eps"] = c.rms_norm_eps;
  out["rope_theta"] = c.rope_theta;
  out["rope_scaling"] = RopeJson(c);
  AddWindow(c, out);
  if (c.architecture == Architecture::kLlama || c.architecture == Architecture::kQwen3) {
    out["attention_bias"] = c.attention_bias_qkv;
  }
  if (c.architecture == Architecture::kLlama) out["mlp_bias"] = c.mlp_bias;
  out["attention_dropout"] = 0.0;
  out["initializer_range"] = 0.02;
  out["tie_word_embeddings"] = c.tie_word_embeddings;
  out["use_cache"] = true;
  AddTokenIds(c, out);
  out["torch_dtype"] = TorchName(type);
  if (!c.chat_format.empty()) out["stretto_chat_format"] = c.chat_format;
  return out.dump(2) + "\n";
}

std::string ToHfGenerationConfigJson(const ModelConfig& config,
                                     const GenerationDefaults& defaults) {
  Json out;
  AddTokenIds(config, out);
  const auto add = [&](const char* name, const auto& value) {
    if (value.has_value()) out[name] = *value;
  };
  add("do_sample", defaults.do_sample);
  add("temperature", defaults.temperature);
  add("top_k", defaults.top_k);
  add("top_p", defaults.top_p);
  add("min_p", defaults.min_p);
  add("repetition_penalty", defaults.repetition_penalty);
  return out.dump(2) + "\n";
}
}  // namespace stretto::engine
