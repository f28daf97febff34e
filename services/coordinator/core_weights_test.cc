// Versions on their way to generators.
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "services/coordinator/core_bench.h"

namespace stretto::services {
namespace {
// The core with generators g0, g1, … that have version 0, and a version 1 that is to reach them:
// whom each is told to ask, by name.
std::map<std::string, std::vector<std::string>> SourcesOf(const std::vector<Command>& commands) {
  std::map<std::string, std::vector<std::string>> sources;
  for (const auto& c : Only<PrepareVersion>(commands)) sources[c.member] = c.sources;
  return sources;
}
struct Pool {
  Pool(int num_generators, int64_t fanout) {
    CoreOptions options = Bench::Defaults({});
    options.relay_fanout = fanout;
    RestoredRun restored;
    restored.versions = {{0, "h0"}, {1, "h1"}};
    core = std::make_unique<Core>(options, restored);
    for (int i = 0; i < num_generators; ++i) Join("g" + std::to_string(i), {0, "h0"});
    REQUIRE(core->OnRegister("t", PoolKind::kTrainer, "t", {1, "h1"}, 0).ok());
    core->OnTick(0);
  }
  void Join(const std::string& name, const Version& version) {
    REQUIRE(core->OnRegister(name, PoolKind::kGenerator, name, version, 0).ok());
  }
  std::unique_ptr<Core> core;
};
using Names = std::vector<std::string>;

TEST_CASE("a version spreads along a chain, or a tree, of generators") {
  Pool chain(4, 1);
  auto sources = SourcesOf(chain.core->TakeCommands());
  CHECK(sources["g0"] == Names{"t"});
  CHECK(sources["g1"] == Names{"g0", "t"});
  CHECK(sources["g2"] == Names{"g1", "g0", "t"});
  CHECK(sources["g3"] == Names{"g2", "g1", "g0", "t"});
  Pool tree(7, 2);
  sources = SourcesOf(tree.core->TakeCommands());
  CHECK(sources["g1"] == Names{"t"});
  CHECK(sources["g2"] == Names{"g0", "t"});
  CHECK(sources["g5"] == Names{"g1", "t"});
  CHECK(sources["g6"] == Names{"g2", "g0", "t"});
}

TEST_CASE("who has gone relays nothing; who comes from another version is fed by its like") {
  Pool pool(3, 1);
  const auto commands = pool.core->TakeCommands();
  pool.core->OnLeave("g1", 1, 0);
  pool.Join("g4", {0, "h0"});
  // g2 was below g1 and is now below g0, and the newcomer below it.
  CHECK(SourcesOf(pool.core->TakeCommands())["g4"] == Names{"g2", "g0", "t"});
  pool.Join("h0", {-1, ""});
  pool.Join("h1", {-1, ""});
  auto sources = SourcesOf(pool.core->TakeCommands());
  CHECK(sources["h0"] == Names{"t"});
  CHECK(sources["h1"] == Names{"h0", "t"});
  // One that failed begins anew, and isn't among its own sources; below it nobody waits for it.
  for (const auto& c : Only<PrepareVersion>(commands)) {
    if (c.member == "g0") pool.core->OnPrepared(c, absl::UnavailableError("gone"), 0);
  }
  pool.core->OnTick(kSecond);
  CHECK(SourcesOf(pool.core->TakeCommands())["g0"] == Names{"g4", "g2", "t"});
}

TEST_CASE("a version that was prepared is used though a newer one was born meanwhile") {
  Bench b({.num_steps = 4, .max_staleness = 2, .retry_ns = 0});
  auto commands = b.Tokenize(b.Sync());
  const auto generate = Only<GenerateGroup>(commands);
  REQUIRE(generate.size() == 6);
  for (size_t i = 0; i < 5; ++i) b.core.OnGenerated(generate[i], absl::OkStatus(), 0, 0);
  for (const auto& s : Only<ScoreGroup>(b.Take())) b.core.OnScored(s, absl::OkStatus(), 0);
  const auto take = [&](const Version& version) {
    while (Only<TakeStep>(commands).empty()) {
      commands = b.Take();
      for (const auto& s : Only<ScoreGroup>(commands)) b.core.OnScored(s, absl::OkStatus(), 0);
    }
    CHECK(b.core.OnStepTaken(Only<TakeStep>(commands)[0], absl::OkStatus(), version, 0, 0));
    commands = b.Take();
  };
  take({1, "h1"});
  const auto prepare = Only<PrepareVersion>(commands);
  REQUIRE(prepare.size() == 1);
  take({2, "h2"});
  CHECK(Only<PrepareVersion>(commands).empty());
  b.core.OnPrepared(prepare[0], absl::OkStatus(), 0);
  const auto commit = Only<CommitVersion>(b.Take());
  REQUIRE(commit.size() == 1);
  CHECK(commit[0].version == Version{1, "h1"});
  // A swap may wait for long rollouts; groups that the old version may write go on.
  b.core.OnGenerated(generate[5], absl::InternalError("a fault"), 0, 0);
  const auto again = Only<GenerateGroup>(b.Take());
  REQUIRE(again.size() == 1);
  CHECK(again[0].held_version == 0);
  b.core.OnCommitted(commit[0], absl::OkStatus(), 0);
  const auto next = Only<PrepareVersion>(b.Take());
  REQUIRE(next.size() == 1);
  CHECK(next[0].version == Version{2, "h2"});
}

TEST_CASE("other weights of the same number are replaced") {
  Pool pool(0, 1);
  pool.Join("g", {1, "other"});
  const auto prepare = Only<PrepareVersion>(pool.core->TakeCommands());
  REQUIRE(prepare.size() == 1);
  pool.core->OnPrepared(prepare[0], absl::OkStatus(), 0);
  CHECK(Only<CommitVersion>(pool.core->TakeCommands()).size() == 1);
}
}  // namespace
}  // namespace stretto::services
