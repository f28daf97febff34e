#include "services/coordinator/core.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/match.h"
#include "services/coordinator/balance.h"
#include "services/coordinator/core_bench.h"
#include "services/coordinator/run_clock.h"

namespace stretto::services {
namespace {
TEST_CASE("a step goes from prompts to a version") {
  Bench b;
  auto commands = b.Tokenize(b.Sync());
  auto generate = Only<GenerateGroup>(commands);
  REQUIRE(generate.size() == 2);
  CHECK(generate[0].expected == Version{0, "h0"});
  for (const auto& g : generate) CHECK(b.core.OnGenerated(g, absl::OkStatus(), 0, 0));
  CHECK_FALSE(b.core.OnGenerated(generate[0], absl::OkStatus(), 0, 0));  // twice
  for (const auto& s : Only<ScoreGroup>(b.Take())) CHECK(b.core.OnScored(s, absl::OkStatus(), 0));
  commands = b.Take();
  const auto batch = Only<RecordBatch>(commands);
  const auto step = Only<TakeStep>(commands);
  REQUIRE(batch.size() == 1);
  REQUIRE(step.size() == 1);
  CHECK(batch[0].groups.size() == 2);
  CHECK(step[0].base == Version{0, "h0"});
  CHECK(b.core.OnStepTaken(step[0], absl::OkStatus(), {1, "h1"}, 0, 0));
  CHECK(b.core.version() == Version{1, "h1"});
  // Nothing of step 2 is dispatched before the generator has version 1.
  commands = b.Take();
  const auto prepared = b.Tokenize(commands);
  CHECK(Only<GenerateGroup>(prepared).empty());
  REQUIRE(Only<PrepareVersion>(commands).size() == 1);
  b.core.OnPrepared(Only<PrepareVersion>(commands)[0], absl::OkStatus(), 0);
  const auto commit = Only<CommitVersion>(b.Take());
  REQUIRE(commit.size() == 1);
  b.core.OnCommitted(commit[0], absl::OkStatus(), 0);
  CHECK(Only<GenerateGroup>(b.Take()).size() == 2);
}

TEST_CASE("with staleness 1 the next step is generated during training") {
  Bench b({.max_staleness = 1});
  const auto commands = b.Tokenize(b.Sync());
  const auto generate = Only<GenerateGroup>(commands);
  CHECK(generate.size() == 4);
  CHECK(generate[0].expected.number == -1);
}

// Generated and scored; what the core does then.
std::vector<Command> Complete(Bench& b, const std::vector<GenerateGroup>& groups, int64_t version) {
  for (const auto& g : groups) CHECK(b.core.OnGenerated(g, absl::OkStatus(), version, 0));
  std::vector<Command> commands = b.Take(), all;
  while (!Only<ScoreGroup>(commands).empty()) {
    for (const auto& s : Only<ScoreGroup>(commands)) CHECK(b.core.OnScored(s, absl::OkStatus(), 0));
    all.insert(all.end(), commands.begin(), commands.end());
    commands = b.Take();
  }
  all.insert(all.end(), commands.begin(), commands.end());
  return all;
}

TEST_CASE("a step takes complete groups of the next in place of those that are on their way") {
  Bench b({.num_steps = 9, .max_staleness = 1});
  const auto first = Only<GenerateGroup>(b.Tokenize(b.Sync()));
  REQUIRE(first.size() == 4);  // of steps 1, 1, 2 and 2
  const auto batch_of = [](const std::vector<Command>& commands) {
    const auto batches = Only<RecordBatch>(commands);
    return batches.empty() ? std::vector<uint64_t>() : batches[0].groups;
  };
  CHECK(batch_of(Complete(b, {first[1]}, 0)).empty());
  auto commands = Complete(b, {first[2]}, 0);
  CHECK(batch_of(commands) == std::vector<uint64_t>{first[1].group, first[2].group});
  CHECK(b.core.num_brought_forward() == 1);
  CHECK(b.core.groups().at(first[0].group).round == 2);
  CHECK(b.core.groups().at(first[2].group).round == 1);
  // The journal is told of both before.
  std::map<uint64_t, int64_t> rounds;
  for (const auto& record : Only<RecordGroup>(commands))
    rounds[record.group.id] = record.group.round;
  CHECK(rounds.at(first[0].group) == 2);
  CHECK(rounds.at(first[2].group) == 1);

  // What began with version 0 is trained on in step 2 at the latest, whatever else is complete.
  const auto step = Only<TakeStep>(commands);
  REQUIRE(step.size() == 1);
  CHECK(b.core.OnStepTaken(step[0], absl::OkStatus(), {1, "h1"}, 0, 0));
  const auto later = Only<GenerateGroup>(b.Tokenize(b.Sync()));
  REQUIRE(later.size() == 2);
  CHECK(batch_of(Complete(b, {first[3]}, 0)).empty());
  CHECK(batch_of(Complete(b, later, 1)).empty());
  CHECK(batch_of(Complete(b, {first[0]}, 0)) ==
        std::vector<uint64_t>{first[0].group, first[3].group});
  CHECK(b.core.num_brought_forward() == 1);
}

TEST_CASE("on-policy, steps are trained on in the order of the prompts") {
  Bench b({.num_steps = 9});
  const auto generate = Only<GenerateGroup>(b.Tokenize(b.Sync()));
  REQUIRE(generate.size() == 2);
  CHECK(Only<RecordBatch>(Complete(b, {generate[1]}, 0)).empty());
  CHECK(Only<RecordBatch>(Complete(b, {generate[0]}, 0)).size() == 1);
  CHECK(b.core.num_brought_forward() == 0);
}

TEST_CASE("long, empty and unreadable prompts are replaced within a bound") {
  Bench b({.max_group_replacements = 3});
  auto commands = b.Tokenize(b.Sync(), /*length=*/11);
  CHECK(b.core.num_rejected() == 2);
  CHECK(Only<TokenizePrompts>(commands).size() == 1);  // for two more prompts
  commands = b.Tokenize(commands, /*length=*/0);
  const auto end = Only<EndRun>(commands);
  REQUIRE(end.size() == 1);
  CHECK(absl::IsResourceExhausted(end[0].status));
  CHECK(absl::StrContains(end[0].detail, "the prompt is empty"));
  CHECK(b.core.phase() == RunPhase::kFailed);
}

TEST_CASE("a silent generator's work goes to another and its late answer is refused") {
  Bench b;
  const auto commands = b.Tokenize(b.Sync());
  const auto generate = Only<GenerateGroup>(commands);
  const uint64_t epoch = generate[0].epoch;
  REQUIRE(b.core.OnRegister("g2", PoolKind::kGenerator, "g2:1", {0, "h0"}, 5 * kSecond).ok());
  b.core.OnHeartbeat("s", 1, 5 * kSecond);
  b.core.OnHeartbeat("t", 1, 5 * kSecond);
  b.core.OnTick(6 * kSecond);
  const auto after = b.Take();
  CHECK(Only<CancelGenerate>(after).size() == 2);
  const auto again = Only<GenerateGroup>(after);
  REQUIRE(again.size() == 2);
  CHECK(again[0].member == "g2");
  CHECK_FALSE(b.core.OnGenerated(generate[0], absl::OkStatus(), 0, 6 * kSecond));
  CHECK_FALSE(b.core.OnHeartbeat("g", epoch, 6 * kSecond));
  CHECK(b.core.OnRegister("g", PoolKind::kGenerator, "g:1", {0, "h0"}, 6 * kSecond).value() ==
        epoch + 1);
}

int64_t NumFaults(const std::vector<Command>& commands, const std::string& kind) {
  const auto faults = Only<CountFault>(commands);
  return std::count_if(faults.begin(), faults.end(),
                       [&](const CountFault& fault) { return fault.kind == kind; });
}

TEST_CASE("what goes wrong is counted by kind and member") {
  Bench b;
  const auto generate = Only<GenerateGroup>(b.Tokenize(b.Sync()));
  b.core.OnHeartbeat("s", 1, 5 * kSecond);
  b.core.OnHeartbeat("t", 1, 5 * kSecond);
  b.core.OnTick(6 * kSecond);
  auto commands = b.Take();
  CHECK(NumFaults(commands, "silent_member") == 1);
  CHECK(Only<CancelGenerate>(commands)[0].member == "g");
  CHECK_FALSE(b.core.OnGenerated(generate[0], absl::OkStatus(), 0, 6 * kSecond));
  CHECK(NumFaults(b.Take(), "late_answer") == 1);
}

TEST_CASE("a generator whose answers cannot be true is asked less and less, its groups stay") {
  Bench b;
  auto generate = Only<GenerateGroup>(b.Tokenize(b.Sync()));
  REQUIRE(generate.size() == 2);
  int num_asked = 0;
  for (int64_t ms = 0; ms < 20000; ms += 50) {
    const int64_t now = ms * 1'000'000;
    for (const char* name : {"t", "s", "g"}) b.core.OnHeartbeat(name, 1, now);
    b.core.OnTick(now);
    for (const auto& g : Only<GenerateGroup>(b.Take())) generate.push_back(g);
    for (const auto& g : std::exchange(generate, {})) {
      ++num_asked;
      b.core.OnGenerated(g, absl::DataLossError("tokens of version 99"), 99, now);
    }
  }
  CHECK(num_asked > 3);
  CHECK(num_asked < 14);  // after 0.3 s, 0.6 s, 1.2 s, …
  CHECK(b.core.num_rejected() == 0);
}

TEST_CASE("a trainer that does not hold what it says is asked where it stands") {
  Bench b;
  int64_t now = 0;
  std::vector<AskTrainer> asked;
  for (int i = 0; i < 40 && asked.empty(); ++i, now += kSecond / 5) {
    b.core.OnHeartbeat("t", 1, now);
    b.core.OnHeartbeat("g", 1, now);
    b.core.OnTick(now);
    const auto commands = b.Take();
    asked = Only<AskTrainer>(commands);
    for (const auto& c : Only<PrepareVersion>(commands)) {
      b.core.OnPrepared(c, absl::NotFoundError("version 0 is not held"), now);
    }
  }
  REQUIRE(asked.size() == 1);
  b.core.OnTrainerStatus(asked[0], absl::OkStatus(), {0, "h0"}, now);
  CHECK(b.core.phase() != RunPhase::kFailed);
}

TEST_CASE("time in which nobody was listened to, or that the clock made up, is no one's silence") {
  RunClock clock(kSecond / 4);
  CHECK(clock.Read(100 * kSecond) == 0);
  CHECK(clock.Read(100 * kSecond + 50) == 50);
  CHECK(clock.num_gaps() == 0);
  CHECK(clock.Read(3700 * kSecond) == 50 + kSecond / 4);  // an hour on
  CHECK(clock.last_gap_ns() == 3600 * kSecond - 50);
  CHECK(clock.Read(100 * kSecond) == 50 + kSecond / 4);  // and back
  CHECK(clock.num_gaps() == 2);
  CHECK(clock.Read(100 * kSecond + 10) == 60 + kSecond / 4);

  Bench b;
  clock.Read(0);
  b.core.OnTick(clock.Read(3600 * kSecond));
  CHECK(Only<CancelGenerate>(b.Take()).empty());
  CHECK(b.core.OnHeartbeat("g", 1, clock.Read(3600 * kSecond)));
}

TEST_CASE("as many generators and scorers are wanted as keep the trainers fed") {
  Balance balance;
  CHECK(balance.Desired(balance.generators()) == 0);
  for (int step = 0; step < 40; ++step) {
    balance.Pass(/*seconds=*/2, /*busy_generators=*/2, /*busy_scorers=*/0);
    balance.Pass(/*seconds=*/1, /*busy_generators=*/0, /*busy_scorers=*/1);
    balance.Generated(64);  // 16 a second and generator
    balance.Scored(64);     // 64 a second and scorer
    balance.Trained(64, /*seconds=*/step < 20 ? 0.8 : 1.0);
  }
  CHECK(balance.trainers().Rate() == Approx(64).epsilon(0.01));
  CHECK(balance.Desired(balance.generators()) == 4);
  CHECK(balance.Desired(balance.scorers()) == 1);
}

TEST_CASE("a failed reward is tried again, then its group is replaced") {
  Bench b({.max_group_replacements = 5});
  for (const auto& g : Only<GenerateGroup>(b.Tokenize(b.Sync()))) {
    b.core.OnGenerated(g, absl::OkStatus(), 0, 0);
  }
  for (const auto& s : Only<ScoreGroup>(b.Take())) b.core.OnScored(s, absl::AbortedError("nan"), 0);
  CHECK(Only<ScoreGroup>(b.Take()).empty());
  b.core.OnTick(kSecond);
  const auto again = Only<ScoreGroup>(b.Take());
  REQUIRE(again.size() == 2);
  b.core.OnScored(again[0], absl::AbortedError("nan"), kSecond);
  CHECK(b.core.num_rejected() == 1);
  CHECK(Only<TokenizePrompts>(b.Take()).size() == 1);
}

// Scores all that is generated; `signals` says of which groups, in order of asking, the rewards
// differ. The positions that the next step is trained on.
std::vector<uint64_t> TrainedWithout(Bench& b, std::vector<bool> signals) {
  std::vector<Command> commands = b.Tokenize(b.Sync());
  for (size_t next = 0;;) {
    for (const auto& g : Only<GenerateGroup>(commands)) {
      b.core.OnGenerated(g, absl::OkStatus(), 0, 0);
    }
    for (const auto& s : Only<ScoreGroup>(b.Take())) {
      b.core.OnScored(s, absl::OkStatus(), 0, next >= signals.size() || signals[next]);
      ++next;
    }
    commands = b.Take();
    for (const auto& batch : Only<RecordBatch>(commands)) {
      std::vector<uint64_t> positions;
      for (const uint64_t id : batch.groups) positions.push_back(b.core.groups().at(id).position);
      return positions;
    }
    commands = b.Tokenize(commands);
    if (commands.empty()) return {};
  }
}

TEST_CASE("groups without signal are replaced, within a bound, and trained on beyond it") {
  {
    Bench b({.max_group_replacements = 8, .replace_without_signal = true});
    CHECK(TrainedWithout(b, {false, true, false, true}) == std::vector<uint64_t>{1, 3});
    CHECK(b.core.num_without_signal() == 2);
  }
  {
    Bench b({.max_group_replacements = 8});
    CHECK(TrainedWithout(b, {false, true}) == std::vector<uint64_t>{0, 1});
  }
  Bench b({.max_group_replacements = 3, .replace_without_signal = true});
  CHECK(TrainedWithout(b, std::vector<bool>(20, false)) == std::vector<uint64_t>{3, 4});
  CHECK(b.core.num_without_signal() == 3);
  CHECK(b.core.phase() != RunPhase::kFailed);
}

TEST_CASE("while nobody can be asked for a reward, groups wait and the run says why") {
  Bench b({.max_group_replacements = 1});
  for (const auto& g : Only<GenerateGroup>(b.Tokenize(b.Sync()))) {
    b.core.OnGenerated(g, absl::OkStatus(), 0, 0);
  }
  std::vector<ScoreGroup> asked = Only<ScoreGroup>(b.Take());
  for (int64_t second = 0; second < 100; ++second) {
    b.core.OnHeartbeat("t", 1, second * kSecond);
    b.core.OnHeartbeat("g", 1, second * kSecond);
    b.core.OnHeartbeat("s", 1, second * kSecond);
    b.core.OnTick(second * kSecond);
    for (const auto& s : Only<ScoreGroup>(b.Take())) asked.push_back(s);
    REQUIRE_FALSE(asked.empty());
    for (const auto& s : asked) {
      b.core.OnScored(s, absl::UnavailableError("reward service x:1"), second * kSecond);
    }
    asked.clear();
  }
  CHECK(b.core.num_rejected() == 0);
  CHECK(b.core.phase() == RunPhase::kWaiting);
  CHECK(absl::StrContains(b.core.detail(), "reward service x:1"));
  b.Take();
  b.core.OnTick(100 * kSecond);
  asked = Only<ScoreGroup>(b.Take());
  REQUIRE(asked.size() == 2);
  for (const auto& s : asked) CHECK(b.core.OnScored(s, absl::OkStatus(), 100 * kSecond));
  CHECK(b.core.detail().empty());
  CHECK(Only<TakeStep>(b.Take()).size() == 1);
}

TEST_CASE("a trainer of another run, or ahead of the journal, is refused") {
  Core core(Bench::Defaults({}), {});
  CHECK_FALSE(core.OnRegister("t", PoolKind::kTrainer, "t:1", {7, "x"}, 0).ok());
  REQUIRE(core.OnRegister("t", PoolKind::kTrainer, "t:1", {0, "h0"}, 0).ok());
  CHECK_FALSE(core.OnRegister("t2", PoolKind::kTrainer, "t:2", {0, "h0"}, 0).ok());
  const auto other = core.OnRegister("t", PoolKind::kTrainer, "t:1", {0, "other"}, 0);
  REQUIRE_FALSE(other.ok());
  CHECK(absl::StrContains(other.status().message(), "not a checkpoint of this run"));
}

TEST_CASE(
    "a reference that isn't what the run began with is refused; lost checkpoints are told of") {
  RestoredRun restored;
  restored.versions = {{0, "h0"}, {1, "h1"}, {2, "h2"}};
  restored.checkpoint_version = 2;
  Core core(Bench::Defaults({.num_steps = 9}), restored);
  const auto join = [&core](const char* name, PoolKind pool, const Version& version) {
    return core.OnRegister(name, pool, "x:1", version, 0).status();
  };
  const absl::Status other = join("s", PoolKind::kScorer, {0, "other"});
  CHECK(absl::IsFailedPrecondition(other));
  CHECK(absl::StrContains(other.message(), "model.path"));
  CHECK(join("s", PoolKind::kScorer, {0, "h0"}).ok());
  CHECK(join("s2", PoolKind::kScorer, {-1, ""}).ok());  // without a reference
  core.TakeCommands();
  REQUIRE(join("t", PoolKind::kTrainer, {1, "h1"}).ok());
  const auto events = Only<RecordEvent>(core.TakeCommands());
  REQUIRE_FALSE(events.empty());
  CHECK(absl::StrContains(events[0].text, "t begins with version 1 though"));
}

TEST_CASE("a stop checkpoints and ends; a finished run is over at once") {
  Bench b({.num_steps = 1});
  for (const auto& g : Only<GenerateGroup>(b.Tokenize(b.Sync()))) {
    b.core.OnGenerated(g, absl::OkStatus(), 0, 0);
  }
  for (const auto& s : Only<ScoreGroup>(b.Take())) b.core.OnScored(s, absl::OkStatus(), 0);
  const auto step = Only<TakeStep>(b.Take());
  REQUIRE(step.size() == 1);
  b.core.OnStop(0);
  CHECK(b.core.phase() == RunPhase::kStopping);
  b.core.OnStepTaken(step[0], absl::OkStatus(), {1, "h1"}, 0, 0);
  const auto begin = Only<BeginSave>(b.Take());
  REQUIRE(begin.size() == 1);
  b.core.OnSaveBegun(begin[0], absl::OkStatus(), 0);
  const auto save = Only<AwaitSave>(b.Take());
  REQUIRE(save.size() == 1);
  CHECK(b.core.phase() == RunPhase::kStopping);
  CHECK(b.core.activity() == "saving a checkpoint");
  CHECK(b.core.OnSaveOver(save[0], absl::OkStatus(), {}, 0));
  CHECK(Only<EndRun>(b.Take()).size() == 1);
  CHECK(b.core.phase() == RunPhase::kDone);

  RestoredRun restored;
  restored.versions = {{0, "h0"}, {1, "h1"}};
  restored.checkpoint_version = 1;
  Core again(Bench::Defaults({.num_steps = 1}), restored);
  CHECK(Only<EndRun>(again.TakeCommands()).size() == 1);
}

TEST_CASE("a run that was paused is paused again, and goes on when told so") {
  RestoredRun restored;
  restored.paused = true;
  Core core(Bench::Defaults({}), restored);
  CHECK(core.phase() == RunPhase::kPaused);
  const auto events = Only<RecordEvent>(core.TakeCommands());
  REQUIRE(events.size() == 1);
  CHECK(absl::StrContains(events[0].text, "--resume"));
  REQUIRE(core.OnRegister("t", PoolKind::kTrainer, "t:1", {0, "h0"}, 0).ok());
  CHECK(core.groups().empty());
  core.OnPause(false, 0);
  CHECK(core.phase() != RunPhase::kPaused);
  CHECK_FALSE(core.groups().empty());
}

TEST_CASE("what is there of a round is counted in rollouts") {
  Bench b({.num_steps = 2});
  const auto generate = Only<GenerateGroup>(b.Tokenize(b.Sync()));
  REQUIRE(generate.size() == 2);
  CHECK(b.core.round().num_wanted == 4);
  CHECK(b.core.round().num_generated == 0);
  b.core.OnGenerated(generate[0], absl::OkStatus(), 0, 0);
  CHECK(b.core.round().num_generated == 2);
  CHECK(b.core.round().num_scored == 0);
  for (const auto& s : Only<ScoreGroup>(b.Take())) b.core.OnScored(s, absl::OkStatus(), 0);
  CHECK(b.core.round().num_scored == 2);
}

TEST_CASE("the KL coefficient of a step follows what the step before measured") {
  Bench b({.kl_coef = 0.5, .kl_controller = {.target = 1, .horizon = 8}});
  const auto finish_step = [&](double measured_kl) {
    for (const auto& g : Only<GenerateGroup>(b.Tokenize(b.Sync()))) {
      b.core.OnGenerated(g, absl::OkStatus(), b.core.version_number(), 0);
    }
    for (const auto& s : Only<ScoreGroup>(b.Take())) b.core.OnScored(s, absl::OkStatus(), 0);
    const auto step = Only<TakeStep>(b.Take());
    REQUIRE(step.size() == 1);
    b.core.OnStepTaken(step[0], absl::OkStatus(), {step[0].step, "h"}, measured_kl, 0);
    return step[0].kl_coef;
  };
  CHECK(finish_step(100) == 0.5);
  CHECK(finish_step(1) == Approx(0.5 * (1 + 0.2 * 4 / 8)));
}

TEST_CASE("ranks that come to different weights make no version, and are named") {
  RestoredRun restored;
  restored.versions = {{0, "h0"}, {1, "h1"}};
  restored.kl_coefs = {{1, 0.5}};
  Core core(Bench::Defaults({.num_trainers = 2}), restored);
  REQUIRE(core.OnRegister("t0", PoolKind::kTrainer, "t0:1", {-1, ""}, 0).ok());
  CHECK(Only<PrepareRank>(core.TakeCommands()).empty());  // not all are there
  REQUIRE(core.OnRegister("t1", PoolKind::kTrainer, "t1:1", {-1, ""}, 0).ok());
  CHECK_FALSE(core.OnRegister("t2", PoolKind::kTrainer, "t2:1", {-1, ""}, 0).ok());
  const auto prepare = Only<PrepareRank>(core.TakeCommands());
  REQUIRE(prepare.size() == 2);
  for (const auto& p : prepare) core.OnRankPrepared(p, absl::OkStatus(), p.member + ":2", 0);
  const auto join = Only<JoinRank>(core.TakeCommands());
  REQUIRE(join.size() == 2);
  CHECK(join[1].rank == 1);
  CHECK(join[0].ranks[1].address == "t1:2");
  for (const auto& j : join) core.OnRankJoined(j, absl::OkStatus(), {0, "h0"}, 0);
  const auto step = Only<TakeStep>(core.TakeCommands());
  REQUIRE(step.size() == 2);
  CHECK_FALSE(core.OnStepTaken(step[0], absl::OkStatus(), {1, "h1"}, 0, 0));
  CHECK_FALSE(core.OnStepTaken(step[1], absl::OkStatus(), {1, "other"}, 0, 0));
  const auto after = core.TakeCommands();
  REQUIRE_FALSE(Only<RecordEvent>(after).empty());
  const std::string event = Only<RecordEvent>(after)[0].text;
  CHECK(absl::StrContains(event, "t0: version 1 h1, t1: version 1 other"));
  REQUIRE(Only<PrepareRank>(after).size() == 2);
  CHECK(Only<PrepareRank>(after)[0].group_epoch == prepare[0].group_epoch + 1);
  // What the old group says is late.
  CHECK_FALSE(core.OnStepTaken(step[1], absl::OkStatus(), {1, "h1"}, 0, 0));
  CHECK(core.phase() != RunPhase::kFailed);
}

TEST_CASE("a run of several trainers goes on with one, which is in no group") {
  RestoredRun restored;
  restored.versions = {{0, "h0"}, {1, "h1"}};
  restored.kl_coefs = {{1, 0.5}};
  restored.trainer_epoch = 4;
  Core core(Bench::Defaults({.num_trainers = 1}), restored);
  REQUIRE(core.OnRegister("t0", PoolKind::kTrainer, "t0:1", {0, "h0"}, 0).ok());
  const auto step = Only<TakeStep>(core.TakeCommands());
  REQUIRE(step.size() == 1);
  CHECK(step[0].group_epoch == 0);
  core.OnStepTaken(step[0], absl::OkStatus(), {1, "h1"}, 0, 0);
  CHECK(core.phase() != RunPhase::kFailed);
}

TEST_CASE("a group has whole copies of the model") {
  constexpr int64_t kGrace = 1'000'000'000;
  Core core(Bench::Defaults({.num_trainers = 4, .ranks_per_copy = 2, .trainer_grace_ns = kGrace}),
            {});
  const auto join_as = [&](const std::string& name, int64_t now_ns) {
    REQUIRE(core.OnRegister(name, PoolKind::kTrainer, name + ":1", {-1, ""}, now_ns).ok());
    return Only<PrepareRank>(core.TakeCommands()).size();
  };
  CHECK(join_as("t0", 0) == 0);
  CHECK(join_as("t1", 0) == 0);
  CHECK(join_as("t2", 0) == 0);
  core.OnTick(kGrace + 1);
  // The least is one rank, but a copy has two; of three, two make one up.
  const auto prepare = Only<PrepareRank>(core.TakeCommands());
  REQUIRE(prepare.size() == 2);
  for (const auto& p : prepare) core.OnRankPrepared(p, absl::OkStatus(), "x:2", kGrace + 1);
  const auto join = Only<JoinRank>(core.TakeCommands());
  REQUIRE(join.size() == 2);
  for (const auto& j : join) core.OnRankJoined(j, absl::OkStatus(), {0, "h0"}, kGrace + 1);
  CHECK(core.trainers().ranks.size() == 2);
  CHECK(join_as("t3", kGrace + 2) == 4);
}

TEST_CASE("replayed steps must give the recorded hashes") {
  RestoredRun restored;
  restored.versions = {{0, "h0"}, {1, "h1"}};
  restored.kl_coefs = {{1, 0.5}};
  Core core(Bench::Defaults({}), restored);
  REQUIRE(core.OnRegister("t", PoolKind::kTrainer, "t:1", {0, "h0"}, 0).ok());
  const auto step = Only<TakeStep>(core.TakeCommands());
  REQUIRE(step.size() == 1);
  CHECK(step[0].is_replay);
  CHECK(step[0].kl_coef == 0.5);
  core.OnStepTaken(step[0], absl::OkStatus(), {1, "other"}, 0, 0);
  CHECK(core.phase() == RunPhase::kFailed);
}

TEST_CASE("an epoch visits every line once, each epoch in its own order") {
  EpochOrder order(10, 3, true);
  std::vector<uint64_t> first, second;
  for (uint64_t p = 0; p < 10; ++p) first.push_back(order.At(p).index);
  for (uint64_t p = 10; p < 20; ++p) second.push_back(order.At(p).index);
  CHECK(std::set<uint64_t>(first.begin(), first.end()).size() == 10);
  CHECK(std::set<uint64_t>(second.begin(), second.end()).size() == 10);
  CHECK(first != second);
  CHECK(order.At(13).epoch == 1);
  CHECK(EpochOrder(10, 3, true).At(4) == order.At(4));
  CHECK(EpochOrder(10, 3, false).At(14) == DatasetPlace{1, 4});
}
}  // namespace
}  // namespace stretto::services
