// What tests of training share: random batches and an objective with every kind of gradient.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/testing.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine::testing {
// sum of −advantage · exp(logprob − behaviour) + 0.05 k3(reference) − 0.01 entropy, a mean over the
// step's tokens.
class TestObjective final : public Objective {
 public:
  void Evaluate(const ObjectiveInput& in, ObjectiveOutput& out) const override {
    const double weight = 1.0 / static_cast<double>(in.step_tokens);
    for (size_t c = 0; c < in.advantages.size(); ++c) {
      for (int64_t t = in.completion_begin[c]; t < in.completion_begin[c + 1]; ++t) {
        const double ratio = std::exp(double{in.logprobs[t]} - in.behaviour_logprobs[t]);
        double loss = -in.advantages[c] * ratio, d = loss;
        if (!in.reference_logprobs.empty()) {
          const double k1 = double{in.logprobs[t]} - in.reference_logprobs[t];
          loss += 0.05 * (std::exp(-k1) + k1 - 1);
          d += 0.05 * (1 - std::exp(-k1));
        }
        out.loss += weight * (loss - 0.01 * in.entropy[t]);
        out.metrics["ratio"] += weight * ratio;
        out.d_logprobs[t] = static_cast<float>(weight * d);
        out.d_entropy[t] = static_cast<float>(-0.01 * weight);
      }
    }
  }
};

inline TrainBatch RandomBatch(const ModelConfig& config, int64_t max_sequence_length,
                              PhiloxStream& random) {
  TrainBatch batch;
  for (const TestGroup& g : RandomGroups(config, max_sequence_length, random)) {
    TrainGroup group;
    group.prompt_ids = g.prompt;
    for (const auto& ids : g.completions) {
      TrainCompletion c;
      c.ids = ids;
      for (size_t i = 0; i < ids.size(); ++i) {
        c.behaviour_logprobs.push_back(static_cast<float>(-5 * random.NextDouble()));
        c.reference_logprobs.push_back(static_cast<float>(-5 * random.NextDouble()));
      }
      c.advantage = static_cast<float>(random.NextGaussian());
      group.completions.push_back(std::move(c));
    }
    batch.groups.push_back(std::move(group));
  }
  return batch;
}

inline TrainerOptions SmallOptions(int64_t max_sequence_length) {
  TrainerOptions o;
  o.max_sequence_length = max_sequence_length;
  o.micro_batch_tokens = 100;
  o.schedule.lr = 1e-2;
  return o;
}

// An engine with random weights.
inline std::unique_ptr<TrainerEngine> MakeEngine(Device& device, const ModelConfig& config,
                                                 const TrainerOptions& options, uint64_t seed) {
  auto engine = TrainerEngine::Create(device, config, options);
  STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
  STRETTO_CHECK((*engine)->InitRandom(seed, 0.2).ok());
  return *std::move(engine);
}

// All masters and moments, for comparisons of bits.
inline std::vector<float> FullState(TrainerEngine& engine) {
  std::vector<float> state;
  for (const auto which : {TrainerEngine::StateTensor::kMaster, TrainerEngine::StateTensor::kM,
                           TrainerEngine::StateTensor::kV}) {
    for (const Parameter& p : engine.layout().parameters()) {
      const size_t begin = state.size();
      state.resize(begin + p.view.size());
      STRETTO_CHECK(engine.DownloadState(which, p, &state[begin]).ok());
    }
  }
  return state;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
}  // namespace stretto::engine::testing
