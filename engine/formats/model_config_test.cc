// config.json of every architecture, defaults of transformers, and one error for each rule.
#include "engine/formats/model_config.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "base/testing.h"

namespace stretto::engine {
namespace {
using nlohmann::json;

json Base(const std::string& type) {
  return {{"model_type", type},       {"vocab_size", 100},
          {"hidden_size", 64},        {"intermediate_size", 96},
          {"num_hidden_layers", 2},   {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5},     {"max_position_embeddings", 512}};
}
absl::StatusOr<ModelConfig> Parse(const json& document) {
  return ParseHfConfig("config.json", document.dump());
}
ModelConfig Good(const json& document) {
  auto config = Parse(document);
  REQUIRE_OK(config);
  return *std::move(config);
}
// The message names the file, says `why`, and has the code of a thing that is wrong or unsupported.
void Refused(const json& document, const std::string& why) {
  const absl::Status status = Parse(document).status();
  INFO(status.ToString() << " should say " << why);
  REQUIRE((absl::IsInvalidArgument(status) || absl::IsUnimplemented(status)));
  REQUIRE(std::string(status.message()).find("config.json: ") == 0);
  REQUIRE(std::string(status.message()).find(why) != std::string::npos);
}
json With(json document, const json& changes) {
  document.update(changes);
  return document;
}

TEST_CASE("llama: fields and defaults") {
  const ModelConfig c = Good(Base("llama"));
  REQUIRE(c.architecture == Architecture::kLlama);
  REQUIRE(c.vocab_size == 100);
  REQUIRE(c.num_layers == 2);
  REQUIRE(c.head_dim == 16);
  REQUIRE(c.rope_theta == 10000.0);
  REQUIRE(c.rms_norm_eps == 1e-5);
  REQUIRE(!c.tie_word_embeddings);
  REQUIRE(!c.attention_bias_qkv);
  REQUIRE(c.eos_token_ids.empty());
  json no_kv = Base("llama");
  no_kv.erase("num_key_value_heads");
  REQUIRE(Good(no_kv).num_kv_heads == 4);
  const ModelConfig biased =
      Good(With(Base("llama"), {{"attention_bias", true}, {"mlp_bias", true}, {"head_dim", 8}}));
  REQUIRE((biased.attention_bias_qkv && biased.attention_bias_o && biased.mlp_bias));
  REQUIRE(biased.head_dim == 8);
  // transformers ignores a window in a Llama config.
  REQUIRE(Good(With(Base("llama"), {{"sliding_window", 8}})).sliding_window == 0);
}

TEST_CASE("mistral: the window is on unless it is null") {
  REQUIRE(Good(Base("mistral")).sliding_window == 4096);
  REQUIRE(Good(With(Base("mistral"), {{"sliding_window", 8}})).sliding_window == 8);
  REQUIRE(Good(With(Base("mistral"), {{"sliding_window", nullptr}})).sliding_window == 0);
}

TEST_CASE("qwen2: bias, and a window in all layers or none") {
  const json base = With(Base("qwen2"), {{"sliding_window", 8}});
  const ModelConfig c = Good(base);
  REQUIRE((c.attention_bias_qkv && !c.attention_bias_o && !c.qk_norm));
  REQUIRE(c.sliding_window == 0);
  const json on = With(base, {{"use_sliding_window", true}});
  REQUIRE(Good(on).sliding_window == 0);  // max_window_layers 28 by default: no layer slides
  REQUIRE(Good(With(on, {{"max_window_layers", 0}})).sliding_window == 8);
  Refused(With(on, {{"max_window_layers", 1}}), "max_window_layers");
  const json all = {"sliding_attention", "sliding_attention"};
  REQUIRE(Good(With(on, {{"layer_types", all}})).sliding_window == 8);
  Refused(With(base, {{"layer_types", all}}), "sliding_window");
  Refused(With(on, {{"layer_types", {"sliding_attention", "full_attention"}}}), "layer_types");
  Refused(With(on, {{"layer_types", {"sliding_attention"}}}), "one entry for each layer");
  Refused(With(on, {{"layer_types", {"chunked_attention", "full_attention"}}}), "layer_types");
}

TEST_CASE("qwen3: norms on q and k, heads of 128 by default") {
  const ModelConfig c = Good(Base("qwen3"));
  REQUIRE(c.qk_norm);
  REQUIRE(c.head_dim == 128);
  REQUIRE(!c.attention_bias_qkv);
  REQUIRE(Good(With(Base("qwen3"), {{"head_dim", nullptr}})).head_dim == 16);
}

TEST_CASE("RoPE in both layouts of transformers") {
  const auto rope = [](const json& scaling) {
    return Good(With(Base("llama"), {{"rope_scaling", scaling}})).rope_scaling;
  };
  using Type = RopeScaling::Type;
  REQUIRE(rope(nullptr).type == Type::kNone);
  REQUIRE(rope({{"rope_type", "default"}}).type == Type::kNone);
  REQUIRE(rope({{"type", "linear"}, {"factor", 2}}).factor == 2.0);
  const RopeScaling dynamic = rope({{"rope_type", "dynamic"}, {"factor", 3.0}});
  REQUIRE(dynamic.type == Type::kDynamic);
  REQUIRE(dynamic.original_max_position_embeddings == 512);
  const RopeScaling llama3 = rope({{"rope_type", "llama3"},
                                   {"factor", 8.0},
                                   {"low_freq_factor", 1.0},
                                   {"high_freq_factor", 4.0},
                                   {"original_max_position_embeddings", 128}});
  REQUIRE(llama3.type == Type::kLlama3);
  REQUIRE(llama3.high_freq_factor == 4.0);
  REQUIRE(llama3.original_max_position_embeddings == 128);
  const RopeScaling yarn = rope({{"rope_type", "yarn"}, {"factor", 4}, {"mscale", 0.7}});
  REQUIRE(yarn.type == Type::kYarn);
  REQUIRE(yarn.beta_fast == 32.0);
  REQUIRE(yarn.mscale == 0.7);
  REQUIRE(!yarn.attention_factor.has_value());
  REQUIRE(yarn.truncate);
  const ModelConfig v5 =
      Good(With(Base("llama"),
                {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 5e5}}},
                 {"dtype", "bfloat16"}}));
  REQUIRE(v5.rope_theta == 5e5);
  REQUIRE(v5.rope_scaling.type == Type::kLinear);
  REQUIRE(v5.torch_dtype == DType::kBF16);
}

TEST_CASE("token ids: one or many, and generation_config rules") {
  ModelConfig c =
      Good(With(Base("llama"), {{"eos_token_id", 3}, {"bos_token_id", 1}, {"pad_token_id", -1}}));
  REQUIRE(c.eos_token_ids == std::vector<int64_t>{3});
  REQUIRE(c.bos_token_id == 1);
  REQUIRE(!c.pad_token_id.has_value());
  auto defaults = ParseGenerationConfig(
      "g.json", R"({"eos_token_id":[4,5],"temperature":0.6,"top_k":20,"do_sample":true})", c);
  REQUIRE_OK(defaults);
  REQUIRE(c.eos_token_ids == std::vector<int64_t>{4, 5});
  REQUIRE(c.bos_token_id == 1);
  REQUIRE(defaults->temperature == 0.6);
  REQUIRE(defaults->top_k == 20);
  REQUIRE(defaults->do_sample == true);
  REQUIRE(!defaults->top_p.has_value());
  REQUIRE(!ParseGenerationConfig("g.json", R"({"eos_token_id":[4,100]})", c).ok());
  REQUIRE(!ParseGenerationConfig("g.json", R"({"top_p":1.5})", c).ok());
  REQUIRE(c.eos_token_ids == std::vector<int64_t>{4, 5});
  Refused(With(Base("llama"), {{"eos_token_id", 100}}), "eos_token_id is 100");
  Refused(With(Base("llama"), {{"bos_token_id", "x"}}), "bos_token_id");
}

TEST_CASE("a reward model has one value for a head, there and back") {
  const ModelConfig c =
      Good(With(Base("qwen2"), {{"architectures", {"Qwen2ForSequenceClassification"}},
                                {"id2label", {{"0", "LABEL_0"}}},
                                {"tie_word_embeddings", true}}));
  REQUIRE(c.value_head);
  REQUIRE(!c.tie_word_embeddings);
  REQUIRE(ExpectedTensors(c).back().name == "score.weight");
  const auto again = ParseHfConfig("config.json", ToHfConfigJson(c, DType::kF32));
  REQUIRE_OK(again);
  REQUIRE(again->value_head);
  REQUIRE(!Good(With(Base("qwen2"), {{"architectures", {"Qwen2ForCausalLM"}}})).value_head);
}

TEST_CASE("each wrong field is named") {
  const json base = Base("llama");
  REQUIRE(!ParseHfConfig("config.json", "{").ok());
  Refused(json::array(), "expected a JSON object");
  Refused(With(base, {{"model_type", "gpt2"}}), "model_type is \"gpt2\"");
  Refused(With(base, {{"architectures", {"LlamaForTokenClassification"}}}), "architectures");
  Refused(With(base, {{"architectures", {"LlamaForSequenceClassification"}}}), "id2label");
  Refused(With(base, {{"architectures", {"LlamaForSequenceClassification"}},
                      {"id2label", {{"0", "no"}, {"1", "yes"}}}}),
          "id2label");
  for (const char* field : {"model_type", "vocab_size", "hidden_size", "intermediate_size",
                            "num_hidden_layers", "num_attention_heads"}) {
    json without = base;
    without.erase(field);
    Refused(without, std::string(field) + " is missing");
    Refused(With(base, {{field, 1.5}}), field);
    Refused(With(base, {{field, 0}}), field);
    Refused(With(base, {{field, -1}}), field);
    Refused(With(base, {{field, 1ull << 63}}), field);
    Refused(With(base, {{field, 1ll << 40}}), field);
  }
  Refused(With(base, {{"num_key_value_heads", 3}}), "num_key_value_heads is 3");
  Refused(With(base, {{"num_attention_heads", 6}}), "num_attention_heads");
  Refused(With(base, {{"head_dim", 7}}), "head_dim is 7, expected an even number");
  Refused(With(base, {{"hidden_act", "gelu"}}), "hidden_act");
  Refused(With(base, {{"rms_norm_eps", -1}}), "rms_norm_eps");
  Refused(With(base, {{"rms_norm_eps", "small"}}), "rms_norm_eps");
  Refused(With(base, {{"tie_word_embeddings", 1}}), "tie_word_embeddings");
  Refused(With(base, {{"torch_dtype", "int8"}}), "torch_dtype");
  Refused(With(base, {{"quantization_config", json::object()}}), "quantization_config");
  Refused(With(base, {{"partial_rotary_factor", 0.5}}), "partial_rotary_factor");
  Refused(With(base, {{"rope_theta", 0}}), "rope_theta");
  const auto rope = [&](const json& scaling, const std::string& why) {
    Refused(With(base, {{"rope_scaling", scaling}}), why);
  };
  rope("linear", "rope_scaling is \"linear\", expected an object");
  const json twice = {{"rope_type", "linear"}, {"factor", 2}};
  Refused(With(base, {{"rope_parameters", {{"rope_type", "default"}}}, {"rope_scaling", twice}}),
          "the same as rope_parameters, or only one of the two");
  Refused(With(base, {{"rope_parameters", twice}, {"rope_scaling", "x"}}), "rope_scaling");
  CHECK(
      Good(With(base, {{"rope_parameters", twice}, {"rope_scaling", twice}})).rope_scaling.factor ==
      2.0);
  rope({{"rope_type", "magic"}}, "rope_scaling.rope_type is \"magic\"");
  rope({{"rope_type", "linear"}}, "rope_scaling.factor is missing");
  rope({{"rope_type", "linear"}, {"factor", 0.5}}, "rope_scaling.factor is 0.5");
  rope({{"rope_type", "llama3"}, {"factor", 8}}, "rope_scaling.original_max_position_embeddings");
  rope({{"rope_type", "yarn"}, {"factor", 8}, {"beta_fast", 1}, {"beta_slow", 2}}, "beta_fast");
  rope({{"rope_type", "longrope"}, {"short_factor", {1, 2}}, {"long_factor", {1, 3}}},
       "long_factor");
}

TEST_CASE("a config survives its own JSON") {
  std::vector<json> documents = {
      With(Base("llama"), {{"attention_bias", true}, {"eos_token_id", {1, 2}}}),
      With(Base("mistral"), {{"sliding_window", nullptr}}),
      With(Base("mistral"), {{"sliding_window", 9}}),
      With(Base("qwen2"), {{"use_sliding_window", true}, {"max_window_layers", 0}}),
      With(Base("qwen3"), {{"tie_word_embeddings", true}}),
      With(Base("llama"), {{"stretto_chat_format", "chatml"}}),
      With(Base("llama"), {{"rope_scaling",
                            {{"rope_type", "yarn"},
                             {"factor", 4},
                             {"truncate", false},
                             {"attention_factor", 1.2}}}})};
  for (const json& document : documents) {
    const ModelConfig c = Good(document);
    const std::string text = ToHfConfigJson(c, DType::kBF16);
    INFO(text);
    const ModelConfig back = Good(json::parse(text));
    REQUIRE(back.torch_dtype == DType::kBF16);
    REQUIRE(ToHfConfigJson(back, DType::kBF16) == text);
    REQUIRE(back.sliding_window == c.sliding_window);
    REQUIRE(back.rope_scaling.type == c.rope_scaling.type);
    REQUIRE(back.eos_token_ids == c.eos_token_ids);
    REQUIRE(back.chat_format == document.value("stretto_chat_format", ""));
  }
}

TEST_CASE("expected tensors in their order") {
  ModelConfig c = Good(With(Base("qwen2"), {{"num_hidden_layers", 1}}));
  std::vector<std::string> names;
  for (const TensorSpec& spec : ExpectedTensors(c)) names.push_back(spec.name);
  REQUIRE(names ==
          std::vector<std::string>{
              "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
              "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
              "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.bias",
              "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.v_proj.bias",
              "model.layers.0.self_attn.o_proj.weight",
              "model.layers.0.post_attention_layernorm.weight",
              "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
              "model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"});
  REQUIRE(ExpectedTensors(c)[4].shape == std::vector<int64_t>{32, 64});
}
}  // namespace
}  // namespace stretto::engine
