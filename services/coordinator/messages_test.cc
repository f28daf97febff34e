#include "services/coordinator/messages.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "absl/strings/match.h"
#include "base/testing.h"

namespace stretto::services {
namespace {
v1::GenerateEvent Event(uint32_t sample, int num_tokens,
                        v1::FinishReason reason = v1::FINISH_REASON_UNSPECIFIED) {
  v1::GenerateEvent event;
  event.set_sample_index(sample);
  for (int i = 0; i < num_tokens; ++i) {
    event.add_ids(i);
    event.add_logprobs(-1.0f);
    event.add_versions(2);
  }
  event.set_finish_reason(reason);
  return event;
}

TEST_CASE("events gather into rollouts") {
  RolloutCollector collector(2, 10);
  REQUIRE(collector.Add(Event(1, 2)).ok());
  REQUIRE(collector.Add(Event(0, 3, v1::FINISH_REASON_STOP)).ok());
  REQUIRE(collector.Add(Event(1, 1, v1::FINISH_REASON_LENGTH)).ok());
  const auto rollouts = collector.Finish();
  REQUIRE_OK(rollouts);
  CHECK((*rollouts)[0].ids.size() == 3);
  CHECK((*rollouts)[1].ids == std::vector<int32_t>{0, 1, 0});
  CHECK((*rollouts)[1].finish_reason == "length");
}

TEST_CASE("what cannot be a rollout is refused") {
  const auto fault = [](const v1::GenerateEvent& event) {
    RolloutCollector collector(1, 4);
    return std::string(collector.Add(event).message());
  };
  CHECK(absl::StrContains(fault(Event(1, 1)), "was not asked for"));
  CHECK(absl::StrContains(fault(Event(0, 5)), "more than the 4 tokens"));
  auto event = Event(0, 2);
  event.add_ids(1);
  CHECK(absl::StrContains(fault(event), "different lengths"));
  event = Event(0, 1);
  event.set_logprobs(0, NAN);
  CHECK(absl::StrContains(fault(event), "not finite"));
  event = Event(0, 0, v1::FINISH_REASON_ERROR);
  event.set_error("out of blocks");
  CHECK(absl::StrContains(fault(event), "out of blocks"));
  RolloutCollector unfinished(1, 4);
  REQUIRE(unfinished.Add(Event(0, 1)).ok());
  CHECK(absl::StrContains(unfinished.Finish().status().message(), "did not finish"));
  RolloutCollector aborted(1, 4);
  CHECK(absl::IsUnavailable(aborted.Add(Event(0, 1, v1::FINISH_REASON_ABORTED))));
}

TEST_CASE("a failed reward is never a score") {
  std::vector<RolloutRecord> rollouts(2);
  rollouts[1].sample_index = 1;
  for (auto& r : rollouts) r.ids = {1, 2};
  v1::ScoreResponse response;
  for (uint32_t i = 0; i < 2; ++i) {
    v1::Score* score = response.add_scores();
    score->set_sample_index(1 - i);
    score->set_reward(1 - i);
    score->add_reference_logprobs(-1);
    score->add_reference_logprobs(-2);
  }
  REQUIRE(ApplyScores(response, true, &rollouts).ok());
  CHECK(rollouts[1].reward == 1);
  CHECK(rollouts[0].reward == 0);
  CHECK(rollouts[0].reference_logprobs == std::vector<float>{-1, -2});
  CHECK(absl::IsInternal(ApplyScores(response, false, &rollouts)));
  response.mutable_scores(0)->set_reward(NAN);
  CHECK(absl::IsAborted(ApplyScores(response, true, &rollouts)));
  response.mutable_scores(0)->set_error("service is down");
  CHECK(absl::StrContains(ApplyScores(response, true, &rollouts).message(), "service is down"));
  response.mutable_scores(0)->set_is_retryable(true);
  CHECK(absl::IsUnavailable(ApplyScores(response, true, &rollouts)));
  response.mutable_scores()->RemoveLast();
  CHECK(absl::IsInternal(ApplyScores(response, true, &rollouts)));
}

TEST_CASE("an experience carries the group's advantages") {
  GroupRecord group;
  group.prompt_ids = {5, 6};
  group.rollouts.resize(2);
  group.rollouts[1].reward = 1;
  const auto proto = ToExperience(group, {.advantage_scale = "none"});
  CHECK(proto.prompt_ids_size() == 2);
  CHECK(proto.experiences(0).advantage() == -0.5);
  CHECK(proto.experiences(1).advantage() == 0.5);
}

TEST_CASE("the longest completion grows with the steps where the run says so") {
  RunConfig config;
  config.rollout.max_tokens = 100;
  CHECK(TrainSampling(config, 1).max_tokens() == 100);
  config.rollout.first_max_tokens = 20;
  config.rollout.ramp_steps = 8;
  CHECK(TrainSampling(config, 1).max_tokens() == 20);
  CHECK(TrainSampling(config, 5).max_tokens() == 60);
  CHECK(TrainSampling(config, 8).max_tokens() == 90);
  CHECK(TrainSampling(config, 9).max_tokens() == 100);
  CHECK(EvalSampling(config).max_tokens() == 100);
  CHECK(!TrainSampling(config, 1).keep_stop_string());
  config.rollout.stop = {"x"};
  CHECK(TrainSampling(config, 1).keep_stop_string());
  CHECK(EvalSampling(config).keep_stop_string());
}

TEST_CASE("evaluations are greedy") {
  RunConfig config;
  config.rollout.top_k = 5;
  config.rollout.max_tokens = 9;
  CHECK(TrainSampling(config, 1).top_k() == 5);
  CHECK(EvalSampling(config).temperature() == 0);
  CHECK(EvalSampling(config).top_k() == 0);
  CHECK(EvalSampling(config).max_tokens() == 9);
  config.eval.max_tokens = 4;
  CHECK(EvalSampling(config).max_tokens() == 4);
}
}  // namespace
}  // namespace stretto::services
