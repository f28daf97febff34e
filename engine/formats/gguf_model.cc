// The meaning of a GGUF file as a model: configuration and tensors under Hugging Face's names.
// Metadata keys and tensor names: gguf.md and llama.cpp's gguf-py/gguf/constants.py.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/config_limits.h"
#include "engine/formats/gguf.h"
#include "engine/formats/gguf_fields.h"

namespace stretto::engine {
namespace {
constexpr absl::string_view kRopeFreqs = "rope_freqs.weight";

const TensorInfo* FindTensor(const GgufFile& file, absl::string_view name) {
  for (const TensorInfo& tensor : file.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

// The shortest decimal that reads back as the same float: 1e-05 rather than 9.99999974e-06, which
// is what the model's author wrote before the number became an f32.
double Shortest(double value) {
  const float narrow = static_cast<float>(value);
  if (double{narrow} != value) return value;
  char text[64];
  const auto written = std::to_chars(text, text + sizeof text, narrow);
  double wide = value;
  std::from_chars(text, written.ptr, wide);
  return wide;
}

absl::StatusOr<Architecture> ArchitectureOf(GgufFields& fields) {
  const std::string name = fields.String("general.architecture", std::nullopt);
  RETURN_IF_ERROR(fields.status());
  if (name == "llama") return Architecture::kLlama;
  if (name == "qwen2") return Architecture::kQwen2;
  if (name == "qwen3") return Architecture::kQwen3;
  return absl::UnimplementedError(
      absl::StrCat(fields.path(), ": general.architecture is \"", name.substr(0, 100),
                   "\", expected llama (also Mistral's), qwen2 or qwen3"));
}

void ReadSizes(const GgufFile& file, GgufFields& fields, const std::string& arch, ModelConfig& c) {
  const TensorInfo* embedding = FindTensor(file, "token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) {
    return fields.Fail("tensor token_embd.weight is missing or not a matrix");
  }
  c.vocab_size = embedding->shape[0];
  c.hidden_size = fields.Int(arch + ".embedding_length", 1, kMaxHiddenSize);
  c.intermediate_size = fields.Int(arch + ".feed_forward_length", 1, kMaxIntermediateSize);
  c.num_layers = fields.Int(arch + ".block_count", 1, kMaxLayers);
  c.num_heads = fields.Int(arch + ".attention.head_count", 1, kMaxHeads);
  c.num_kv_heads = fields.Int(arch + ".attention.head_count_kv", 1, kMaxHeads, c.num_heads);
  c.max_position_embeddings = fields.Int(arch + ".context_length", 1, kMaxPositions);
  c.rms_norm_eps = Shortest(fields.Number(arch + ".attention.layer_norm_rms_epsilon", 0, 1));
  if (!fields.status().ok()) return;
  const std::string key_length = arch + ".attention.key_length";
  if (!fields.Has(key_length) && c.hidden_size % c.num_heads != 0) {
    return fields.Fail(
        absl::StrCat(key_length, " is missing, and the heads do not divide ", "embedding_length"));
  }
  c.head_dim = fields.Int(key_length, 2, kMaxHeadDim, c.hidden_size / c.num_heads);
  for (const char* key : {".attention.value_length", ".rope.dimension_count"}) {
    if (fields.Int(arch + key, 1, INT32_MAX, c.head_dim) != c.head_dim) {
      fields.Fail(absl::StrCat(arch, key, " differs from the size of a head, ", c.head_dim,
                               ", which is not supported"));
    }
  }
  if (fields.Int(arch + ".expert_count", 0, INT32_MAX, 0) != 0) {
    fields.Fail(absl::StrCat(arch, ".expert_count is set: mixtures of experts are not supported"));
  }
}

void ReadRopeKeys(GgufFields& fields, const std::string& arch, ModelConfig& c) {
  const std::string scaling = arch + ".rope.scaling.";
  RopeScaling& rope = c.rope_scaling;
  c.rope_theta = Shortest(fields.Number(arch + ".rope.freq_base", 1, 1e15, 10000));
  // Older files have only the factor of a linear scaling.
  const double old_factor = fields.Number(arch + ".rope.scale_linear", 1, 1e6, 1);
  const std::string type = fields.String(scaling + "type", old_factor != 1 ? "linear" : "none");
  if (type == "none") return;
  if (type != "linear" && type != "yarn") {
    return fields.Fail(absl::StrCat(scaling, "type is \"", type.substr(0, 100),
                                    "\", expected none, linear or yarn"));
  }
  rope.type = type == "linear" ? RopeScaling::Type::kLinear : RopeScaling::Type::kYarn;
  rope.factor = Shortest(fields.Number(scaling + "factor", 1, 1e6, old_factor));
  if (rope.type == RopeScaling::Type::kLinear) return;
  rope.original_max_position_embeddings =
      fields.Int(scaling + "original_context_length", 1, kMaxPositions, c.max_position_embeddings);
  rope.beta_fast = Shortest(fields.Number(scaling + "yarn_beta_fast", 1e-6, 1e6, 32));
  rope.beta_slow = Shortest(fields.Number(scaling + "yarn_beta_slow", 1e-6, 1e6, 1));
  // llama.cpp multiplies this into YaRN's own factor.
  const double attention = fields.Number(scaling + "attn_factor", 1e-6, 1e6, 1);
  if (attention != 1) rope.attention_factor = attention * (0.1 * std::log(rope.factor) + 1);
}

// The divisor that Llama 3's scaling gives frequency `index`: 1 for short waves, `factor` for long
// ones, between them interpolated.
double Llama3Divisor(const ModelConfig& c, const RopeScaling& rope, int64_t index) {
  const double frequency =
      std::pow(c.rope_theta, -2.0 * static_cast<double>(index) / static_cast<double>(c.head_dim));
  const double waves = static_cast<double>(rope.original_max_position_embeddings) * frequency /
                       (2 * std::numbers::pi);
  if (waves > rope.high_freq_factor) return 1;
  if (waves < rope.low_freq_factor) return rope.factor;
  const double smooth =
      (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return 1 / ((1 - smooth) / rope.factor + smooth);
}

absl::Status ReadRopeFreqs(const GgufFile& file, ModelConfig& c) {
  const TensorInfo* tensor = FindTensor(file, kRopeFreqs);
  if (tensor == nullptr) return absl::OkStatus();
  if (tensor->type != StorageType::kF32 || NumElements(*tensor) != c.head_dim / 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        file.path, ": tensor ", kRopeFreqs, ": expected ", c.head_dim / 2, " values of F32"));
  }
  if (c.rope_scaling.type != RopeScaling::Type::kNone) {
    return absl::UnimplementedError(absl::StrCat(file.path, ": tensor ", kRopeFreqs,
                                                 " beside rope.scaling.type is not supported"));
  }
  std::vector<float> divisors(static_cast<size_t>(c.head_dim / 2));
  ToF32(tensor->type, tensor->bytes.data(), c.head_dim / 2, divisors.data());
  // Llama 3.1 to 3.3: factor 8 or 32, the rest the same.
  RopeScaling llama3;
  llama3.type = RopeScaling::Type::kLlama3;
  llama3.factor = std::round(divisors.back());
  llama3.low_freq_factor = 1;
  llama3.high_freq_factor = 4;
  llama3.original_max_position_embeddings = 8192;
  bool same = llama3.factor > 1;
  for (size_t i = 0; i < divisors.size() && same; ++i) {
    const double expected = Llama3Divisor(c, llama3, static_cast<int64_t>(i));
    same = std::fabs(divisors[i] - expected) <= 1e-4 * expected;
  }
  if (same) {
    c.rope_scaling = llama3;
  } else {
    c.rope_scaling.type = RopeScaling::Type::kFactors;
    c.rope_scaling.frequency_factors = std::move(divisors);
  }
  return absl::OkStatus();
}

// What the metadata does not say, the presence of tensors does.
void ReadFlags(const GgufFile& file, ModelConfig& c) {
  c.tie_word_embeddings = FindTensor(file, "output.weight") == nullptr;
  c.attention_bias_qkv = FindTensor(file, "blk.0.attn_q.bias") != nullptr;
  c.attention_bias_o = FindTensor(file, "blk.0.attn_output.bias") != nullptr;
  c.mlp_bias = FindTensor(file, "blk.0.ffn_gate.bias") != nullptr;
  c.qk_norm = FindTensor(file, "blk.0.attn_q_norm.weight") != nullptr;
  const StorageType type = FindTensor(file, "token_embd.weight")->type;
  c.torch_dtype = type == StorageType::kF32   ? DType::kF32
                  : type == StorageType::kF16 ? DType::kF16
                                              : DType::kBF16;
}

void ReadTokenIds(GgufFields& fields, ModelConfig& c) {
  const auto id = [&](const char* name) -> std::optional<int64_t> {
    const std::string key = absl::StrCat("tokenizer.ggml.", name, "_token_id");
    if (!fields.Has(key)) return std::nullopt;
    return fields.Int(key, 0, c.vocab_size - 1);
  };
  c.bos_token_id = id("bos");
  c.pad_token_id = id("padding");
  for (const char* name : {"eos", "eot"}) {
    const auto end = id(name);
    if (end.has_value() && (c.eos_token_ids.empty() || c.eos_token_ids[0] != *end)) {
      c.eos_token_ids.push_back(*end);
    }
  }
}

struct NamePair {
  absl::string_view gguf, hf;
};
constexpr NamePair kOuterNames[] = {{"token_embd.weight", "model.embed_tokens.weight"},
                                    {"output_norm.weight", "model.norm.weight"},
                                    {"output.weight", "lm_head.weight"}};
constexpr NamePair kLayerNames[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"}};

std::string HfName(const std::string& name) {
  for (const NamePair& pair : kOuterNames) {
    if (name == pair.gguf) return std::string(pair.hf);
  }
  absl::string_view rest = name;  // blk.N.PART.weight
  const size_t dot = rest.size() > 4 ? rest.find('.', 4) : absl::string_view::npos;
  if (!absl::StartsWith(rest, "blk.") || dot == absl::string_view::npos) return name;
  const absl::string_view layer = rest.substr(4, dot - 4);
  int64_t number = 0;
  if (!absl::SimpleAtoi(layer, &number) || absl::StrCat(number) != layer) return name;
  rest.remove_prefix(dot + 1);
  for (const absl::string_view suffix : {".weight", ".bias"}) {
    if (!absl::EndsWith(rest, suffix)) continue;
    const absl::string_view part = rest.substr(0, rest.size() - suffix.size());
    for (const NamePair& pair : kLayerNames) {
      if (part == pair.gguf) return absl::StrCat("model.layers.", layer, ".", pair.hf, suffix);
    }
  }
  return name;
}

// Hugging Face keeps a head's first components in its first half and their partners in its second;
// llama.cpp stores partners side by side: row 2j + half of a head is Hugging Face's half·d/2 + j.
int64_t StoredRow(int64_t row, int64_t head_dim) {
  const int64_t head = row / head_dim, in_head = row % head_dim, half = head_dim / 2;
  return head * head_dim + in_head % half * 2 + in_head / half;
}

class GgufSource final : public TensorSource {
 public:
  struct Tensor {
    TensorInfo info;
    int64_t head_dim = 0;  // rows are permuted within heads of this size; 0: they are not
  };
  GgufSource(std::string path, std::vector<Tensor> tensors,
             std::vector<std::unique_ptr<float[]>> owned, std::shared_ptr<const MappedFile> mapping)
      : path_(std::move(path)), owned_(std::move(owned)), mapping_(std::move(mapping)) {
    for (Tensor& tensor : tensors) {
      infos_.push_back(std::move(tensor.info));
      head_dims_.push_back(tensor.head_dim);
    }
  }
  const std::string& path() const override { return path_; }
  absl::Span<const TensorInfo> tensors() const override { return infos_; }
  void LetPagesGo() const override { mapping_->LetPagesGo(); }

 protected:
  absl::Span<const uint8_t> RowBytes(const TensorInfo& tensor, int64_t row) const override {
    const int64_t head_dim = head_dims_[static_cast<size_t>(&tensor - infos_.data())];
    return TensorSource::RowBytes(tensor, head_dim > 0 ? StoredRow(row, head_dim) : row);
  }

 private:
  std::string path_;
  std::vector<TensorInfo> infos_;
  std::vector<int64_t> head_dims_;
  std::vector<std::unique_ptr<float[]>> owned_;  // biases that had to be permuted
  std::shared_ptr<const MappedFile> mapping_;
};

// A permuted bias is one row: it is put in order here, as f32.
std::unique_ptr<float[]> UnpermuteBias(TensorInfo& info, int64_t head_dim) {
  const int64_t size = RowLength(info);
  std::vector<float> stored(static_cast<size_t>(size));
  ToF32(info.type, info.bytes.data(), size, stored.data());
  auto ordered = std::make_unique<float[]>(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    ordered[static_cast<size_t>(i)] = stored[static_cast<size_t>(StoredRow(i, head_dim))];
  }
  info.type = StorageType::kF32;
  info.bytes = {reinterpret_cast<const uint8_t*>(ordered.get()), static_cast<size_t>(size) * 4};
  return ordered;
}
}  // namespace

absl::StatusOr<ModelConfig> ConfigFromGguf(const GgufFile& file) {
  GgufFields fields(file);
  ModelConfig config;
  ASSIGN_OR_RETURN(config.architecture, ArchitectureOf(fields));
  const std::string arch(Name(config.architecture));
  ReadSizes(file, fields, arch, config);
  RETURN_IF_ERROR(fields.status());
  ReadRopeKeys(fields, arch, config);
  config.sliding_window = fields.Int(arch + ".attention.sliding_window", 0, kMaxPositions, 0);
  if (config.architecture == Architecture::kLlama && config.sliding_window > 0) {
    config.architecture = Architecture::kMistral;
  }
  ReadFlags(file, config);
  ReadTokenIds(fields, config);
  RETURN_IF_ERROR(fields.status());
  RETURN_IF_ERROR(ReadRopeFreqs(file, config));
  RETURN_IF_ERROR(ValidateConfig(file.path, config));
  return config;
}

absl::StatusOr<std::shared_ptr<const TensorSource>> GgufTensors(
    GgufFile file, const ModelConfig& c, std::shared_ptr<const MappedFile> mapping) {
  const bool permuted =
      c.architecture == Architecture::kLlama || c.architecture == Architecture::kMistral;
  std::vector<GgufSource::Tensor> tensors;
  std::vector<std::unique_ptr<float[]>> owned;
  for (TensorInfo& info : file.tensors) {
    GgufSource::Tensor tensor;
    const bool is_q = absl::StrContains(info.name, ".attn_q."),
               is_k = absl::StrContains(info.name, ".attn_k.");
    const int64_t outputs = (is_q ? c.num_heads : c.num_kv_heads) * c.head_dim;
    info.name = HfName(info.name);
    tensor.info = std::move(info);
    if (permuted && (is_q || is_k) && tensor.info.shape[0] == outputs) {
      if (tensor.info.shape.size() == 2) {
        tensor.head_dim = c.head_dim;
      } else if (tensor.info.shape.size() == 1 && IsReadable(tensor.info.type)) {
        owned.push_back(UnpermuteBias(tensor.info, c.head_dim));
      }
    }
    tensors.push_back(std::move(tensor));
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.info.name < b.info.name; });
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].info.name == tensors[i - 1].info.name) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path, ": two tensors for ", tensors[i].info.name));
    }
  }
  return std::make_shared<GgufSource>(file.path, std::move(tensors), std::move(owned),
                                      std::move(mapping));
}
}  // namespace stretto::engine
