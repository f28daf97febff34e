// Saves beside training, and when one is due.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "services/coordinator/core_bench.h"

namespace stretto::services {
namespace {
// A bench whose steps are taken as soon as they are asked for.
struct TrainingBench : Bench {
  using Bench::Bench;
  std::vector<Command> Take() {
    auto commands = Bench::Take();
    left.insert(left.end(), commands.begin(), commands.end());
    return commands;
  }
  // Brings everything as far as it goes without the trainer; all that was asked for meanwhile.
  std::vector<Command> ToTrainer() {
    std::vector<Command> all;
    for (Take(); !left.empty(); Take()) {
      const std::vector<Command> commands = std::exchange(left, {});
      for (const auto& c : Only<PrepareVersion>(commands)) core.OnPrepared(c, {}, now);
      for (const auto& c : Only<CommitVersion>(commands)) core.OnCommitted(c, {}, now);
      for (const auto& c : Only<TokenizePrompts>(commands)) {
        core.OnTokenized(c, {}, std::vector<Core::TokenizedPrompt>(c.groups.size(), {5, ""}), now);
      }
      for (const auto& c : Only<GenerateGroup>(commands)) {
        core.OnGenerated(c, {}, core.version_number(), now);
      }
      for (const auto& c : Only<ScoreGroup>(commands)) core.OnScored(c, {}, now);
      all.insert(all.end(), commands.begin(), commands.end());
    }
    return all;
  }
  void TakeOneStep() {
    const auto step = Only<TakeStep>(ToTrainer());
    REQUIRE(step.size() == 1);
    core.OnStepTaken(step[0], absl::OkStatus(), {step[0].step, "h"}, 0, now);
  }
  AwaitSave BeginOneSave() {
    const auto begin = Only<BeginSave>(Take());
    REQUIRE(begin.size() == 1);
    core.OnSaveBegun(begin[0], absl::OkStatus(), now);
    return {begin[0].member, begin[0].epoch, begin[0].group_epoch, begin[0].version};
  }
  std::vector<Command> left;  // that nobody has carried out
};

TEST_CASE("training goes on while a checkpoint is written, and it counts when it is there") {
  TrainingBench b({.num_steps = 9, .checkpoint_every = 2});
  b.TakeOneStep();
  CHECK(Only<BeginSave>(b.ToTrainer()).empty());
  TrainingBench c({.num_steps = 9, .checkpoint_every = 2});
  c.TakeOneStep();
  c.TakeOneStep();
  const AwaitSave save = c.BeginOneSave();
  CHECK(save.version == 2);
  c.TakeOneStep();
  c.TakeOneStep();
  c.TakeOneStep();  // version 5: the save of version 4 waits for its turn
  auto commands = c.ToTrainer();
  CHECK(Only<BeginSave>(commands).empty());
  CHECK(Only<RecordCheckpoint>(commands).empty());
  const auto step = Only<TakeStep>(commands);
  REQUIRE(step.size() == 1);
  CHECK(c.core.OnSaveOver(save, absl::OkStatus(), {"", 3.0}, c.now));
  CHECK_FALSE(c.core.OnSaveOver(save, absl::OkStatus(), {"", 3.0}, c.now));  // told twice
  commands = c.Take();
  const auto recorded = Only<RecordCheckpoint>(commands);
  REQUIRE(recorded.size() == 1);
  CHECK(recorded[0].version == 2);
  CHECK(Only<BeginSave>(commands).empty());  // a step is under way
  c.core.OnStepTaken(step[0], absl::OkStatus(), {6, "h"}, 0, c.now);
  CHECK(c.BeginOneSave().version == 6);
}

TEST_CASE("a checkpoint that can't be saved is told of and tried again, or ends the run") {
  for (const bool stops : {false, true}) {
    TrainingBench b({.num_steps = 9, .checkpoint_every = 2, .stop_on_failed_save = stops});
    b.TakeOneStep();
    b.TakeOneStep();
    const AwaitSave save = b.BeginOneSave();
    b.Take();
    CHECK_FALSE(b.core.OnSaveOver(save, absl::OkStatus(), {"no space left on device", 1}, b.now));
    CHECK(b.core.checkpoints().num_failures == 1);
    CHECK(b.core.checkpoints().version == -1);
    const auto commands = b.Take();
    CHECK(Only<RecordCheckpoint>(commands).empty());
    if (stops) {
      const auto end = Only<EndRun>(commands);
      REQUIRE(end.size() == 1);
      CHECK(absl::StrContains(end[0].status.message(), "version 2 could not be saved"));
      CHECK(absl::StrContains(end[0].status.message(), "no space left on device"));
      continue;
    }
    const auto events = Only<RecordEvent>(commands);
    REQUIRE(events.size() == 1);
    CHECK(absl::StrContains(events[0].text, "no space left on device"));
    CHECK(absl::StrContains(events[0].text, "there is none yet"));
    b.TakeOneStep();
    CHECK(Only<BeginSave>(b.ToTrainer()).empty());  // not at once
    for (const char* name : {"t", "g", "s"}) b.core.OnHeartbeat(name, 1, kSecond);
    b.now = kSecond;
    CHECK(b.core.checkpoints().not_before_ns < kSecond);
  }
}

TEST_CASE("a stop doesn't wait for a save that keeps failing") {
  TrainingBench b({.num_steps = 9, .checkpoint_every = 1});
  b.TakeOneStep();
  const auto fail = [&b] {
    const AwaitSave save = b.BeginOneSave();
    CHECK_FALSE(b.core.OnSaveOver(save, absl::OkStatus(), {"no space left on device", 1}, b.now));
  };
  fail();
  CHECK(b.core.checkpoints().not_before_ns > b.now);
  b.Take();
  b.core.OnStop(b.now);  // tried again at once, and twice more
  for (int i = 0; i < 3; ++i) {
    CHECK(b.core.phase() == RunPhase::kStopping);
    fail();
    if (i == 2) break;
    b.now = b.core.checkpoints().not_before_ns;
    for (const char* name : {"t", "g", "s"}) b.core.OnHeartbeat(name, 1, b.now);
    b.core.OnTick(b.now);
  }
  CHECK(b.core.phase() == RunPhase::kDone);
  const auto end = Only<EndRun>(b.Take());
  REQUIRE(end.size() == 1);
  CHECK(end[0].status.ok());
  CHECK(absl::StrContains(end[0].detail, "could not be saved"));
}

TEST_CASE("a save whose trainer is lost is none; the next life is asked anew") {
  TrainingBench b({.num_steps = 9, .checkpoint_every = 1});
  b.TakeOneStep();
  const AwaitSave save = b.BeginOneSave();
  REQUIRE(b.core.OnRegister("t", PoolKind::kTrainer, "t:1", {1, "h"}, 0).ok());
  CHECK_FALSE(b.core.OnSaveOver(save, absl::OkStatus(), {}, 0));
  const auto commands = b.Take();
  CHECK(Only<RecordCheckpoint>(commands).empty());
  const auto again = Only<BeginSave>(commands);
  REQUIRE(again.size() == 1);
  CHECK(again[0].version == 1);
  CHECK(again[0].epoch == 2);
}

TEST_CASE("the interval between checkpoints follows from what one takes and how often ranks fail") {
  // 60 s to write, a failure a day: Young's estimate is 3220 s.
  CHECK(CheckpointIntervalSeconds(60, 86400) == Approx(3180).epsilon(0.01));
  CHECK(CheckpointIntervalSeconds(0.001, 86400) == Approx(13.15).epsilon(0.01));
  CHECK(CheckpointIntervalSeconds(100, 40) == 40);
  TrainingBench b(
      {.num_steps = 9, .checkpoint_every = kAutoCheckpoints, .lease_ns = 1000 * kSecond});
  b.TakeOneStep();
  const AwaitSave first = b.BeginOneSave();  // at once: it measures
  CHECK(b.core.OnSaveOver(first, absl::OkStatus(), {"", 0.001}, b.now));
  b.now = 13 * kSecond;
  b.TakeOneStep();
  CHECK(Only<BeginSave>(b.Take()).empty());
  b.now = 14 * kSecond;
  b.core.OnTick(b.now);
  CHECK(b.BeginOneSave().version == 2);
}
}  // namespace
}  // namespace stretto::services
