// The configuration of a dense decoder-only transformer, read from Hugging Face's config.json (and
// generation_config.json) or from GGUF metadata. A config that was returned is consistent: sizes
// are positive and sane, heads divide, and everything that the file asks for is supported; anything
// else is InvalidArgument (contradictory, malformed) or Unimplemented (a known thing that is not
// supported) naming file, field, value and what is expected.
//
// Absent fields take the defaults of transformers' configuration class of the model type.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"

namespace stretto::engine {
enum class Architecture : uint8_t { kLlama, kMistral, kQwen2, kQwen3 };
// "llama", "mistral", "qwen2", "qwen3": Hugging Face's model_type.
absl::string_view Name(Architecture architecture);

// Changes of the rotary frequencies f_i = theta^(-2i/head_dim); formulas as in transformers'
// modeling_rope_utils. Fields that a type does not use keep their defaults.
struct RopeScaling {
  enum class Type : uint8_t {
    kNone,
    kLinear,   // factor
    kDynamic,  // factor, original_max_position_embeddings
    kLlama3,   // factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    kYarn,     // factor, original_max_position_embeddings, beta_*, attention_factor, mscale*,
               // truncate
    kFactors,  // frequency_factors: f_i is divided by frequency_factors[i]
  };
  Type type = Type::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 0;  // set for every type that uses it
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  std::optional<double> attention_factor;  // if absent, it follows from factor and mscale*
  std::optional<double> mscale;
  std::optional<double> mscale_all_dim;
  bool truncate = true;
  std::vector<float> frequency_factors;  // head_dim / 2 values, for kFactors
};
// "none", "linear", …
absl::string_view Name(RopeScaling::Type type);

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_heads
  int64_t head_dim = 0;      // even; need not be hidden_size / num_heads
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  int64_t sliding_window =
      0;  // keys a query may see, itself included; 0: all. The same in all layers
  bool tie_word_embeddings = false;
  bool attention_bias_qkv = false;
  bool attention_bias_o = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMS norm over each head's q and k, before RoPE
  // A row's output is one number, a value or score, instead of logits over the vocabulary: the head
  // is "score.weight" [1, hidden], as in transformers' …ForSequenceClassification. Not tied.
  bool value_head = false;
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;  // generation_config.json rules over config.json
  std::optional<int64_t> pad_token_id;
  DType torch_dtype = DType::kF32;  // what the file says it holds: kF32, kBF16 or kF16
  // In which chat format the model was trained where that isn't what its template says: a key of
  // our own, "stretto_chat_format". Empty: as the template says.
  std::string chat_format;

  int64_t num_outputs() const { return value_head ? 1 : vocab_size; }  // of the head, a row
};

// The same model with a value head in place of its language-model head.
ModelConfig WithValueHead(ModelConfig config);

// What generation_config.json recommends; absent where it says nothing.
struct GenerationDefaults {
  std::optional<bool> do_sample;
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
};

// `path` is for messages. Token ids that the vocabulary does not have are errors.
absl::StatusOr<ModelConfig> ParseHfConfig(const std::string& path, absl::string_view json);
// Reads generation_config.json's text: returns its sampling defaults and puts its token ids over
// those of `config`.
absl::StatusOr<GenerationDefaults> ParseGenerationConfig(const std::string& path,
                                                         absl::string_view json,
                                                         ModelConfig& config);

// The same checks on a config that was made in code; `where` is for messages.
absl::Status ValidateConfig(const std::string& where, const ModelConfig& config);

// config.json and generation_config.json such that transformers (4 and 5) and ParseHfConfig read
// the same model back; `type` becomes torch_dtype.
std::string ToHfConfigJson(const ModelConfig& config, DType type);
std::string ToHfGenerationConfigJson(const ModelConfig& config, const GenerationDefaults& defaults);

// One parameter of the model.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
};
// Every parameter under its Hugging Face name, in the fixed order that training, export and weight
// synchronisation share: embedding; per layer in order of use input_layernorm, q, k, v (each
// weight, then bias), q_norm, k_norm, o, post_attention_layernorm, gate, up, down; final norm;
// lm_head unless tied, or the value head. Weights of linear maps are [out, in].
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);
}  // namespace stretto::engine
