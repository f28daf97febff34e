// What tests of ranks that train together share: runs in a group, and what they come to.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "base/testing.h"
#include "engine/training/outcome_testing.h"
#include "engine/training/parallel.h"
#include "engine/training/testing.h"

namespace stretto::engine::testing {
inline constexpr DataParallel kLayouts[] = {DataParallel::kDdp, DataParallel::kZero1,
                                            DataParallel::kZero2, DataParallel::kFsdp};

inline std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
  PhiloxStream random(stretto::testing::Seed(), stream);
  std::vector<TrainBatch> batches;
  for (int i = 0; i < num_steps; ++i) batches.push_back(RandomBatch(config, kLength, random));
  return batches;
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
  TakeWeights(engine, out);
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
