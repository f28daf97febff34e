// For tests of the engine: a small random model on any backend, and a driver that runs requests to
// their end and collects what was reported.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/bfloat16.h"
#include "base/check.h"
#include "base/testing.h"
#include "engine/constrain/constraint.h"
#include "engine/inference/engine.h"
#include "engine/model/transformer.h"

namespace stretto::engine::testing {
struct ModelShape {
  int64_t vocab_size = 61, hidden_size = 32, intermediate_size = 48, num_layers = 2;
  int64_t num_heads = 4, num_kv_heads = 2, head_dim = 8;
  int64_t max_context = 256;
  bool tie_word_embeddings = true;
  WeightFormat kv_format = WeightFormat::kPlain;
};

struct Model {
  std::unique_ptr<Device> device;
  std::unique_ptr<Transformer> transformer;

  // The same seed gives the same weights on every backend. The embedding of token `nan_id` is not a
  // number. With `noise`, weights beside those of the seed, as far as that times their size.
  std::shared_ptr<const ModelWeights> Weights(uint64_t seed, int64_t nan_id = -1,
                                              double noise = 0) const {
    const auto stream = device->CreateStream();
    const ParameterReader reader = [=](const Parameter& p, DType dtype, void* dst) {
      PhiloxStream random(seed, std::hash<std::string>()(p.spec.name));
      PhiloxStream random_noise(~seed, std::hash<std::string>()(p.spec.name));
      const bool norm = p.spec.name.find("norm") != std::string::npos;
      const bool embedding = p.spec.name.find("embed") != std::string::npos;
      const double scale = embedding ? 0.35 : 1.5 / std::sqrt(static_cast<double>(p.view.cols));
      for (int64_t i = 0; i < p.view.size(); ++i) {
        auto value = static_cast<float>(norm ? 1.0 + 0.1 * random.NextGaussian()
                                             : scale * random.NextGaussian());
        if (noise > 0) value += static_cast<float>(noise * scale * random_noise.NextGaussian());
        if (embedding && i / p.view.cols == nan_id) value = std::nanf("");
        if (dtype == DType::kF32) {
          static_cast<float*>(dst)[i] = value;
        } else {
          static_cast<uint16_t*>(dst)[i] = F32ToBf16(value);
        }
      }
      return absl::OkStatus();
    };
    auto weights = ModelWeights::Load(*device, *stream, transformer->config(),
                                      transformer->options().dtype, reader);
    STRETTO_CHECK(weights.ok());
    return std::move(*weights);
  }
  ServedWeights Served(uint64_t seed) const {
    return {Weights(seed), static_cast<int64_t>(seed), "hash" + std::to_string(seed)};
  }
  std::unique_ptr<InferenceEngine> Engine(const EngineOptions& options, uint64_t seed = 1) const {
    auto engine = InferenceEngine::Create(*transformer, Served(seed), options);
    STRETTO_CHECK_MSG(engine.ok(), ::stretto::testing::StatusText(engine).c_str());
    return std::move(*engine);
  }
};

inline Model MakeModel(const std::string& backend, int num_threads, DType dtype,
                       const ModelShape& shape = {}) {
  Model model;
  DeviceOptions device_options;
  device_options.backend = backend;
  device_options.num_threads = num_threads;
  auto device = CreateDevice(device_options);
  STRETTO_CHECK(device.ok());
  model.device = std::move(*device);
  ModelConfig config;
  config.vocab_size = shape.vocab_size;
  config.hidden_size = shape.hidden_size;
  config.intermediate_size = shape.intermediate_size;
  config.num_layers = shape.num_layers;
  config.num_heads = shape.num_heads;
  config.num_kv_heads = shape.num_kv_heads;
  config.head_dim = shape.head_dim;
  config.max_position_embeddings = shape.max_context;
  config.tie_word_embeddings = shape.tie_word_embeddings;
  auto transformer = Transformer::Create(
      *model.device, config,
      {.dtype = dtype, .max_sequence_length = shape.max_context, .kv_format = shape.kv_format});
  STRETTO_CHECK_MSG(transformer.ok(), ::stretto::testing::StatusText(transformer).c_str());
  model.transformer = std::move(*transformer);
  return model;
}

// What was reported of one request.
struct Result {
  std::vector<int32_t> ids;
  std::vector<float> logprobs, sampling_logprobs;
  std::vector<int64_t> versions;
  std::string text;
  int num_ends = 0;
  Event end;

  // Equal ids and bitwise equal log-probs.
  bool SameBits(const Result& other) const {
    return ids == other.ids && Same(logprobs, other.logprobs) &&
           Same(sampling_logprobs, other.sampling_logprobs) && end.reason == other.end.reason;
  }
  static bool Same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  }
};
using Results = std::map<uint64_t, Result>;

// Much is drafted, whatever it costs: by the looks of the text, or by a model of the same shape
// whose weights differ from those of seed 1 by `noise`.
inline SpeculationOptions EagerNgrams(int32_t min_match = 1, int32_t max_draft = 8) {
  SpeculationOptions options;
  options.kind = SpeculationKind::kNgram;
  options.min_match = min_match;
  options.max_draft = max_draft;
  options.row_cost = 1e-6f;
  return options;
}
inline SpeculationOptions EagerModel(const Model& model, double noise, int32_t max_draft = 8) {
  SpeculationOptions options = EagerNgrams(1, max_draft);
  options.kind = SpeculationKind::kModel;
  options.draft_cost = 1e-6f;
  options.draft_model = model.transformer.get();
  options.draft_weights = model.Weights(1, -1, noise);
  return options;
}

inline void Collect(absl::Span<const Event> events, Results& results) {
  for (const Event& event : events) {
    Result& result = results[event.request_id];
    result.text += event.text;
    if (event.kind == Event::Kind::kFinished) {
      result.end = event;
      ++result.num_ends;
      continue;
    }
    STRETTO_CHECK(result.num_ends == 0);
    result.ids.push_back(event.token);
    result.logprobs.push_back(event.logprob);
    result.sampling_logprobs.push_back(event.sampling_logprob);
    result.versions.push_back(event.version);
  }
}

inline void RunToEnd(InferenceEngine& engine, Results& results) {
  while (engine.HasWork()) Collect(engine.Step(), results);
}

inline Result RunAlone(InferenceEngine& engine, const Request& request) {
  STRETTO_CHECK_MSG(engine.Submit(request).ok(), "submit");
  Results results;
  RunToEnd(engine, results);
  return results.at(request.id);
}

inline Request RandomRequest(PhiloxStream& random, uint64_t id, int64_t vocab_size) {
  Request r;
  r.id = id;
  r.draw = {random.NextU64(), random.Below(100), static_cast<uint32_t>(random.Below(8))};
  const size_t num_prompt = 1 + random.Below(60);
  for (size_t i = 0; i < num_prompt; ++i) {
    r.prompt_ids.push_back(static_cast<int32_t>(random.Below(static_cast<uint64_t>(vocab_size))));
  }
  SamplingParams& p = r.sampling;
  p.max_tokens = 1 + static_cast<int32_t>(random.Below(40));
  p.temperature = random.Below(4) == 0 ? 0.0f : 0.5f + static_cast<float>(random.NextDouble());
  if (random.Below(3) == 0) p.top_k = 1 + static_cast<int32_t>(random.Below(20));
  if (random.Below(3) == 0) p.top_p = 0.5f + 0.5f * static_cast<float>(random.NextDouble());
  if (random.Below(4) == 0) p.min_p = 0.05f;
  if (random.Below(4) == 0) p.repetition_penalty = 1.2f;
  if (random.Below(4) == 0) p.stop_ids = {3};
  if (random.Below(4) == 0) p.min_tokens = static_cast<int32_t>(random.Below(p.max_tokens + 1));
  return r;
}

// What each token stands for where a test needs text: the first 32 are one character each, the rest
// two or three. Id 5, the EOS of the tests, has none.
inline std::vector<std::string> TokenTexts(int64_t vocab_size = 61) {
  const std::string letters = "abc01?29{}[]\":, .-dexyztrufalsnk";
  STRETTO_CHECK(letters.size() == 32 && vocab_size > 33);
  std::vector<std::string> texts;
  for (size_t t = 0; t < static_cast<size_t>(vocab_size); ++t) {
    if (t < 32) {
      texts.emplace_back(1, letters[t]);
    } else {
      texts.push_back({letters[t * 7 % 31], letters[t * 11 % 32]});
      if (t % 3 == 0) texts.back() += letters[t * 5 % 32];
    }
  }
  for (const char* word : {"{\"", "\": ", "ab", "abc", "01", ", "}) {
    texts[static_cast<size_t>(vocab_size) - 1 - static_cast<size_t>(word[0] % 16)] = word;
  }
  texts[5].clear();
  return texts;
}
inline std::shared_ptr<const Constraint> MakeConstraint(const ConstraintSpec& spec,
                                                        int64_t vocab_size = 61) {
  auto constraint =
      Constraint::Compile(spec, std::make_shared<const TokenTrie>(TokenTexts(vocab_size)));
  STRETTO_CHECK_MSG(constraint.ok(), ::stretto::testing::StatusText(constraint).c_str());
  return *std::move(constraint);
}

// Constraints of all kinds over these texts: short ones and ones without an end.
inline const std::vector<ConstraintSpec>& TestConstraints() {
  using Kind = ConstraintSpec::Kind;
  static const auto* specs = new std::vector<ConstraintSpec>{
      {Kind::kRegex, "[abc]{2,30}"},
      {Kind::kRegex, "(?:ab|c|0)*d?"},
      {Kind::kRegex, "-?[0129]+(?:\\.[0129]+)?"},
      {Kind::kRegex, "\\{\"[a-c]{1,3}\": (?:true|false|[0129]{1,3})\\}"},
      {Kind::kRegex, "(?:a|b01|[^a])*"},
      {Kind::kRegex, "abc ?[xyz]{3}(?:, [xyz]{3})*"},
      {Kind::kJsonObject, ""},
      {Kind::kJsonSchema, R"({"type": "object", "required": ["a"], "properties": {
          "a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}},
          "c": {"type": "string", "maxLength": 4}}})"}};
  return *specs;
}
}  // namespace stretto::engine::testing
