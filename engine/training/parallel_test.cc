// Ranks that train together: the same bits for every number of them and every layout, the bytes
// that the formulas promise, and clear errors where they can't go on.
#include "engine/training/parallel.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/training/checkpoint.h"
#include "engine/training/parallel_testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)

TEST_CASE("leaves are dealt by index alone, and every leaf has one rank") {
  PhiloxStream random(stretto::testing::Seed(), 90);
  for (int round = 0; round < 300; ++round) {
    const auto M = 1 + static_cast<int64_t>(random.Below(20));
    const int N = 1 + static_cast<int>(random.Below(5));
    const auto L = N + static_cast<int64_t>(random.Below(20));
    INFO("M " << M << " L " << L << " N " << N);
    const LeafPlan plan(M, L, N);
    int64_t next = 0, num_used = 0;
    for (int64_t leaf = 0; leaf < L; ++leaf) {
      const auto [begin, end] = plan.MicroBatchesOf(leaf);
      CHECK(begin == next);
      CHECK(plan.used()[leaf] == (begin < end));
      for (int64_t i = begin; i < end; ++i) CHECK(i * L / M == leaf);
      next = end;
      num_used += begin < end ? 1 : 0;
    }
    CHECK(next == M);
    if (L >= M) CHECK(num_used == M);
    std::vector<int64_t> by_range, by_turn;
    for (int r = 0; r < N; ++r) {
      for (const int64_t leaf : plan.LeavesOf(r)) by_range.push_back(leaf);
    }
    for (int64_t j = 0; j < plan.num_rounds(); ++j) {
      for (const int64_t leaf : plan.Round(j)) {
        if (leaf >= 0) by_turn.push_back(leaf);
      }
    }
    CHECK(static_cast<int64_t>(by_range.size()) == num_used);
    CHECK(by_range == by_turn);
  }
}

TEST_CASE("every element has one owner, and ranks own about the same") {
  PhiloxStream random(stretto::testing::Seed(), 91);
  for (int round = 0; round < 50; ++round) {
    const ParameterLayout layout(RandomConfig(random));
    for (int n = 1; n <= 5; ++n) {
      const ShardMap map(layout, n);
      int64_t next = 0;
      for (size_t i = 0; i < map.parts().size(); ++i) {
        const ShardMap::Part& u = map.parts()[i];
        CHECK(u.begin == next);
        CHECK(map.PartOf(u.begin) == static_cast<int64_t>(i));
        CHECK(map.PartOf(u.end - 1) == static_cast<int64_t>(i));
        int64_t offset = 0;
        for (int r = 0; r < n; ++r) {
          CHECK(u.offsets[r] == offset);
          CHECK((offset % ShardMap::kBlock == 0 || u.counts[r] == 0));
          offset += u.counts[r];
        }
        CHECK(offset == u.size());
        next = u.end;
      }
      CHECK(next == layout.size());
    }
  }
}

TEST_CASE("one to four ranks end twenty steps with the same bits, in every layout") {
  PhiloxStream random(stretto::testing::Seed(), 92);
  INFO("seed " << stretto::testing::Seed());
  const ModelConfig config = RandomConfig(random);
  const std::vector<TrainBatch> batches = Batches(config, 20, 93);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.reduction_leaves = 64;
  options.parallel.bucket_bytes = 4096;
  const Outcome alone = RunIn(nullptr, config, options, batches);
  REQUIRE(alone.max_micro_batches > 1);
  REQUIRE(alone.max_micro_batches <= 64);
  for (const DataParallel kind : kLayouts) {
    for (int n = 1; n <= 4; ++n) {
      INFO(Name(kind) << " on " << n);
      options.parallel.kind = kind;
      options.parallel.max_gathered_layers = n;
      const auto all = RunRanks<Outcome>(
          n, [&](Communicator& c) { return RunIn(&c, config, options, batches); });
      for (const Outcome& outcome : all) CHECK(Difference(alone, outcome) == "");
    }
  }
}

TEST_CASE("a critic has the same values and the same bits in every layout") {
  PhiloxStream random(stretto::testing::Seed(), 98);
  INFO("seed " << stretto::testing::Seed());
  const ModelConfig config = WithValueHead(RandomConfig(random));
  const std::vector<TrainBatch> batches = Batches(config, 3, 99);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.reduction_leaves = 64;
  struct Learned {
    Outcome outcome;
    std::vector<float> values;
  };
  const auto run = [&](Communicator* group) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(group, *device, config, options);
    Learned learned;
    Take(*engine, batches, learned.outcome);
    const auto values = engine->LogProbs(batches[0]);
    STRETTO_CHECK(values.ok());
    for (const auto& of_group : values->logprobs) {
      for (const auto& v : of_group) {
        learned.values.insert(learned.values.end(), v.begin(), v.end());
      }
    }
    return learned;
  };
  const Learned alone = run(nullptr);
  REQUIRE(alone.outcome.norms[0] > 0);
  for (const DataParallel kind : kLayouts) {
    options.parallel.kind = kind;
    INFO(Name(kind));
    for (const Learned& l : RunRanks<Learned>(3, [&](Communicator& c) { return run(&c); })) {
      CHECK(Difference(alone.outcome, l.outcome) == "");
      CHECK(SameBits(alone.values, l.values));
    }
  }
}

TEST_CASE("leaves of several micro-batches, weight decay, recomputation: the same bits") {
  PhiloxStream random(stretto::testing::Seed(), 94);
  for (int round = 0; round < 3; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const ModelConfig config = RandomConfig(random);
    const std::vector<TrainBatch> batches = Batches(config, 3, 95 + round);
    TrainerOptions options = SmallOptions(kLength);
    options.micro_batch_tokens = 30;
    options.weight_decay = 0.1;
    options.checkpointing = round == 1 ? Checkpointing::kFull : Checkpointing::kSelective;
    options.dtype = round == 2 ? DType::kF32 : DType::kBF16;
    for (const int64_t leaves : {4, 7}) {
      options.parallel.reduction_leaves = leaves;
      options.parallel.kind = DataParallel::kDdp;
      const Outcome alone = RunIn(nullptr, config, options, batches);
      for (const DataParallel kind : {DataParallel::kDdp, DataParallel::kZero1}) {
        for (int n = 2; n <= 4; ++n) {
          INFO(Name(kind) << " on " << n << ", " << leaves << " leaves");
          options.parallel.kind = kind;
          const auto all = RunRanks<Outcome>(
              n, [&](Communicator& c) { return RunIn(&c, config, options, batches); });
          for (const Outcome& outcome : all) CHECK(Difference(alone, outcome) == "");
        }
      }
    }
    options.parallel.reduction_leaves = 128;
    options.parallel.kind = DataParallel::kDdp;
    const Outcome alone = RunIn(nullptr, config, options, batches);
    options.parallel.kind = DataParallel::kFsdp;
    const auto all =
        RunRanks<Outcome>(3, [&](Communicator& c) { return RunIn(&c, config, options, batches); });
    for (const Outcome& outcome : all) CHECK(Difference(alone, outcome) == "");
  }
}

TEST_CASE("one leaf is a single accumulation, whatever divides the state of one rank") {
  PhiloxStream random(stretto::testing::Seed(), 96);
  const ModelConfig config = RandomConfig(random);
  std::vector<TrainBatch> batches = Batches(config, 3, 97);
  for (TrainBatch& batch : batches) {
    for (TrainGroup& g : batch.groups) g.completions[0].advantage = 1;
  }
  TrainerOptions options = SmallOptions(kLength);
  options.micro_batch_tokens = 4000;
  const Outcome plain = RunIn(nullptr, config, options, batches);
  REQUIRE(plain.max_micro_batches == 1);
  for (const DataParallel kind : kLayouts) {
    INFO(Name(kind));
    options.parallel.kind = kind;
    CHECK(Difference(plain, RunIn(nullptr, config, options, batches)) == "");
  }
}

// Without an advantage there is no gradient.
class WhereAdvantage final : public Objective {
 public:
  void Evaluate(const ObjectiveInput& in, ObjectiveOutput& out) const override {
    for (size_t c = 0; c < in.advantages.size(); ++c) {
      for (int64_t t = in.completion_begin[c]; t < in.completion_begin[c + 1]; ++t) {
        out.loss -= double{in.advantages[c]} * in.logprobs[t];
        out.d_logprobs[t] = -in.advantages[c] / static_cast<float>(in.step_tokens);
      }
    }
  }
};

// Unequal work: one micro-batch for three ranks, then some that need no backward pass at all.
// Steps that must succeed, and what they came to.
void TakeSteps(TrainerEngine& engine, const std::vector<TrainBatch>& batches, Outcome& out) {
  for (const TrainBatch& batch : batches) {
    const auto result = engine.Step(batch, WhereAdvantage());
    STRETTO_CHECK_MSG(result.ok(), std::string(result.status().message()).c_str());
    out.losses.push_back(result->loss);
    out.norms.push_back(result->grad_norm);
    out.max_micro_batches = std::max(out.max_micro_batches, result->num_micro_batches);
  }
}

TEST_CASE("ranks without work of their own take part all the same") {
  PhiloxStream random(stretto::testing::Seed(), 98);
  const ModelConfig config = RandomConfig(random);
  std::vector<TrainBatch> batches = Batches(config, 4, 99);
  batches[0].groups.resize(1);
  batches[0].groups[0].completions.resize(1);
  for (TrainGroup& g : batches[1].groups) {
    for (TrainCompletion& c : g.completions) c.advantage = 0;
  }
  for (TrainCompletion& c : batches[2].groups.back().completions) c.advantage = 0;
  TrainerOptions options = SmallOptions(kLength);
  options.micro_batch_tokens = 30;
  options.parallel.reduction_leaves = 64;
  const auto run = [&](Communicator* group) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(group, *device, config, options);
    Outcome out;
    TakeSteps(*engine, batches, out);
    out.state = FullState(*engine);
    return out;
  };
  const Outcome alone = run(nullptr);
  CHECK(alone.norms[1] == 0);
  for (const DataParallel kind : kLayouts) {
    INFO(Name(kind));
    options.parallel.kind = kind;
    for (const Outcome& out : RunRanks<Outcome>(3, [&](Communicator& c) { return run(&c); })) {
      CHECK(Difference(alone, out) == "");
    }
  }
}

ModelConfig EvenModel() {
  ModelConfig config;
  config.vocab_size = 64;
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.num_layers = 6;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.max_position_embeddings = 64;
  config.tie_word_embeddings = true;
  return config;
}

// Large enough that layers are sent in three parts and a tied embedding's gradient in two halves.
TEST_CASE("gradients that are sent in parts have the same bits") {
  ModelConfig config = EvenModel();
  config.vocab_size = 500;
  config.num_layers = 2;
  const ShardMap map(ParameterLayout(config), 3);
  REQUIRE(map.PartsOf(1).second - map.PartsOf(1).first == 3);
  for (const bool tied : {true, false}) {
    config.tie_word_embeddings = tied;
    std::vector<TrainBatch> batches = Batches(config, 3, 107);
    for (TrainCompletion& c : batches[1].groups.back().completions) c.advantage = 0;
    for (TrainCompletion& c : batches[2].groups.front().completions) c.advantage = 0;
    TrainerOptions options = SmallOptions(kLength);
    options.micro_batch_tokens = 50;
    const auto run = [&](Communicator* group) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = EngineIn(group, *device, config, options);
      Outcome out;
      TakeSteps(*engine, batches, out);
      out.state = FullState(*engine);
      // Of what is sent to each rank alone there is nothing else.
      const bool in_halves =
          group != nullptr && group->traffic(CollectiveKind::kAllToAll).bytes_sent > 0;
      STRETTO_CHECK(group == nullptr || in_halves == tied);
      return out;
    };
    for (const int64_t leaves : {3, 64}) {  // several micro-batches in a leaf, or one
      options.parallel.reduction_leaves = leaves;
      options.parallel.kind = DataParallel::kDdp;
      const Outcome alone = run(nullptr);
      REQUIRE(alone.max_micro_batches > 3);
      for (const DataParallel kind : kLayouts) {
        options.parallel.kind = kind;
        if (options.parallel.streams_gradients() != (leaves == 64)) continue;
        INFO(Name(kind) << ", tied " << tied);
        for (const Outcome& out : RunRanks<Outcome>(3, [&](Communicator& c) { return run(&c); })) {
          CHECK(Difference(alone, out) == "");
        }
      }
    }
  }
}

TEST_CASE("bytes held and bytes sent are those of the formulas") {
  const ModelConfig config = EvenModel();
  const auto P = static_cast<double>(ParameterLayout(config).size());
  // A micro-batch for each rank, with gradients.
  const auto batch_for = [](int num_ranks) {
    TrainBatch batch;
    batch.groups.resize(num_ranks);
    for (TrainGroup& g : batch.groups) {
      g.prompt_ids = {1, 2, 3};
      g.completions.resize(1);
      g.completions[0].ids = {4, 5, 6, 7, 8, 9};
      g.completions[0].advantage = 1;
    }
    return batch;
  };
  TrainerOptions options = SmallOptions(kLength);
  options.micro_batch_tokens = 9;
  options.parallel.reduction_leaves = 4;
  struct Seen {
    MemoryLedger memory;
    CollectiveTraffic reduced, scattered, gathered, exchanged;
  };
  const auto within = [](double value, double expected) {
    return Approx(expected).epsilon(0.05) == value;
  };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    options.dtype = dtype;
    const double W = static_cast<double>(SizeOf(dtype)), G = 4;
    for (const DataParallel kind : kLayouts) {
      for (const int n : {2, 4}) {
        INFO(Name(kind) << " on " << n << ", " << Name(dtype));
        options.parallel.kind = kind;
        const auto body = [&](Communicator& c) {
          const auto device = MakeDevice("cpu", 1);
          const auto engine = EngineIn(&c, *device, config, options);
          const auto before = c.traffic(CollectiveKind::kAllGather);
          const auto result = engine->Step(batch_for(n), TestObjective());
          STRETTO_CHECK(result.ok() && result->num_micro_batches == n);
          Seen seen{engine->memory(), c.traffic(CollectiveKind::kAllReduce),
                    c.traffic(CollectiveKind::kReduceScatter),
                    c.traffic(CollectiveKind::kAllGather), c.traffic(CollectiveKind::kAllToAll)};
          seen.gathered.bytes_sent -= before.bytes_sent;
          seen.gathered.bytes_received -= before.bytes_received;
          return seen;
        };
        const double all = W + G + 12;
        const double expected = kind == DataParallel::kDdp     ? all * P
                                : kind == DataParallel::kZero1 ? (W + G) * P + 12 * P / n
                                : kind == DataParallel::kZero2 ? W * P + (G + 12) * P / n
                                                               : all * P / n;
        double sent = 0, held = 0;
        for (const Seen& s : RunRanks<Seen>(n, body)) {
          const auto own =
              static_cast<double>(s.memory.weights + s.memory.gradients + s.memory.optimizer);
          CHECK(own <= 1.05 * expected);
          held += own / n;
          // Windows: both ends and two layers of gradients, and under fsdp as many layers of
          // weights as are gathered at once.
          if (options.parallel.streams_gradients()) {
            const ShardMap map(ParameterLayout(config), n);
            const int64_t ends = map.UnitSize(0) + map.UnitSize(map.num_units() - 1);
            const auto windows = [&](int64_t layers) {
              return static_cast<double>(layers * map.largest_layer() + ends);
            };
            const int64_t gathered =
                std::min(options.parallel.max_gathered_layers, config.num_layers);
            CHECK(static_cast<double>(s.memory.windows) ==
                  G * windows(2) + (kind == DataParallel::kFsdp ? W * windows(gathered) : 0));
          }
          sent += static_cast<double>(s.reduced.bytes_sent + s.scattered.bytes_sent +
                                      s.gathered.bytes_sent + s.exchanged.bytes_sent);
        }
        CHECK(within(held, expected));
        // A rank's mean: blocks make shares uneven, but not the sum of what all send.
        sent /= n;
        const double share = (n - 1.0) / n * P;
        switch (kind) {
          case DataParallel::kDdp:  // AllReduce: 2M of gradients
            CHECK(within(sent, share * 2 * G));
            break;
          case DataParallel::kZero1:
          case DataParallel::kZero2:  // M of gradients, M of weights
            CHECK(within(sent, share * (G + W)));
            break;
          case DataParallel::kFsdp:  // M of weights twice, M of gradients
            CHECK(within(sent, share * (2 * W + G)));
            break;
        }
      }
    }
  }
}

}  // namespace
}  // namespace stretto::engine
