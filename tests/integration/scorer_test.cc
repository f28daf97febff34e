// The scorer as a process of its own: verifiers, users' reward services, reference log-probs,
// prompts.
#include <catch2/catch.hpp>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "tests/integration/client.h"
#include "tests/integration/reward_server.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
struct Scorer {
  explicit Scorer(const TestRun& run) : process(run.Start("scorer", "scorer-0")) {
    stub = Connect<v1::Scorer>(run.WaitForAddress(process, "scorer-0"));
  }
  grpc::Status Score(const v1::ScoreRequest& request, v1::ScoreResponse* response) {
    CallContext context;
    return stub->Score(&context, request, response);
  }
  std::vector<int32_t> Tokenize(const std::string& text) {
    CallContext context;
    v1::TokenizeRequest request;
    request.add_prompt_json(absl::StrCat("{\"prompt\": \"", text, "\"}"));
    v1::TokenizeResponse response;
    REQUIRE(stub->Tokenize(&context, request, &response).ok());
    REQUIRE(response.prompts_size() == 1);
    INFO(response.prompts(0).error());
    REQUIRE(response.prompts(0).error().empty());
    return {response.prompts(0).ids().begin(), response.prompts(0).ids().end()};
  }
  v1::ScorerStatus Status() {
    CallContext context;
    v1::ScorerStatus status;
    REQUIRE(stub->GetScorerStatus(&context, {}, &status).ok());
    return status;
  }
  // A request whose completions say `texts`.
  v1::ScoreRequest Request(const std::string& line, const std::vector<std::string>& texts) {
    v1::ScoreRequest request;
    request.set_prompt_json(line);
    request.set_temperature(1);
    for (size_t i = 0; i < texts.size(); ++i) {
      v1::Completion* completion = request.add_completions();
      completion->set_sample_index(static_cast<uint32_t>(i) + 10);
      const std::vector<int32_t> ids = Tokenize(texts[i]);
      completion->mutable_ids()->Add(ids.begin(), ids.end());
    }
    return request;
  }

  Process process;
  std::unique_ptr<v1::Scorer::Stub> stub;
};
}  // namespace

TEST_CASE("rewards, their parts, and what cannot be scored") {
  const TestRun run({.rewards = "rewards: [{type: integer}, {type: regex, name: short, pattern: "
                                "'^.{1,3}$', weight: 0.5}]\n"});
  Scorer scorer(run);
  v1::ScoreResponse response;
  const std::string line = "{\"prompt\": \"7+5=\", \"answer\": 12}";
  REQUIRE(scorer.Score(scorer.Request(line, {"12", "so it is 12", "13"}), &response).ok());
  REQUIRE(response.scores_size() == 3);
  CHECK(response.scores(0).sample_index() == 10);
  CHECK(response.scores(0).reward() == 1.5);
  CHECK(response.scores(1).reward() == 1.0);
  CHECK(response.scores(2).reward() == 0.5);
  CHECK(response.scores(0).components(1).name() == "short");
  CHECK(response.scores(0).components(1).value() == 1.0);
  CHECK(response.scores(0).components(1).weight() == 0.5);
  CHECK(response.scorer_tag() == scorer.Status().scorer_tag());
  CHECK(scorer.Status().num_scored() == 3);

  SECTION("a line without an answer: an error, not a zero") {
    response.Clear();
    REQUIRE(scorer.Score(scorer.Request("{\"prompt\": \"7+5=\"}", {"12"}), &response).ok());
    CHECK(response.scores(0).error().find("answer") != std::string::npos);
    CHECK(scorer.Status().num_errors() == 1);
  }
  SECTION("a line that is no object") {
    CHECK(scorer.Score(scorer.Request("[1]", {"12"}), &response).error_code() ==
          grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(scorer.Score(scorer.Request("{", {"12"}), &response).error_code() ==
          grpc::StatusCode::INVALID_ARGUMENT);
  }
  SECTION("an id that the vocabulary does not have") {
    v1::ScoreRequest request = scorer.Request(line, {"12"});
    request.mutable_completions(0)->add_ids(1 << 20);
    CHECK(scorer.Score(request, &response).error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  }
  SECTION("reference log-probs where the run has no KL term") {
    v1::ScoreRequest request = scorer.Request(line, {"12"});
    request.set_want_reference_logprobs(true);
    CHECK(scorer.Score(request, &response).error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  }
  SECTION("prompts that cannot be had do not spoil the others") {
    CallContext context;
    v1::TokenizeRequest request;
    request.add_prompt_json("{\"prompt\": \"\"}");
    request.add_prompt_json("{\"prompt\": \"1+1=\"}");
    request.add_prompt_json("{\"question\": \"1+1=\"}");
    request.add_prompt_json("not json");
    v1::TokenizeResponse prompts;
    REQUIRE(scorer.stub->Tokenize(&context, request, &prompts).ok());
    REQUIRE(prompts.prompts_size() == 4);
    CHECK(!prompts.prompts(0).error().empty());
    CHECK(prompts.prompts(1).ids_size() > 0);
    CHECK(!prompts.prompts(2).error().empty());
    CHECK(!prompts.prompts(3).error().empty());
  }
}

TEST_CASE("reference log-probs have the bits of generation under the same weights") {
  const TestRun run({.algorithm = "algorithm: {kl_coef: 0.01}\n"});
  Scorer scorer(run);
  Process generator = run.Start("generator", "generator-0");
  auto stub = Connect<v1::Generator>(run.WaitForAddress(generator, "generator-0"));
  for (const float temperature : {1.0f, 0.7f}) {
    const std::vector<int32_t> prompt = {21, 14, 20, 32};
    const Generated generated = Generate(*stub, MakeGenerateRequest(prompt, 4, 24, temperature));
    REQUIRE(generated.status.ok());
    v1::ScoreRequest request;
    request.set_prompt_json("{\"answer\": 1}");
    request.mutable_prompt_ids()->Add(prompt.begin(), prompt.end());
    request.set_temperature(temperature);
    request.set_want_reference_logprobs(true);
    for (const auto& [index, completion] : generated.completions) {
      *request.add_completions() = completion;
    }
    v1::ScoreResponse response;
    const grpc::Status status = scorer.Score(request, &response);
    INFO(status.error_message());
    REQUIRE(status.ok());
    for (int i = 0; i < response.scores_size(); ++i) {
      const v1::Completion& completion = request.completions(i);
      REQUIRE(response.scores(i).reference_logprobs_size() == completion.ids_size());
      for (int t = 0; t < completion.ids_size(); ++t) {
        CHECK(response.scores(i).reference_logprobs(t) == completion.logprobs(t));
      }
    }
  }
}

TEST_CASE("a user's reward service: good, down, slow, or talking nonsense") {
  const int port = FreePort();
  const TestRun run({.rewards = absl::StrCat("rewards: [{type: service, address: '127.0.0.1:", port,
                                             "', timeout_ms: 300, max_attempts: 2}]\n")});
  Scorer scorer(run);
  const v1::ScoreRequest request = scorer.Request("{\"prompt\": \"x\"}", {"a", "bcd"});
  const auto error = [&] {
    v1::ScoreResponse response;
    REQUIRE(scorer.Score(request, &response).ok());
    REQUIRE(response.scores_size() == 2);
    for (const v1::Score& score : response.scores()) CHECK(score.reward() == 0);
    CHECK(response.scores(0).error() == response.scores(1).error());
    return response.scores(0).error();
  };
  CHECK(error().find("UNAVAILABLE") != std::string::npos);
  {
    RewardServer server(port);
    v1::ScoreResponse response;
    REQUIRE(Eventually([&] {
      response.Clear();
      return scorer.Score(request, &response).ok() && response.scores(0).error().empty();
    }));
    CHECK(response.scores(0).reward() == 1);
    CHECK(response.scores(1).reward() == 3);

    server.mode = RewardServer::Mode::kNan;
    server.num_calls = 0;
    CHECK(error().find("nan") != std::string::npos);
    CHECK(server.num_calls == 2);
    server.mode = RewardServer::Mode::kWrongCount;
    CHECK(error().find("3 rewards for 2 completions") != std::string::npos);
    server.mode = RewardServer::Mode::kError;
    CHECK(error().find("out of opinions") != std::string::npos);
    server.mode = RewardServer::Mode::kSlow;
    const int64_t start_ms = NowMs();
    CHECK(error().find("DEADLINE_EXCEEDED") != std::string::npos);
    CHECK(NowMs() - start_ms < 4000);
    server.mode = RewardServer::Mode::kGood;
    response.Clear();
    REQUIRE(scorer.Score(request, &response).ok());
    CHECK(response.scores(1).reward() == 3);
  }
  CHECK(scorer.Status().num_errors() >= 10);
}
}  // namespace stretto::testing
