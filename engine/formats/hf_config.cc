// Reading config.json and generation_config.json: see model_config.h. Field names and defaults are
// those of transformers' LlamaConfig, MistralConfig, Qwen2Config and Qwen3Config; versions 4
// (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) are both read.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/config_limits.h"
#include "engine/formats/json.h"
#include "engine/formats/model_config.h"

namespace stretto::engine {
namespace {
using nlohmann::json;

// Defaults that differ between the model types.
struct FamilyDefaults {
  Architecture architecture;
  const char* model_type;
  const char* class_prefix;  // of "…ForCausalLM", and "…ForSequenceClassification"
  int64_t num_kv_heads;      // 0: as many as heads
  int64_t head_dim;          // 0: hidden_size / num_heads
  int64_t max_position_embeddings;
};
constexpr FamilyDefaults kFamilies[] = {
    {Architecture::kLlama, "llama", "Llama", 0, 0, 2048},
    {Architecture::kMistral, "mistral", "Mistral", 8, 0, 4096 * 32},
    {Architecture::kQwen2, "qwen2", "Qwen2", 32, 0, 32768},
    {Architecture::kQwen3, "qwen3", "Qwen3", 32, 128, 32768},
};
constexpr int64_t kDefaultWindow = 4096;

const FamilyDefaults* FindFamily(JsonFields& fields) {
  const std::string type = fields.String("model_type");
  const FamilyDefaults* family = nullptr;
  for (const FamilyDefaults& candidate : kFamilies) {
    if (type == candidate.model_type) family = &candidate;
  }
  if (family == nullptr) {
    fields.FailUnsupported("model_type", "llama, mistral, qwen2 or qwen3");
    return nullptr;
  }
  return family;
}

// Which head the model has, by its class.
void ReadClass(JsonFields& fields, const FamilyDefaults& family, ModelConfig& c) {
  const json* classes = fields.Find("architectures");
  if (classes == nullptr) return;
  const std::string writes = absl::StrCat(family.class_prefix, "ForCausalLM");
  const std::string judges = absl::StrCat(family.class_prefix, "ForSequenceClassification");
  if (!classes->is_array() || classes->size() != 1 ||
      ((*classes)[0] != writes && (*classes)[0] != judges)) {
    return fields.FailUnsupported(
        "architectures",
        absl::StrCat("[\"", writes, "\"], or of a reward model [\"", judges, "\"]"));
  }
  c.value_head = (*classes)[0] == judges;
  if (!c.value_head) return;
  c.tie_word_embeddings = false;  // there is no head to tie
  const json* labels = fields.Find("id2label");
  if (labels == nullptr || !labels->is_object() || labels->size() != 1) {
    fields.FailUnsupported("id2label", "one label, as a reward model has (num_labels=1)");
  }
}

void ReadSizes(JsonFields& fields, const FamilyDefaults& family, ModelConfig& c) {
  c.vocab_size = fields.Int("vocab_size", 1, kMaxVocabSize);
  c.hidden_size = fields.Int("hidden_size", 1, kMaxHiddenSize);
  c.intermediate_size = fields.Int("intermediate_size", 1, kMaxIntermediateSize);
  c.num_layers = fields.Int("num_hidden_layers", 1, kMaxLayers);
  c.num_heads = fields.Int("num_attention_heads", 1, kMaxHeads);
  const bool kv_is_null = fields.IsNull("num_key_value_heads");  // null means: as many as heads
  c.num_kv_heads =
      fields.Int("num_key_value_heads", 1, kMaxHeads,
                 family.num_kv_heads > 0 && !kv_is_null ? family.num_kv_heads : c.num_heads);
  const bool has_default_dim = family.head_dim > 0 && !fields.IsNull("head_dim");
  c.head_dim = fields.Int("head_dim", 2, kMaxHeadDim,
                          has_default_dim ? family.head_dim : c.hidden_size / c.num_heads);
  if (!fields.Has("head_dim") && !has_default_dim && c.hidden_size % c.num_heads != 0) {
    fields.Fail("num_attention_heads",
                absl::StrCat("a divisor of hidden_size ", c.hidden_size, ", or a head_dim"));
  }
  c.max_position_embeddings =
      fields.Int("max_position_embeddings", 1, kMaxPositions, family.max_position_embeddings);
}

RopeScaling::Type RopeType(JsonFields& rope) {
  // "type" is the older spelling of "rope_type"; "mrope" and "su" exist only for other models.
  const char* key = rope.Has("rope_type") ? "rope_type" : "type";
  const std::string name = rope.String(key, "default");
  if (name == "default") return RopeScaling::Type::kNone;
  if (name == "longrope") return RopeScaling::Type::kFactors;
  for (const auto type : {RopeScaling::Type::kLinear, RopeScaling::Type::kDynamic,
                          RopeScaling::Type::kLlama3, RopeScaling::Type::kYarn}) {
    if (name == Name(type)) return type;
  }
  rope.FailUnsupported(key,
                       "default, linear, dynamic, llama3, yarn, or longrope with equal "
                       "factors");
  return RopeScaling::Type::kNone;
}

// longrope switches between two lists by length; with equal lists it is one list of divisors.
void ReadFactors(JsonFields& rope, RopeScaling& scaling) {
  const json *shorter = rope.Find("short_factor"), *longer = rope.Find("long_factor");
  if (shorter == nullptr || longer == nullptr || *shorter != *longer || !shorter->is_array() ||
      shorter->size() > kMaxHeadDim) {
    rope.FailUnsupported("long_factor", "a list that equals short_factor");
    return;
  }
  for (const json& factor : *shorter) {
    if (!factor.is_number()) return rope.Fail("short_factor", "a list of numbers");
    scaling.frequency_factors.push_back(factor.get<float>());
  }
  if (rope.Number("attention_factor", 0, 1e6) != 1.0) {
    rope.FailUnsupported("attention_factor", "1");
  }
}

std::optional<double> OptionalNumber(JsonFields& fields, const char* name) {
  if (!fields.Has(name)) return std::nullopt;
  return fields.Number(name, 0, 1e6);
}

void ReadRopeScaling(JsonFields& rope, ModelConfig& c) {
  RopeScaling& scaling = c.rope_scaling;
  scaling.type = RopeType(rope);
  using Type = RopeScaling::Type;
  if (scaling.type == Type::kNone) return;
  if (scaling.type == Type::kFactors) return ReadFactors(rope, scaling);
  scaling.factor = rope.Number("factor", 1, 1e6);
  if (scaling.type == Type::kLinear) return;
  if (scaling.type == Type::kLlama3) {
    scaling.original_max_position_embeddings =
        rope.Int("original_max_position_embeddings", 1, kMaxPositions);
    scaling.low_freq_factor = rope.Number("low_freq_factor", 1e-6, 1e6);
    scaling.high_freq_factor = rope.Number("high_freq_factor", 1e-6, 1e6);
    return;
  }
  scaling.original_max_position_embeddings =
      rope.Int("original_max_position_embeddings", 1, kMaxPositions, c.max_position_embeddings);
  if (scaling.type == Type::kDynamic) return;
  scaling.beta_fast = rope.Number("beta_fast", 1e-6, 1e6, 32);
  scaling.beta_slow = rope.Number("beta_slow", 1e-6, 1e6, 1);
  scaling.attention_factor = OptionalNumber(rope, "attention_factor");
  scaling.mscale = OptionalNumber(rope, "mscale");
  scaling.mscale_all_dim = OptionalNumber(rope, "mscale_all_dim");
  scaling.truncate = rope.Bool("truncate", true);
}

absl::Status ReadRope(JsonFields& fields, ModelConfig& c) {
  const bool new_layout = fields.Has("rope_parameters");
  const char* key = new_layout ? "rope_parameters" : "rope_scaling";
  c.rope_theta = fields.Number("rope_theta", 1, 1e15, 10000);
  if (fields.Number("partial_rotary_factor", 0, 1e6, 1) != 1.0) {
    fields.FailUnsupported("partial_rotary_factor", "1");
  }
  if (!fields.Has(key)) return fields.status();
  // transformers takes rope_scaling alone where both are given, and forgets rope_parameters' theta.
  if (new_layout && fields.Has("rope_scaling") &&
      *fields.Find("rope_scaling") != *fields.Find("rope_parameters")) {
    fields.Fail("rope_scaling", "the same as rope_parameters, or only one of the two");
    return fields.status();
  }
  if (!fields.Find(key)->is_object()) {
    fields.Fail(key, "an object");
    return fields.status();
  }
  JsonFields rope(fields.where(), *fields.Find(key), absl::StrCat(key, "."));
  if (new_layout) c.rope_theta = rope.Number("rope_theta", 1, 1e15, c.rope_theta);
  if (rope.Number("partial_rotary_factor", 0, 1e6, 1) != 1.0) {
    rope.FailUnsupported("partial_rotary_factor", "1");
  }
  ReadRopeScaling(rope, c);
  RETURN_IF_ERROR(fields.status());
  return rope.status();
}

// Which layers slide, as layer_types says it or as Qwen2 did before: layers from max_window_layers
// on. One window in all layers or in none is supported.
void ReadWindow(JsonFields& fields, ModelConfig& c) {
  if (c.architecture == Architecture::kLlama) return;  // transformers ignores the field there
  int64_t window = 0;
  if (c.architecture == Architecture::kMistral) {
    const bool null = fields.IsNull("sliding_window");
    window = null ? 0 : fields.Int("sliding_window", 1, kMaxPositions, kDefaultWindow);
  } else if (fields.Bool("use_sliding_window", false)) {
    window = fields.Int("sliding_window", 1, kMaxPositions, kDefaultWindow);
  }
  int64_t num_sliding = window > 0 ? c.num_layers : 0;
  if (const json* types = fields.Find("layer_types"); types != nullptr) {
    if (!types->is_array() || static_cast<int64_t>(types->size()) != c.num_layers) {
      return fields.Fail("layer_types", "one entry for each layer");
    }
    num_sliding = std::count(types->begin(), types->end(), json("sliding_attention"));
    const int64_t num_full = std::count(types->begin(), types->end(), json("full_attention"));
    if (num_sliding + num_full != c.num_layers) {
      return fields.FailUnsupported("layer_types", "full_attention or sliding_attention");
    }
  } else if (window > 0 && c.architecture != Architecture::kMistral) {
    const int64_t first = fields.Int("max_window_layers", 0, INT32_MAX, 28);
    num_sliding = std::max<int64_t>(0, c.num_layers - first);
  }
  if (num_sliding != 0 && num_sliding != c.num_layers) {
    return fields.FailUnsupported(fields.Has("layer_types") ? "layer_types" : "max_window_layers",
                                  "a sliding window in all layers or in none");
  }
  if (num_sliding > 0 && window == 0) {
    return fields.Fail("sliding_window", "a size, as layer_types asks for sliding attention");
  }
  c.sliding_window = num_sliding > 0 ? window : 0;
}

void ReadFlags(JsonFields& fields, ModelConfig& c) {
  c.rms_norm_eps = fields.Number("rms_norm_eps", 0, 1, 1e-6);
  c.tie_word_embeddings = fields.Bool("tie_word_embeddings", false);
  const bool bias = fields.Bool("attention_bias", false);
  const bool follows_flag =
      c.architecture == Architecture::kLlama || c.architecture == Architecture::kQwen3;
  c.attention_bias_qkv = c.architecture == Architecture::kQwen2 || (follows_flag && bias);
  c.attention_bias_o = follows_flag && bias;
  c.mlp_bias = c.architecture == Architecture::kLlama && fields.Bool("mlp_bias", false);
  c.qk_norm = c.architecture == Architecture::kQwen3;
  const std::string activation = fields.String("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") fields.FailUnsupported("hidden_act", "silu");
  if (fields.Has("quantization_config")) {
    fields.FailUnsupported("quantization_config", "plain weights (or a GGUF file)");
  }
}

void ReadTorchDType(JsonFields& fields, ModelConfig& c) {
  const char* key = fields.Has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = fields.String(key, "float32");
  if (name == "float32" || name == "float64") {
    c.torch_dtype = DType::kF32;
  } else if (name == "bfloat16") {
    c.torch_dtype = DType::kBF16;
  } else if (name == "float16") {
    c.torch_dtype = DType::kF16;
  } else {
    fields.FailUnsupported(key, "float32, bfloat16 or float16");
  }
}

// eos_token_id is one id or a list. Some files write -1 for "none".
void ReadTokenIds(JsonFields& fields, ModelConfig& c) {
  const auto one = [&](const char* name, std::optional<int64_t>& id) {
    if (!fields.Has(name)) return;
    const int64_t value = fields.Int(name, -1, c.vocab_size - 1);
    id = value >= 0 ? std::optional<int64_t>(value) : std::nullopt;
  };
  one("bos_token_id", c.bos_token_id);
  one("pad_token_id", c.pad_token_id);
  const json* eos = fields.Find("eos_token_id");
  if (eos == nullptr) return;
  c.eos_token_ids.clear();
  if (!eos->is_array()) {
    const int64_t id = fields.Int("eos_token_id", -1, c.vocab_size - 1);
    if (id >= 0) c.eos_token_ids.push_back(id);
    return;
  }
  for (const json& id : *eos) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(c.vocab_size)) {
      return fields.Fail("eos_token_id", absl::StrCat("ids from 0 to ", c.vocab_size - 1));
    }
    c.eos_token_ids.push_back(id.get<int64_t>());
  }
}
}  // namespace

absl::StatusOr<ModelConfig> ParseHfConfig(const std::string& path, absl::string_view text) {
  ASSIGN_OR_RETURN(const json document, ParseJson(path, text));
  JsonFields fields(path, document);
  ModelConfig config;
  const FamilyDefaults* family = FindFamily(fields);
  RETURN_IF_ERROR(fields.status());
  config.architecture = family->architecture;
  ReadSizes(fields, *family, config);
  RETURN_IF_ERROR(fields.status());
  ReadFlags(fields, config);
  ReadClass(fields, *family, config);
  ReadWindow(fields, config);
  ReadTorchDType(fields, config);
  ReadTokenIds(fields, config);
  config.chat_format = fields.String("stretto_chat_format", "");
  RETURN_IF_ERROR(ReadRope(fields, config));
  RETURN_IF_ERROR(ValidateConfig(path, config));
  return config;
}

absl::StatusOr<GenerationDefaults> ParseGenerationConfig(const std::string& path,
                                                         absl::string_view text,
                                                         ModelConfig& config) {
  ASSIGN_OR_RETURN(const json document, ParseJson(path, text));
  JsonFields fields(path, document);
  GenerationDefaults defaults;
  if (fields.Has("do_sample")) defaults.do_sample = fields.Bool("do_sample");
  const auto number = [&](const char* name, double max, std::optional<double>& to) {
    if (fields.Has(name)) to = fields.Number(name, 0, max);
  };
  number("temperature", 1e6, defaults.temperature);
  number("top_p", 1, defaults.top_p);
  number("min_p", 1, defaults.min_p);
  number("repetition_penalty", 1e6, defaults.repetition_penalty);
  if (fields.Has("top_k")) defaults.top_k = fields.Int("top_k", 0, INT32_MAX);
  ModelConfig with_ids = config;
  ReadTokenIds(fields, with_ids);
  RETURN_IF_ERROR(fields.status());
  config = std::move(with_ids);
  return defaults;
}
}  // namespace stretto::engine
