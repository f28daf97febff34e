// What tests of models in leaves share: runs in a group, and what they come to.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/training/outcome_testing.h"
#include "engine/training/tensor_parallel.h"
#include "engine/training/testing.h"

namespace stretto::engine::testing {
inline double RelativeError(absl::Span<const float> a, absl::Span<const float> b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// A random model whose heads divide by `heads`.
inline ModelConfig LeafConfig(PhiloxStream& random, int64_t heads) {
  ModelConfig c = testing::RandomConfig(random);
  c.num_heads = heads;
  c.num_kv_heads = 1 + static_cast<int64_t>(random.Below(heads));
  while (heads % c.num_kv_heads != 0) --c.num_kv_heads;
  c.head_dim = 8;
  return c;
}

inline std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
  PhiloxStream random(stretto::testing::Seed(), stream);
  std::vector<TrainBatch> batches;
  for (int i = 0; i < num_steps; ++i) batches.push_back(RandomBatch(config, kLength, random));
  // One row: most leaves, and most ranks, have none.
  if (num_steps > 1) batches[1].groups = {{{3}, {{{5}, {-1.0f}, {-2.0f}, {}, 1.0f}}}};
  return batches;
}

inline void Take(TrainerEngine& engine, const std::vector<TrainBatch>& batches, Outcome& out) {
  for (const TrainBatch& batch : batches) {
    const auto result = engine.Step(batch, TestObjective());
    STRETTO_CHECK_MSG(result.ok(), std::string(result.status().message()).c_str());
    out.losses.push_back(result->loss);
    out.norms.push_back(result->grad_norm);
    out.entropies.push_back(result->entropy);
  }
  out.state = FullState(engine);
  const auto logprobs = engine.LogProbs(batches.back());
  STRETTO_CHECK(logprobs.ok());
  for (const auto& values : {logprobs->logprobs, logprobs->entropy}) {
    for (const auto& group : values) {
      for (const auto& c : group) out.state.insert(out.state.end(), c.begin(), c.end());
    }
  }
  TakeWeights(engine, out);
}

inline Outcome RunIn(Communicator* group, const ModelConfig& config, const TrainerOptions& options,
                     const std::vector<TrainBatch>& batches, int num_threads = 1,
                     const std::string& backend = "cpu") {
  const auto device = MakeDevice(backend, num_threads);
  const auto engine = EngineIn(group, *device, config, options);
  Outcome out;
  Take(*engine, batches, out);
  return out;
}

struct Layout {
  DataParallel kind;
  int num_ranks, tensor_parallel;
};
inline void CheckLayouts(const ModelConfig& config, TrainerOptions options,
                         const std::vector<TrainBatch>& batches,
                         const std::vector<Layout>& layouts) {
  const Outcome alone = RunIn(nullptr, config, options, batches);
  CHECK(Difference(alone, RunIn(nullptr, config, options, batches, 2)) == "");
  for (const Layout& layout : layouts) {
    INFO(Name(layout.kind) << " on " << layout.num_ranks << ", of which " << layout.tensor_parallel
                           << " share a model of " << config.num_heads << " heads, "
                           << config.num_kv_heads << " of keys");
    options.parallel.kind = layout.kind;
    options.parallel.tensor_parallel = layout.tensor_parallel;
    const auto all = RunRanks<Outcome>(layout.num_ranks, [&](Communicator& c) {
      return RunIn(&c, config, options, batches, 1 + c.rank() % 2);
    });
    for (const Outcome& outcome : all) CHECK(Difference(alone, outcome) == "");
  }
}
}  // namespace stretto::engine::testing
