// Ranks that train together when something is amiss: one is lost, one is given something else, or
// the layout can't be.
#include <catch2/catch.hpp>

#include "base/files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/training/checkpoint.h"
#include "engine/training/parallel_testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)

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
