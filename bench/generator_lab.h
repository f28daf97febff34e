// What the generator's benchmarks run on: a device, a model of SmolLM2-135M's shape with random
// weights, or one from a file, in bf16, and engines over it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/inference/engine.h"
#include "engine/model/transformer.h"

namespace stretto::bench {
class GeneratorLab {
 public:
  // `model_path`: a Hugging Face folder or GGUF file; empty: random weights. Ends the process with
  // a message when it cannot be opened. `exact`: engine::DeviceOptions'.
  GeneratorLab(int num_threads, const std::string& model_path, bool exact = true);

  engine::NumericProfile profile() const { return device_->Profile(DType::kBF16); }
  const engine::ModelConfig& config() const { return model_->config(); }
  const std::shared_ptr<const engine::ModelWeights>& weights() const { return weights_; }
  // The random weights again, their matrices in another format.
  std::shared_ptr<const engine::ModelWeights> RandomWeights(engine::WeightFormat format) const;

  struct EngineChoice {
    bool prefix_cache = true;
    std::shared_ptr<const engine::ModelWeights> weights = {};  // empty: weights()
    engine::SpeculationOptions speculation = {};
    int32_t max_running = 64;
  };
  std::unique_ptr<engine::InferenceEngine> Engine(const EngineChoice& choice) const;

 private:
  std::unique_ptr<engine::Device> device_;
  std::unique_ptr<engine::Transformer> model_;
  std::shared_ptr<const engine::ModelWeights> weights_;
};

// A request of `num_prompt` tokens that depend on `id`, sampled at temperature 1 to `max_tokens`.
engine::Request MakeRequest(uint64_t id, int num_prompt, int max_tokens);

struct DecodeSeconds {
  double prompt = 0;              // until every sequence has its first token
  double decode = 0;              // from there on
  int64_t tokens = 0, steps = 0;  // while decoding
};
// Submits `num_sequences` and runs them to the end of the first.
DecodeSeconds RunDecode(engine::InferenceEngine& engine, int num_sequences, int num_prompt,
                        int num_new);
}  // namespace stretto::bench
