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
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using testing::FullState;
using testing::MakeDevice;
using testing::RandomBatch;
using testing::RandomConfig;
using testing::RunRanks;
using testing::SameBits;
using testing::SmallOptions;
using testing::TestObjective;

constexpr int64_t kLength = 40;
constexpr DataParallel kLayouts[] = {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2,
                                     DataParallel::kFsdp};

std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
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

bool Same(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}
// "" or what differs.
std::string Difference(const Outcome& a, const Outcome& b) {
  if (!Same(a.losses, b.losses)) return "losses";
  if (!Same(a.norms, b.norms)) return "gradient norms";
  if (!Same(a.entropies, b.entropies)) return "entropies";
  if (a.metrics != b.metrics) return "metrics";
  if (!SameBits(a.state, b.state)) return "masters or moments";
  return a.weights == b.weights ? "" : "weights";
}

std::unique_ptr<TrainerEngine> EngineIn(Communicator* group, Device& device,
                                        const ModelConfig& config, const TrainerOptions& options) {
  auto engine = TrainerEngine::Create(device, config, options, Clock::Real(), group);
  STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
  STRETTO_CHECK((*engine)->InitRandom(7, 0.2).ok());
  return *std::move(engine);
}

void Take(TrainerEngine& engine, const std::vector<TrainBatch>& batches, Outcome& out) {
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

Outcome RunIn(Communicator* group, const ModelConfig& config, const TrainerOptions& options,
              const std::vector<TrainBatch>& batches) {
  const auto device = MakeDevice("cpu", 1);
  const auto engine = EngineIn(group, *device, config, options);
  Outcome out;
  Take(*engine, batches, out);
  return out;
}

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

TEST_CASE(
    "a run goes on with one rank fewer, in another layout, with the bits of an undisturbed one") {
  PhiloxStream random(stretto::testing::Seed(), 101);
  const ModelConfig config = RandomConfig(random);
  const std::vector<TrainBatch> batches = Batches(config, 6, 102);
  const std::vector<TrainBatch> first(batches.begin(), batches.begin() + 3);
  const std::vector<TrainBatch> rest(batches.begin() + 3, batches.end());
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.reduction_leaves = 64;
  Outcome undisturbed;
  {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(nullptr, *device, config, options);
    Outcome ignored;
    Take(*engine, first, ignored);
    Take(*engine, rest, undisturbed);
  }
  const stretto::testing::TempDir dir;
  options.parallel.kind = DataParallel::kFsdp;
  const auto hashes = RunRanks<std::string>(3, [&](Communicator& c) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(&c, *device, config, options);
    Outcome out;
    Take(*engine, first, out);
    const auto saved =
        SaveCheckpoint(Files::Real(), {c.rank() == 1 ? dir.path() : "", 3}, *engine, "{}");
    STRETTO_CHECK(saved.ok());
    return saved->checkpoint_hash;
  });
  const auto latest = LatestCheckpoint(Files::Real(), dir.path());
  REQUIRE_OK(latest);
  for (const std::string& hash : hashes) {
    CHECK(hash == ReadCheckpointInfo(Files::Real(), *latest)->checkpoint_hash);
  }
  options.parallel.kind = DataParallel::kZero1;
  const auto outcomes = RunRanks<Outcome>(2, [&](Communicator& c) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(&c, *device, config, options);
    STRETTO_CHECK(LoadCheckpoint(Files::Real(), *latest, *engine).ok());
    Outcome out;
    Take(*engine, rest, out);
    return out;
  });
  for (const Outcome& out : outcomes) CHECK(Difference(undisturbed, out) == "");
}

TEST_CASE("a rank that leaves, or is given something else, ends the step for all with its name") {
  PhiloxStream random(stretto::testing::Seed(), 103);
  const ModelConfig config = RandomConfig(random);
  const std::vector<TrainBatch> batches = Batches(config, 2, 104);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.reduction_leaves = 64;
  for (const DataParallel kind : kLayouts) {
    INFO(Name(kind));
    options.parallel.kind = kind;
    const auto last = RunRanks<absl::Status>(3, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = EngineIn(&c, *device, config, options);
      absl::Status status = engine->Step(batches[0], TestObjective()).status();
      for (int i = 0; i < 2 && status.ok() && c.rank() != 1; ++i) {
        status = engine->Step(batches[1], TestObjective()).status();
      }
      return status;
    });
    CHECK(last[1].ok());
    for (const int r : {0, 2}) {
      CHECK(absl::IsUnavailable(last[r]));
      CHECK_THAT(std::string(last[r].message()), Catch::Contains("rank 1 (b)"));
    }
  }
  const auto differing = RunRanks<absl::Status>(3, [&](Communicator& c) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(&c, *device, config, options);
    return engine->Step(batches[c.rank() == 2 ? 1 : 0], TestObjective()).status();
  });
  for (const absl::Status& s : differing) {
    CHECK(absl::IsFailedPrecondition(s));
    CHECK_THAT(std::string(s.message()), Catch::Contains("different batches") &&
                                             Catch::Contains("rank 2 (c) against the rest"));
  }
}

TEST_CASE("layouts that can't be are refused, each with its reason") {
  PhiloxStream random(stretto::testing::Seed(), 105);
  const ModelConfig config = RandomConfig(random);
  const std::vector<TrainBatch> batches = Batches(config, 1, 106);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.reduction_leaves = 2;
  for (const absl::Status& s : RunRanks<absl::Status>(3, [&](Communicator& c) {
         const auto device = MakeDevice("cpu", 1);
         return TrainerEngine::Create(*device, config, options, Clock::Real(), &c).status();
       })) {
    CHECK(absl::IsInvalidArgument(s));
    CHECK_THAT(std::string(s.message()),
               Catch::Contains("reduction_leaves is 2, fewer than the 3"));
  }
  const auto device = MakeDevice("cpu", 1);
  options.parallel.kind = DataParallel::kFsdp;
  options.micro_batch_tokens = 1;
  const auto engine = EngineIn(nullptr, *device, config, options);
  const absl::Status many = engine->Step(batches[0], TestObjective()).status();
  CHECK(absl::IsInvalidArgument(many));
  CHECK_THAT(std::string(many.message()), Catch::Contains("reduction_leaves (2) must be at least"));
  CHECK_THAT(std::string(ParseDataParallel("zero9").status().message()),
             Catch::Contains("ddp, zero1, zero2 or fsdp"));
  CHECK(*ParseDataParallel("fsdp") == DataParallel::kFsdp);
  const auto reference = MakeDevice("reference");
  options.micro_batch_tokens = 100;
  CHECK_THAT(std::string(TrainerEngine::Create(*reference, config, options).status().message()),
             Catch::Contains("a device whose memory the host reaches"));
}
}  // namespace
}  // namespace stretto::engine
