#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_split.h"
#include "base/testing.h"
#include "services/coordinator/rank_health.h"
#include "services/coordinator/run_outputs.h"
#include "services/coordinator/step_metrics.h"

namespace stretto::services {
namespace {
using nlohmann::json;

GroupRecord GroupWith(std::vector<double> rewards, std::vector<size_t> lengths) {
  GroupRecord group;
  for (size_t i = 0; i < rewards.size(); ++i) {
    RolloutRecord r;
    r.reward = rewards[i];
    r.components["integer"] = rewards[i];
    r.ids.resize(lengths[i], 1);
    r.versions.resize(lengths[i], i == 0 ? 3 : 4);
    r.finish_reason = i == 0 ? "length" : "stop";
    group.rollouts.push_back(r);
  }
  return group;
}

TEST_CASE("a step's metrics are those of its rollouts") {
  const std::vector<GroupRecord> batch = {GroupWith({0, 1}, {4, 2}), GroupWith({1, 1}, {1, 5})};
  const auto m = StepMetrics(batch, 4, {{"loss", 0.25}}, {.step_seconds = 2, .train_seconds = 1});
  CHECK(m.at("reward_mean") == 0.75);
  CHECK(m.at("reward_integer") == 0.75);
  CHECK(m.at("reward_std") == Approx(std::sqrt(0.1875)));
  CHECK(m.at("completion_length") == 3);
  CHECK(m.at("completion_length_max") == 5);
  CHECK(m.at("length_fraction") == 0.5);
  CHECK(m.at("zero_signal_fraction") == 0.5);
  CHECK(m.at("staleness_mean") == 0.5);
  CHECK(m.at("staleness_max") == 1);
  CHECK(m.at("num_tokens") == 12);
  CHECK(m.at("tokens_per_second") == 6);
  CHECK(m.at("loss") == 0.25);
  CHECK(EvalScore({GroupWith({1}, {1}), GroupWith({0.99}, {1}), GroupWith({1.5}, {1})},
                  "integer") == Approx(2.0 / 3));
  CHECK(EvalScore({}, "integer") == -1);
}

TEST_CASE("outputs are written and can be read") {
  testing::TempDir dir;
  const std::vector<StepRecord> earlier = {{.step = 1, .metrics = {{"loss", 0.5}}}};
  auto outputs = RunOutputs::Open(Files::Real(), Clock::Real(), dir.path(), earlier);
  REQUIRE_OK(outputs);
  REQUIRE((*outputs)->AddStep({.step = 2, .metrics = {{"loss", 0.25}, {"bad", NAN}}}).ok());
  REQUIRE((*outputs)->AddEval(0, 0.75, 1.5).ok());
  RunSummary summary;
  summary.evals = {{0, 0.1}, {2, 0.9}};
  summary.eval_after = 0.9;
  REQUIRE((*outputs)->WriteSummary(summary).ok());

  const std::string lines = Files::Real().ReadAll(dir.File("metrics.jsonl")).value();
  const std::vector<std::string> split = absl::StrSplit(lines, '\n', absl::SkipEmpty());
  REQUIRE(split.size() == 3);
  CHECK(json::parse(split[0]) == json({{"step", 1}, {"loss", 0.5}}));
  CHECK(json::parse(split[1]) == json({{"step", 2}, {"loss", 0.25}}));
  CHECK(json::parse(split[2]) == json({{"step", 0}, {"eval", 0.75}, {"eval_reward", 1.5}}));
  const json read = json::parse(Files::Real().ReadAll(dir.File("summary.json")).value());
  CHECK(read["eval_after"] == 0.9);
  CHECK(read["evals"]["2"] == 0.9);
  for (const char* key : {"eval_before", "steps", "seconds", "rollouts", "tokens_generated",
                          "logprob_mismatch_max", "peak_rss_bytes", "checkpoint_hash"}) {
    CHECK(read.contains(key));
  }

  const auto names = Files::Real().List(dir.File("tensorboard")).value();
  REQUIRE(names.size() == 1);
  const std::string events =
      Files::Real().ReadAll(JoinPath(dir.File("tensorboard"), names[0])).value();
  CHECK(events.find("step/loss") != std::string::npos);
  CHECK(events.find("eval/score") != std::string::npos);
  CHECK(events.find("eval/reward") != std::string::npos);
}
TEST_CASE("a rank that is slower than the others, or has other gradients, is named once") {
  RankHealth health;
  const auto step = [&](int64_t number, double seconds_of_b, double norm_of_c) {
    const auto rank = [](double seconds, double norm) {
      return RankHealth::Metrics{
          {"train_seconds", 10}, {"collective_seconds", 10 - seconds}, {"rank_gradient", norm}};
    };
    return health.Add(
        number, {{"a", rank(1, 1)}, {"b", rank(seconds_of_b, 1)}, {"c", rank(1.1, norm_of_c)}});
  };
  CHECK(step(1, 3, 1).empty());  // a slow step happens
  CHECK(step(2, 3, 1).empty());
  const auto notes = step(3, 3, 1);
  REQUIRE(notes.size() == 1);
  CHECK(notes[0] == "b is slow: it computed 3.00 s of step 3, the others' median is 1.10 s");
  CHECK(health.ranks().at("b").is_slow);
  CHECK(step(4, 3, 1).empty());
  CHECK(step(5, 1, 1).empty());
  CHECK_FALSE(health.ranks().at("b").is_slow);
  REQUIRE(step(6, 1, 50).size() == 1);
  CHECK(health.ranks().at("c").has_large_gradients);
  CHECK(step(7, 1, 1).empty());
  REQUIRE(step(8, 1, std::nan("")).size() == 1);
  CHECK(step(9, 1, 0).empty());  // no group of it has a signal
  // Of two the one that has all the signal isn't unlike the other.
  RankHealth two;
  CHECK(two.Add(1, {{"a", {{"rank_gradient", 0.5}}}, {"b", {{"rank_gradient", 0}}}}).empty());
}
}  // namespace
}  // namespace stretto::services
