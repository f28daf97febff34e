#include "bench/generator_lab.h"

#include "base/bfloat16.h"
#include "base/check.h"
#include "bench/report.h"
#include "bench/smollm2.h"
#include "engine/formats/model_files.h"

namespace stretto::bench {
namespace {
using engine::ModelWeights;
using engine::Transformer;

// Small values without structure; norms are 1.
absl::Status RandomParameter(const engine::Parameter& p, DType dtype, void* dst) {
  STRETTO_CHECK(dtype == DType::kBF16);
  const bool norm = p.spec.name.find("norm") != std::string::npos;
  uint32_t state = static_cast<uint32_t>(p.view.offset) + 1;
  auto* out = static_cast<uint16_t*>(dst);
  for (int64_t i = 0; i < p.view.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    out[i] = F32ToBf16(norm ? 1.0f : static_cast<float>(static_cast<int32_t>(state)) * 0x1p-35f);
  }
  return absl::OkStatus();
}
}  // namespace

GeneratorLab::GeneratorLab(int num_threads, const std::string& model_path, bool exact) {
  engine::DeviceOptions options;
  options.exact = exact;
  options.num_threads = num_threads;
  device_ = Must(engine::CreateDevice(options));
  if (model_path.empty()) {
    model_ = Must(Transformer::Create(*device_, SmolLm2Config(), {DType::kBF16, 8192}));
    weights_ = RandomWeights(engine::WeightFormat::kPlain);
    return;
  }
  const engine::ModelFiles files = Must(engine::OpenModel(model_path));
  model_ = Must(Transformer::Create(*device_, files.config, {DType::kBF16, 8192}));
  const auto stream = device_->CreateStream();
  weights_ =
      Must(ModelWeights::Load(*device_, *stream, files.config, DType::kBF16, *files.tensors));
}

std::shared_ptr<const ModelWeights> GeneratorLab::RandomWeights(engine::WeightFormat format) const {
  const auto stream = device_->CreateStream();
  return Must(ModelWeights::Load(*device_, *stream, config(), DType::kBF16, RandomParameter,
                                 {.format = format}));
}

std::unique_ptr<engine::InferenceEngine> GeneratorLab::Engine(const EngineChoice& choice) const {
  engine::EngineOptions options;
  options.speculation = choice.speculation;
  options.kv_cache_bytes = int64_t{512} << 20;
  options.prefix_cache = choice.prefix_cache;
  options.max_running = choice.max_running;
  auto weights = choice.weights ? choice.weights : weights_;
  return Must(engine::InferenceEngine::Create(
      *model_, {.weights = std::move(weights), .version = 1, .hash = "bench"}, options));
}

engine::Request MakeRequest(uint64_t id, int num_prompt, int max_tokens) {
  engine::Request r;
  r.id = id;
  r.draw = {1, id, 0};
  for (int i = 0; i < num_prompt; ++i) {
    r.prompt_ids.push_back(
        static_cast<int32_t>((static_cast<int64_t>(id) * 7919 + i * 31) % 49152));
  }
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  return r;
}

DecodeSeconds RunDecode(engine::InferenceEngine& engine, int num_sequences, int num_prompt,
                        int num_new) {
  DecodeSeconds result;
  const double begin = SecondsNow();
  const engine::EngineStats start = engine.stats();
  for (int i = 0; i < num_sequences; ++i) {
    STRETTO_CHECK(engine.Submit(MakeRequest(static_cast<uint64_t>(i), num_prompt, num_new)).ok());
  }
  while (engine.stats().num_queued > 0 ||
         engine.stats().tokens_generated - start.tokens_generated < num_sequences) {
    engine.Step();
  }
  const engine::EngineStats before = engine.stats();
  result.prompt = SecondsNow() - begin;
  while (engine.stats().num_finished == start.num_finished) engine.Step();
  result.decode = SecondsNow() - begin - result.prompt;
  result.tokens = engine.stats().tokens_generated - before.tokens_generated;
  result.steps = engine.stats().num_steps - before.num_steps;
  while (engine.HasWork()) engine.Step();
  return result;
}
}  // namespace stretto::bench
