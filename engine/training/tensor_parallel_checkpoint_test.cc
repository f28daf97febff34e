// Checkpoints of a model in leaves, and models that can't be divided.
#include <catch2/catch.hpp>
#include <cstring>

#include "base/files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/training/checkpoint.h"
#include "engine/training/checkpoint_writer.h"
#include "engine/training/tensor_parallel_testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)

TEST_CASE("a checkpoint loads into any other layout of the same leaves") {
  PhiloxStream random(stretto::testing::Seed(), 140);
  const ModelConfig config = LeafConfig(random, 4);
  const std::vector<TrainBatch> batches = Batches(config, 4, 141);
  const std::vector<TrainBatch> first(batches.begin(), batches.begin() + 2);
  const std::vector<TrainBatch> rest(batches.begin() + 2, batches.end());
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.k_leaves = 4;
  options.parallel.reduction_leaves = 64;
  const stretto::testing::TempDir dir, other;
  Outcome undisturbed;
  std::string hash;
  {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(nullptr, *device, config, options);
    Outcome ignored;
    Take(*engine, first, ignored);
    const auto saved = SaveCheckpoint(Files::Real(), {other.path(), 3}, *engine, "{}");
    REQUIRE_OK(saved);
    hash = saved->checkpoint_hash;
    // Masters as an export reads them.
    std::vector<float> whole, rows;
    for (const Parameter& p : engine->layout().parameters()) {
      whole.resize(p.view.size());
      rows.resize(p.view.size());
      REQUIRE_OK(engine->DownloadState(StateTensor::kMaster, p, whole.data()));
      const int64_t half = p.view.rows / 2;
      REQUIRE_OK(engine->ReadRows(p, 0, half, DType::kF32, rows.data()));
      REQUIRE_OK(
          engine->ReadRows(p, half, p.view.rows, DType::kF32, rows.data() + half * p.view.cols));
      CHECK(SameBits(whole, rows));
    }
    Take(*engine, rest, undisturbed);
  }
  options.parallel.kind = DataParallel::kFsdp;
  options.parallel.tensor_parallel = 2;
  const stretto::testing::TempDir shards;
  const auto hashes = RunRanks<std::string>(4, [&](Communicator& c) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(&c, *device, config, options);
    Outcome out;
    Take(*engine, first, out);
    CheckpointWriterOptions sharded;
    sharded.root = shards.path();
    CheckpointWriter writer(Files::Real(), sharded);
    STRETTO_CHECK(writer.Start(*engine, "{}").ok());
    const auto saved =
        SaveCheckpoint(Files::Real(), {c.rank() == 2 ? dir.path() : "", 3}, *engine, "{}");
    STRETTO_CHECK(saved.ok());
    const auto report = writer.Wait();
    STRETTO_CHECK_MSG(report && report->status.ok(), std::string(report->status.message()).c_str());
    return saved->checkpoint_hash;
  });
  for (const std::string& h : hashes) CHECK(h == hash);
  {
    // A rank that is alone writes its leaves' rectangles.
    TrainerOptions alone = options;
    alone.parallel.tensor_parallel = 1;
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(nullptr, *device, config, alone);
    Outcome out;
    Take(*engine, first, out);
    stretto::testing::TempDir folder;
    CheckpointWriterOptions background;
    background.root = folder.path();
    CheckpointWriter writer(Files::Real(), background);
    REQUIRE_OK(writer.Start(*engine, "{}"));
    const auto report = writer.Wait();
    REQUIRE(report.has_value());
    CHECK(report->info.checkpoint_hash == hash);
  }
  // Each rank's share in files of its own: rectangles of the same state.
  const auto in_shards = LatestCheckpoint(Files::Real(), shards.path());
  REQUIRE_OK(in_shards);
  CHECK(ReadCheckpointInfo(Files::Real(), *in_shards)->checkpoint_hash == hash);
  const auto latest = LatestCheckpoint(Files::Real(), dir.path());
  REQUIRE_OK(latest);
  options.parallel.kind = DataParallel::kDdp;
  options.parallel.tensor_parallel = 4;
  for (const std::string& folder : {*latest, *in_shards}) {
    const auto outcomes = RunRanks<Outcome>(4, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = EngineIn(&c, *device, config, options);
      STRETTO_CHECK(LoadCheckpoint(Files::Real(), folder, *engine).ok());
      Outcome out;
      Take(*engine, rest, out);
      return out;
    });
    for (const Outcome& out : outcomes) CHECK(Difference(undisturbed, out) == "");
  }
}

TEST_CASE(
    "a rank that leaves ends the step for everybody, in its copy of the model and in others") {
  PhiloxStream random(stretto::testing::Seed(), 150);
  const ModelConfig config = LeafConfig(random, 4);
  const std::vector<TrainBatch> batches = Batches(config, 2, 151);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.k_leaves = 4;
  options.parallel.tensor_parallel = 2;
  options.parallel.reduction_leaves = 64;
  for (const DataParallel kind : {DataParallel::kDdp, DataParallel::kFsdp}) {
    INFO(Name(kind));
    options.parallel.kind = kind;
    const auto last = RunRanks<absl::Status>(4, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = EngineIn(&c, *device, config, options);
      absl::Status status = engine->Step(batches[0], TestObjective()).status();
      if (status.ok() && c.rank() != 1) status = engine->Step(batches[1], TestObjective()).status();
      return status;
    });
    CHECK(last[1].ok());
    for (const int r : {0, 2, 3}) {
      INFO("rank " << r << ": " << last[r].message());
      CHECK_FALSE(last[r].ok());
      CHECK_THAT(std::string(last[r].message()), Catch::Contains("(b)"));
    }
  }
}

TEST_CASE("models that can't be divided are refused, each with its reason") {
  ModelConfig config;
  config.vocab_size = 60;
  config.hidden_size = 48;
  config.intermediate_size = 64;
  config.num_layers = 1;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  const auto why = [&](int num_ranks, int64_t tensor_parallel, int64_t k_leaves) {
    ParallelOptions options;
    options.tensor_parallel = tensor_parallel;
    options.k_leaves = k_leaves;
    const absl::Status status = CheckTensorParallel(config, options, num_ranks);
    CHECK((status.ok() || absl::IsInvalidArgument(status)));
    return std::string(status.message());
  };
  using Catch::Contains;
  CHECK(why(6, 3, 6) == "");
  CHECK(why(4, 2, 2) == "");
  CHECK_THAT(why(4, 4, 4), Contains("6 query heads don't divide into tensor_parallel = 4"));
  CHECK_THAT(why(4, 2, 4), Contains("6 query heads don't divide into k_leaves = 4"));
  CHECK_THAT(why(3, 2, 2), Contains("tensor_parallel = 2 doesn't divide the 3 ranks"));
  CHECK_THAT(why(2, 2, 3), Contains("k_leaves = 3 must be a multiple of tensor_parallel = 2"));
  CHECK_THAT(why(2, 2, 1), Contains("k_leaves = 1 must be a multiple of tensor_parallel = 2"));
  CHECK_THAT(why(1, 0, 1), Contains("tensor_parallel must be at least 1, not 0"));
  CHECK_THAT(why(1, 1, 0), Contains("k_leaves must be at least 1, not 0"));
  config.intermediate_size = 4;
  CHECK_THAT(why(1, 1, 6), Contains("4 MLP columns don't divide into k_leaves = 6"));
  config.intermediate_size = 64;
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.tensor_parallel = 2;
  options.parallel.k_leaves = 2;
  const auto device = MakeDevice("cpu", 1);
  CHECK_THAT(std::string(TrainerEngine::Create(*device, config, options).status().message()),
             Contains("doesn't divide the 1 ranks"));
  const auto refused = RunRanks<absl::Status>(2, [&](Communicator& c) {
    const auto reference = MakeDevice("reference");
    return TrainerEngine::Create(*reference, config, options, Clock::Real(), &c).status();
  });
  for (const absl::Status& s : refused) {
    CHECK_THAT(std::string(s.message()), Contains("a device whose memory the host reaches"));
  }
}
}  // namespace
}  // namespace stretto::engine
