#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/testing.h"
#include "grpcpp/impl/service_type.h"
#include "services/common/grpc_server.h"
#include "services/common/weights_fetch.h"
#include "services/common/weights_relay.h"
#include "services/trainer/cut_link.h"
#include "services/trainer/delta_encoder.h"
#include "services/trainer/outcome_json.h"
#include "services/trainer/ppo_batch.h"
#include "services/trainer/step_objective.h"

namespace stretto::services {
namespace {
engine::TrainCompletion Completion(const std::vector<int32_t>& ids,
                                   const std::vector<float>& logprobs,
                                   const std::vector<int64_t>& versions) {
  engine::TrainCompletion completion;
  completion.ids = ids;
  completion.behaviour_logprobs = logprobs;
  completion.policy_versions = versions;
  return completion;
}

std::shared_ptr<const engine::WeightsVersion> Version(int64_t number, uint8_t value) {
  return engine::MakeVersion(number, {{"w", DType::kBF16, {100}, ""}},
                             {engine::SharedBytes(engine::Bytes(200, value))});
}
// A process that serves weights, and can be shut down in the middle.
struct WeightsServer {
  explicit WeightsServer(WeightsProvider* provider)
      : service(MakeWeightsService(provider, &metrics)) {
    auto started = GrpcServer::Start({.services = {service.get()}, .metrics = &metrics});
    REQUIRE_OK(started);
    server = *std::move(started);
    address = absl::StrCat("127.0.0.1:", server->port());
  }
  Metrics metrics;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<GrpcServer> server;
  std::string address;
};

// Two tensors of 1.6 MB, and a version in which all of their elements are others.
struct Spread {
  Spread() {
    for (int64_t number : {0, 1}) {
      engine::Bytes bytes(1'600'000);
      for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<uint8_t>((i * 2654435761u) >> 13 ^ (number == 1 ? i % 7 + 1 : 0));
      }
      store.Put(engine::MakeVersion(
          number, {{"a", DType::kBF16, {800'000}, ""}, {"b", DType::kBF16, {800'000}, ""}},
          {engine::SharedBytes(bytes), engine::SharedBytes(bytes)}));
    }
    base = *store.Get(0, "");
    next = *store.Get(1, "");
    store.PutDelta(engine::EncodeVersionDelta(*base, *next));
    num_bytes = static_cast<uint64_t>(store.DeltasTo(*next)[0]->NumBytes());
  }
  FetchRequest From(std::vector<std::string> sources) const {
    FetchRequest request;
    request.number = 1;
    request.hash = next->hash;
    request.sources = std::move(sources);
    request.expected = base->manifest;
    request.base = base;
    request.timeout_ms = 20000;
    request.stall_ms = request.first_answer_ms = 300;
    return request;
  }
  // What a relay has after it has received `num_bytes` of the delta.
  std::shared_ptr<engine::GrowingTensors> Begin(WeightsRelay& relay, size_t first_bytes) const {
    auto incoming = std::make_shared<engine::GrowingTensors>(
        std::vector<int64_t>{4'000'000, 4'000'000}, /*exact=*/false);
    const auto delta = store.DeltasTo(*next)[0]->tensors[0].span();
    REQUIRE_OK(incoming->Add(
        0, 0, {reinterpret_cast<const char*>(delta.data()), std::min(first_bytes, delta.size())},
        false));
    relay.Begin(ToProto(*next), base.get(), incoming);
    return incoming;
  }
  engine::WeightsStore store{3};
  std::shared_ptr<const engine::WeightsVersion> base, next;
  uint64_t num_bytes = 0;
};
}  // namespace

TEST_CASE("a relay that stops lets nobody wait for what isn't there") {
  WeightsRelay relay;
  const int64_t begin_ns = Clock::Real().NowNs();
  std::thread stop([&] {
    Clock::Real().SleepNs(100'000'000);
    relay.Stop();
  });
  CHECK(absl::IsUnavailable(relay.Manifest(ToProto(7, "")).status()));
  CHECK(absl::IsUnavailable(relay.Snapshot(ToProto(7, "")).status()));
  stop.join();
  CHECK(Clock::Real().NowNs() - begin_ns < 2'000'000'000);
}

TEST_CASE("advantages and returns of a batch, by hand") {
  engine::TrainBatch batch;
  batch.groups.resize(2);
  for (engine::TrainGroup& g : batch.groups) g.prompt_ids = {1};
  batch.groups[0].completions = {Completion({5, 6}, {-1.0f, -2.0f}, {0, 0}),
                                 Completion({}, {}, {})};
  batch.groups[1].completions = {Completion({7}, {-0.5f}, {0})};
  batch.groups[0].completions[0].reference_logprobs = {-1.5f, -2.0f};
  batch.groups[1].completions[0].reference_logprobs = {-0.5f};
  const std::vector<std::vector<double>> scores = {{1.0, 3.0}, {0.0}};
  const std::vector<std::vector<std::vector<float>>> values = {{{0.25f, 0.5f}, {}}, {{0.75f}}};
  PpoBatchOptions options;
  options.gae = {.gamma = 1, .lambda = 0.5};
  options.whiten_advantages = false;
  options.kl_coef = 0.1;
  options.kl_estimator = rl::KlEstimator::kK1;
  const auto made = MakePpoBatch({batch, scores, values}, options);
  REQUIRE_OK(made);
  // Rewards −0.1 · 0.5 and 1; the last token: 1 − 0.5, the first: −0.05 + 0.5 − 0.25 + half of it.
  const TokenTargets& first = made->targets[0][0];
  CHECK(first.advantages[1] == Approx(0.5));
  CHECK(first.advantages[0] == Approx(0.2 + 0.25));
  CHECK(first.returns[0] == Approx(0.45 + 0.25));
  CHECK(first.old_values == std::vector<float>{0.25f, 0.5f});
  CHECK(made->targets[0][1].advantages.empty());
  CHECK(made->targets[1][0].advantages[0] == Approx(-0.75));
  CHECK(made->metrics.at("kl") == Approx(0.5 / 3));
  CHECK(made->metrics.at("kl_penalty") == Approx(-0.05 / 3));
  CHECK(made->metrics.at("value_mean") == Approx(0.5));
  const double mean = (0.7 + 1.0 + 0.0) / 3, mean_error = (0.45 + 0.5 - 0.75) / 3;
  const auto variance = [](std::vector<double> x, double m) {
    double sum = 0;
    for (const double v : x) sum += (v - m) * (v - m);
    return sum;
  };
  CHECK(made->metrics.at("explained_variance") ==
        Approx(1 - variance({0.45, 0.5, -0.75}, mean_error) / variance({0.7, 1, 0}, mean)));
  options.whiten_advantages = true;
  const auto white = MakePpoBatch({batch, scores, values}, options);
  REQUIRE_OK(white);
  const auto& a = white->targets;
  CHECK(a[0][0].advantages[0] + a[0][0].advantages[1] + a[1][0].advantages[0] ==
        Approx(0).margin(1e-6));
  CHECK(a[0][0].returns == first.returns);

  auto broken = values;
  broken[1][0][0] = std::numeric_limits<float>::quiet_NaN();
  const auto refused = MakePpoBatch({batch, scores, broken}, options);
  CHECK(refused.status().message().find("group 1, completion 0: token 0") != std::string::npos);
}

TEST_CASE("mini-batches have every completion once an epoch, with its targets") {
  engine::TrainBatch batch;
  BatchTargets targets;
  for (int g = 0; g < 5; ++g) {
    batch.groups.emplace_back().prompt_ids = {100 + g};
    targets.emplace_back();
    for (int c = 0; c < 3; ++c) {
      const bool is_empty = g == 2 && c == 1;
      batch.groups.back().completions.push_back(is_empty ? Completion({}, {}, {})
                                                         : Completion({10 * g + c}, {-1}, {0}));
      targets.back().push_back({});
      if (!is_empty) targets.back().back().advantages = {static_cast<float>(10 * g + c)};
    }
  }
  const rl::MiniBatchOptions options{.num_epochs = 2, .size = 4, .seed = 3, .step = 1};
  const auto plan = PlanUpdates(batch, options);
  REQUIRE(plan.size() == 8);  // 14 completions: 4, 4, 4 and 2, twice
  std::map<int32_t, int> seen;
  for (const auto& refs : plan) {
    const MiniBatch mini = TakeMiniBatch(batch, targets, refs);
    for (size_t g = 0; g < mini.batch.groups.size(); ++g) {
      const engine::TrainGroup& group = mini.batch.groups[g];
      for (size_t c = 0; c < group.completions.size(); ++c) {
        const int32_t id = group.completions[c].ids[0];
        CHECK(group.prompt_ids[0] == 100 + id / 10);
        CHECK(mini.targets[g][c].advantages[0] == static_cast<float>(id));
        ++seen[id];
      }
    }
  }
  CHECK(seen.size() == 14);
  for (const auto& [id, count] : seen) CHECK(count == 2);
}

TEST_CASE("a receiver whose relay dies goes on at the next source where it was") {
  const Spread spread;
  const auto provider = ProvideStore(&spread.store);
  WeightsServer trainer(provider.get());
  WeightsRelay relay, own;
  const auto incoming = spread.Begin(relay, 500'000);
  auto dying = std::make_unique<WeightsServer>(&relay);
  FetchRequest request = spread.From({dying->address, trainer.address});
  request.stall_ms = 20000;  // signs of life keep it waiting
  request.relay = &own;
  std::thread killer([&] {
    Clock::Real().SleepNs(700'000'000);
    dying->server = nullptr;
  });
  // Whoever receives from this receiver has what it has.
  WeightsServer passing_on(&own);
  absl::StatusOr<FetchedWeights> below;
  std::thread receiver([&] { below = FetchWeights(spread.From({passing_on.address})); });
  absl::StatusOr<FetchedWeights> fetched = FetchWeights(request);
  killer.join();
  receiver.join();
  for (absl::StatusOr<FetchedWeights>* got : {&fetched, &below}) {
    REQUIRE_OK(*got);
    CHECK((*got)->version->hash == spread.next->hash);
    CHECK((*got)->was_delta);
    CHECK((*got)->bytes_received == spread.num_bytes);  // no byte twice
  }
  CHECK(fetched->num_sources_left == 1);
  CHECK(below->num_sources_left == 0);
}

TEST_CASE("the only source is asked again over a new connection when the old one falls silent") {
  const Spread spread;
  const auto provider = ProvideStore(&spread.store);
  WeightsServer trainer(provider.get());
  CutLink link(trainer.server->port(), spread.num_bytes / 2);
  FetchRequest request = spread.From({link.address()});
  request.reconnect_ms = 300;
  const int64_t begin_ns = Clock::Real().NowNs();
  const auto fetched = FetchWeights(request);
  REQUIRE_OK(fetched);
  CHECK(fetched->version->hash == spread.next->hash);
  CHECK(fetched->was_delta);
  CHECK(fetched->bytes_received == spread.num_bytes);  // no byte twice
  CHECK(link.num_connections() == 2);
  CHECK(Clock::Real().NowNs() - begin_ns < request.last_stall_ms * 1'000'000 / 2);
}

TEST_CASE("silent, lying and failing relays are passed over; what is here is whole or not at all") {
  const Spread spread;
  const auto provider = ProvideStore(&spread.store);
  WeightsServer trainer(provider.get());
  WeightsRelay relay(absl::Milliseconds(400));
  WeightsServer server(&relay);
  FetchRequest request = spread.From({server.address, trainer.address});
  SECTION("one that has nothing") {}
  SECTION("one that has given up") {
    spread.Begin(relay, 1000)->Fail(absl::UnavailableError("gave up"));
  }
  SECTION("one that stopped, as a process that hangs") {
    const auto incoming = spread.Begin(relay, 1000);
    request.stall_ms = 100;  // shorter than between its signs of life
    CHECK(FetchWeights(request)->num_sources_left == 1);
  }
  SECTION("one whose bytes are damaged") {
    auto delta = *spread.store.DeltasTo(*spread.next)[0];
    engine::Bytes damaged(delta.tensors[0].span().begin(), delta.tensors[0].span().end());
    damaged[damaged.size() / 2] ^= 0x10;
    relay.Begin(ToProto(*spread.next), spread.base.get(),
                std::make_shared<engine::GrowingTensors>(
                    std::vector{engine::SharedBytes(damaged), delta.tensors[1]}));
    const auto alone = FetchWeights(spread.From({server.address}));
    CHECK_FALSE(alone.ok());
  }
  const auto fetched = FetchWeights(request);
  REQUIRE_OK(fetched);
  CHECK(fetched->version->hash == spread.next->hash);
  CHECK(fetched->was_delta);
  CHECK(fetched->num_sources_left == 1);
}

TEST_CASE("the first token whose log-prob differs is named, across micro-batches") {
  engine::TrainBatch batch;
  batch.groups.resize(2);
  batch.groups[0].completions = {Completion({5, 6}, {-1.0f, -2.0f}, {3, 3}), Completion({}, {}, {}),
                                 Completion({7}, {-3.0f}, {2})};
  batch.groups[1].completions = {Completion({8, 9}, {-4.0f, -5.0f}, {3, 3})};
  const auto objective = rl::MakeObjective("grpo", {});
  REQUIRE_OK(objective);
  // What the trainer computed; the third token belongs to an older version and may differ.
  const std::vector<float> first = {-1.0f, -2.0f, -3.5f}, second = {-4.0f, -5.25f};
  const auto run = [&](const std::vector<float>& last) {
    StepObjective step(*objective, batch, 3);
    const std::vector<int64_t> first_begin = {0, 2, 3}, second_begin = {0, 2};
    const std::vector<float> behaviour = {-1.0f, -2.0f, -3.0f, -4.0f, -5.0f}, entropy(5, 1.0f);
    const std::vector<float> advantages = {1.0f, -1.0f, 0.5f};
    const std::vector<engine::CompletionRef> refs = {{0, 0}, {0, 2}, {1, 0}};
    std::vector<float> d_logprobs(5), d_entropy(5);
    const auto evaluate = [&](const std::vector<float>& logprobs, const std::vector<int64_t>& begin,
                              size_t token, size_t completion) {
      engine::ObjectiveInput input;
      input.logprobs = logprobs;
      input.entropy = absl::MakeConstSpan(entropy).subspan(token, logprobs.size());
      input.behaviour_logprobs = absl::MakeConstSpan(behaviour).subspan(token, logprobs.size());
      input.completion_begin = begin;
      input.advantages = absl::MakeConstSpan(advantages).subspan(completion);
      input.completions = absl::MakeConstSpan(refs).subspan(completion);
      input.step_tokens = 5;
      input.step_completions = 3;
      engine::ObjectiveOutput output;
      output.d_logprobs = absl::MakeSpan(d_logprobs).subspan(token, logprobs.size());
      output.d_entropy = absl::MakeSpan(d_entropy).subspan(token, logprobs.size());
      step.Evaluate(input, output);
    };
    evaluate(first, first_begin, 0, 0);
    evaluate(last, second_begin, 3, 2);
    const bool all_finite = std::isfinite(last[0]);
    CHECK(step.sums().num_tokens == (all_finite ? 5 : 3));
    CHECK(std::isfinite(step.sums().loss) == all_finite);
    CHECK(step.error().message() ==
          (all_finite ? ""
                      : "group 1: sequence 0, token 0: log-prob: expected a finite number, found "
                        "nan"));
    CHECK(step.sums().Metrics().count("kl") == 0);
    CHECK(d_logprobs[0] < 0);
    return step.first_mismatch();
  };
  CHECK(!run({-4.0f, -5.0f}).has_value());
  const absl::optional<Mismatch> mismatch = run(second);
  REQUIRE(mismatch.has_value());
  CHECK(mismatch->group == 1);
  CHECK(mismatch->completion == 0);
  CHECK(mismatch->position == 1);
  CHECK(mismatch->token == 9);
  CHECK(mismatch->trainer_logprob == -5.25f);
  CHECK(mismatch->generator_logprob == -5.0f);
  CHECK(run({std::numeric_limits<float>::quiet_NaN(), -5.0f}).has_value());
}

TEST_CASE("advantages are divided over the batch, completions without tokens left out") {
  engine::TrainBatch batch;
  batch.groups.resize(2);
  batch.groups[0].completions = {Completion({5}, {-1.0f}, {3}), Completion({}, {}, {})};
  batch.groups[1].completions = {Completion({8}, {-4.0f}, {3})};
  batch.groups[0].completions[0].advantage = 3;
  batch.groups[0].completions[1].advantage = 100;
  batch.groups[1].completions[0].advantage = -3;
  CHECK(AdvantageDivisor(batch) == Approx(3));
  const auto objective = rl::MakeObjective("reinforce", {});
  REQUIRE_OK(objective);
  const StepObjective step(*objective, batch, 3, AdvantageDivisor(batch));
  const std::vector<float> logprobs = {-1.0f, -4.0f}, advantages = {3, -3}, entropy = {1, 1};
  const std::vector<int64_t> begin = {0, 1, 2};
  const std::vector<engine::CompletionRef> refs = {{0, 0}, {1, 0}};
  std::vector<float> d_logprobs(2), d_entropy(2);
  engine::ObjectiveInput input;
  input.logprobs = input.behaviour_logprobs = logprobs;
  input.entropy = entropy;
  input.completion_begin = begin;
  input.advantages = advantages;
  input.completions = refs;
  input.step_tokens = input.step_completions = 2;
  engine::ObjectiveOutput output;
  output.d_logprobs = absl::MakeSpan(d_logprobs);
  output.d_entropy = absl::MakeSpan(d_entropy);
  step.Evaluate(input, output);
  CHECK(d_logprobs[0] == Approx(-0.5));
  CHECK(d_logprobs[1] == Approx(0.5));
}

TEST_CASE("what a checkpoint carries comes back; times are left out") {
  StepOutcome outcome;
  outcome.version = 12;
  outcome.hash = "abc";
  outcome.metrics = {{"loss", 0.1 + 0.2},
                     {"train_seconds", 3.0},
                     {"train_tokens_per_second", 9.0},
                     {"grad_norm", std::numeric_limits<double>::infinity()}};
  outcome.skipped = true;
  outcome.skip_reason = "not finite \xff";
  outcome.num_tokens = 77;
  outcome.seconds = 5;
  const std::string text = ToJson({.caller_json = "{\"a\": [1]}", .last_outcome = outcome});
  outcome.seconds = 6;
  outcome.metrics["train_seconds"] = 4;
  CHECK(text == ToJson({.caller_json = "{\"a\": [1]}", .last_outcome = outcome}));
  const auto extra = ParseExtra(text);
  REQUIRE_OK(extra);
  CHECK(extra->caller_json == "{\"a\": [1]}");
  REQUIRE(extra->last_outcome.has_value());
  CHECK(extra->last_outcome->version == 12);
  CHECK(extra->last_outcome->hash == "abc");
  CHECK(extra->last_outcome->skipped);
  CHECK(extra->last_outcome->num_tokens == 77);
  CHECK(extra->last_outcome->metrics.size() == 2);
  CHECK(extra->last_outcome->metrics.at("loss") == 0.1 + 0.2);
  CHECK(std::isnan(extra->last_outcome->metrics.at("grad_norm")));

  CHECK(!ParseExtra(ToJson(CheckpointExtra{.caller_json = "", .last_outcome = {}}))
             ->last_outcome.has_value());
  for (const char* bad : {"", "{", "[]", "{}", "{\"caller\": 1}",
                          "{\"caller\": \"\", \"last_outcome\": {\"version\": \"x\"}}",
                          "{\"caller\": \"\", \"last_outcome\": 5}"}) {
    INFO(bad);
    CHECK(absl::IsDataLoss(ParseExtra(bad).status()));
  }
}

TEST_CASE("a delta is encoded when it is asked for, and fetched while it grows") {
  Spread spread;
  engine::WeightsStore store(2);
  store.Put(spread.base);
  store.Put(spread.next);
  DeltaEncoder encoder(&store, GENERATE(1, 3));
  encoder.SetTrainerBusy(GENERATE(false, true));
  const auto make = [&](const v1::PolicyVersion& base, const v1::PolicyVersion& version) {
    return encoder.Get(base.number(), base.hash(), version.number(), version.hash());
  };
  const auto provider = ProvideStore(&store, make);
  WeightsServer trainer(provider.get());
  // Whoever has nothing is told of no delta.
  FetchRequest request = spread.From({trainer.address});
  request.base = nullptr;
  CHECK_FALSE(FetchWeights(request)->was_delta);
  const auto fetched = FetchWeights(spread.From({trainer.address}));
  REQUIRE_OK(fetched);
  CHECK(fetched->was_delta);
  CHECK(fetched->bytes_received == spread.num_bytes);
  const auto get = [&](const auto& a, const auto& b) {
    return encoder.Get(a->number, a->hash, b->number, b->hash);
  };
  const auto again = get(spread.base, spread.next);
  CHECK(*again == *get(spread.base, spread.next));  // once
  CHECK(absl::IsFailedPrecondition(get(spread.next, spread.base).status()));
  const auto third = Version(2, 2);
  CHECK(absl::IsFailedPrecondition(get(spread.next, third).status()));
}
}  // namespace stretto::services
