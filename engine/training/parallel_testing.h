// What tests of ranks that train together share: runs in a group, and what they come to.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "base/testing.h"
#include "engine/training/parallel.h"
#include "engine/training/testing.h"

namespace stretto::engine::testing {
inline constexpr int64_t kLength = 40;
inline constexpr DataParallel kLayouts[] = {DataParallel::kDdp, DataParallel::kZero1,
                                            DataParallel::kZero2, DataParallel::kFsdp};

inline std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
  PhiloxStream random(stretto::testing::Seed(), stream);
  std::vector<TrainBatch> batches;
  for (int i = 0; i < num_steps; ++i) batches.push_back(RandomBatch(config, kLength, random));
  return batches;
}

// What a run comes to.
struct Outcome {
  std::vector<double> losses, norms, entropies;
  std::vector<std::map<std::string, double>> metrics;
  std::vector<float> state;
  std::vector<uint8_t> weights;
  int64_t max_micro_batches = 0;
};

inline bool Same(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}
// "" or what differs.
inline std::string Difference(const Outcome& a, const Outcome& b) {
  if (!Same(a.losses, b.losses)) return "losses";
  if (!Same(a.norms, b.norms)) return "gradient norms";
  if (!Same(a.entropies, b.entropies)) return "entropies";
  if (a.metrics != b.metrics) return "metrics";
  if (!SameBits(a.state, b.state)) return "masters or moments";
  return a.weights == b.weights ? "" : "weights";
}

inline std::unique_ptr<TrainerEngine> EngineIn(Communicator* group, Device& device,
                                               const ModelConfig& config,
                                               const TrainerOptions& options) {
  auto engine = TrainerEngine::Create(device, config, options, Clock::Real(), group);
  STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
  STRETTO_CHECK((*engine)->InitRandom(7, 0.2).ok());
  return *std::move(engine);
}

inline void Take(TrainerEngine& engine, const std::vector<TrainBatch>& batches, Outcome& out) {
  for (const TrainBatch& batch : batches) {
    const auto result = engine.Step(batch, TestObjective());
    STRETTO_CHECK_MSG(result.ok(), std::string(result.status().message()).c_str());
    out.losses.push_back(result->loss);
    out.norms.push_back(result->grad_norm);
    out.entropies.push_back(result->entropy);
    out.metrics.push_back(result->metrics);
    out.max_micro_batches = std::max(out.max_micro_batches, result->num_micro_batches);
  }
  out.state = FullState(engine);
  const auto weights = engine.GatherWeights();
  STRETTO_CHECK(weights.ok());
  out.weights.clear();
  for (const Parameter& p : (*weights)->parameters()) {
    const auto bytes = (*weights)->bytes(p);
    out.weights.insert(out.weights.end(), bytes.begin(), bytes.end());
  }
}

inline Outcome RunIn(Communicator* group, const ModelConfig& config, const TrainerOptions& options,
                     const std::vector<TrainBatch>& batches) {
  const auto device = MakeDevice("cpu", 1);
  const auto engine = EngineIn(group, *device, config, options);
  Outcome out;
  Take(*engine, batches, out);
  return out;
}
}  // namespace stretto::engine::testing
