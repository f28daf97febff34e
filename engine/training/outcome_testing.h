// What a run of ranks comes to, for tests that compare runs in any layout with one that is alone.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/testing.h"
#include "engine/training/testing.h"

namespace stretto::engine::testing {
inline constexpr int64_t kLength = 40;

// What a run comes to.
struct Outcome {
  std::vector<double> losses, norms, entropies;
  std::vector<std::map<std::string, double>> metrics;
  std::vector<float> state;
  std::vector<uint8_t> weights;
  int64_t max_micro_batches = 0;
};

inline bool Same(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}
// "" or what differs.
inline std::string Difference(const Outcome& a, const Outcome& b) {
  if (!Same(a.losses, b.losses)) return "losses";
  if (!Same(a.norms, b.norms)) return "gradient norms";
  if (!Same(a.entropies, b.entropies)) return "entropies";
  if (a.metrics != b.metrics) return "metrics";
  if (!SameBits(a.state, b.state)) return "masters, moments or log-probs";
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

inline void TakeWeights(TrainerEngine& engine, Outcome& out) {
  const auto weights = engine.GatherWeights();
  STRETTO_CHECK(weights.ok());
  out.weights.clear();
  for (const Parameter& p : (*weights)->parameters()) {
    const auto bytes = (*weights)->bytes(p);
    out.weights.insert(out.weights.end(), bytes.begin(), bytes.end());
  }
}
}  // namespace stretto::engine::testing
