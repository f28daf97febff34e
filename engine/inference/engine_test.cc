// The engine's behaviour beside the bits: limits, bad input, ends, cancellation, text, weights.
#include "engine/inference/engine.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <utility>

#include "engine/inference/inference_fixture.h"

namespace stretto::engine {
namespace {
using testing::MakeModel;
using testing::Model;
using testing::Result;
using testing::Results;
using testing::RunAlone;

// Token t is the letter 'a' + t % 26; token 60 has no text; token 59 is two halves of "é" in turn.
class Letters final : public TextDecoder {
 public:
  std::string Push(int32_t token) override {
    if (token == 60) return "";
    if (token != 59) return Finish() + static_cast<char>('a' + token % 26);
    half_ = !half_;
    return half_ ? "" : "é";
  }
  std::string Finish() override {
    const bool half = std::exchange(half_, false);
    return half ? "\uFFFD" : "";
  }

 private:
  bool half_ = false;
};

EngineOptions Options(int64_t num_blocks = 64) {
  EngineOptions options;
  options.num_kv_blocks = num_blocks;
  options.eos_ids = {5};
  options.text_decoder = [](const SamplingParams&) { return std::make_unique<Letters>(); };
  return options;
}

Request Make(uint64_t id, int32_t max_tokens = 20, size_t num_prompt = 10) {
  Request r;
  r.id = id;
  r.prompt_ids.assign(num_prompt, static_cast<int32_t>(id % 50 + 7));
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  r.draw = {1, id, 0};
  return r;
}

// Makes the completion begin with these tokens, whatever the model thinks, by forcing all but the
// last and biasing that.
Request Saying(std::vector<int32_t> tokens) {
  Request r = Make(1);
  r.sampling.temperature = 0;
  r.sampling.logit_bias = {{tokens.back(), 1000.0f}};
  tokens.pop_back();
  r.forced_prefix = std::move(tokens);
  r.want_text = true;
  return r;
}
}  // namespace

TEST_CASE("bad input is refused with a reason, and the others are untouched") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options(8));
  const Result alone = RunAlone(*engine, Make(1));
  REQUIRE_OK(engine->Submit(Make(1)));
  const auto refused = [&](const std::function<void(Request&)>& change, const std::string& reason) {
    Request r = Make(2);
    change(r);
    const absl::Status status = engine->Submit(r);
    INFO(status.ToString());
    CHECK(absl::IsInvalidArgument(status));
    CHECK(std::string(status.message()).find(reason) != std::string::npos);
  };
  const float nan = std::nanf(""), inf = INFINITY;
  refused([](Request& r) { r.prompt_ids.clear(); }, "prompt is empty");
  refused([](Request& r) { r.prompt_ids[3] = 61; }, "prompt_ids[3] is 61");
  refused([](Request& r) { r.prompt_ids[0] = -1; }, "prompt_ids[0] is -1");
  refused([](Request& r) { r.forced_prefix = {61}; }, "forced_prefix[0]");
  refused([](Request& r) { r.prompt_ids.assign(300, 1); }, "no room in a context of 129");
  refused([](Request& r) { r.sampling.max_tokens = -1; }, "max_tokens -1");
  refused([](Request& r) { r.sampling.min_tokens = 21; }, "min_tokens is 21");
  refused([](Request& r) { r.sampling.max_tokens = 200; },
          "together 210, more than a context of 129");
  refused([](Request& r) { r.sampling.max_tokens = 120; }, "expected at most 119");
  refused([](Request& r) { r.prompt_ids.assign(129, 1), r.sampling.max_tokens = 0; }, "KV cache");
  refused([=](Request& r) { r.sampling.temperature = nan; }, "temperature is nan");
  refused([=](Request& r) { r.sampling.temperature = inf; }, "temperature is inf");
  refused([](Request& r) { r.sampling.temperature = -1; }, "temperature is -1");
  refused([](Request& r) { r.sampling.temperature = 1e-30f; }, "at least 1e-4");
  refused([](Request& r) { r.sampling.top_k = -2; }, "top_k is -2");
  refused([](Request& r) { r.sampling.top_k = INT32_MIN; }, "top_k is -2147483648");
  refused([](Request& r) { r.sampling.top_p = 0; }, "top_p is 0");
  refused([=](Request& r) { r.sampling.top_p = nan; }, "top_p is nan");
  refused([](Request& r) { r.sampling.min_p = 1.5f; }, "min_p is 1.5");
  refused([](Request& r) { r.sampling.repetition_penalty = 0; }, "repetition_penalty is 0");
  refused([=](Request& r) { r.sampling.presence_penalty = inf; }, "presence_penalty is inf");
  refused([=](Request& r) { r.sampling.logit_bias = {{3, nan}}; }, "logit_bias is nan");
  refused([](Request& r) { r.sampling.logit_bias = {{99, 1.0f}}; }, "99");
  refused([](Request& r) { r.sampling.logit_bias.assign(5000, {3, 1.0f}); }, "up to 4096");
  refused([](Request& r) { r.sampling.stop_ids = {-7}; }, "stop_ids[0] is -7");
  refused([](Request& r) { r.sampling.stop_strings = {""}; }, "0 bytes");
  refused([](Request& r) { r.sampling.stop_strings = {std::string(10 << 20, 'x')}; },
          "10485760 bytes");
  refused([](Request& r) { r.sampling.stop_strings = {"a\xC3"}; }, "UTF-8");
  refused([](Request& r) { r.sampling.stop_strings = {"\xED\xA0\x80"}; }, "UTF-8");
  refused([](Request& r) { r.sampling.stop_strings.assign(33, "x"); }, "33 entries");
  CHECK(absl::IsAlreadyExists(engine->Submit(Make(1))));
  Results results;
  RunToEnd(*engine, results);
  CHECK(results.size() == 1);
  CHECK(results[1].SameBits(alone));

  EngineOptions no_text = Options();
  no_text.text_decoder = nullptr;
  const auto mute = model.Engine(no_text);
  Request r = Make(1);
  r.sampling.stop_strings = {"x"};
  CHECK(absl::IsInvalidArgument(mute->Submit(r)));
}

TEST_CASE("impossible options are refused") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto refused = [&](const std::function<void(EngineOptions&)>& change) {
    EngineOptions options = Options();
    change(options);
    const auto engine = InferenceEngine::Create(*model.transformer, model.Served(1), options);
    CHECK(absl::IsInvalidArgument(engine.status()));
  };
  refused([](EngineOptions& o) { o.max_running = 0; });
  refused([](EngineOptions& o) { o.max_tokens_per_step = 63; });
  refused([](EngineOptions& o) { o.num_kv_blocks = 0, o.kv_cache_bytes = 100; });
  refused([](EngineOptions& o) { o.eos_ids = {61}; });
  refused([](EngineOptions& o) { o.max_live_versions = 0; });
}

TEST_CASE("the end of the context ends a completion") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  CHECK(engine->max_context() == 256);
  for (const size_t num_prompt : {200, 255}) {
    const auto left = static_cast<int32_t>(256 - num_prompt);
    CHECK(absl::IsInvalidArgument(engine->Submit(Make(1, left + 1, num_prompt))));
    for (const int32_t max_tokens : {0, left}) {
      const Result result = RunAlone(*engine, Make(1, max_tokens, num_prompt));
      CHECK(result.ids.size() == 256 - num_prompt);
      CHECK(result.end.reason == FinishReason::kLength);
    }
  }
  CHECK(engine->stats().blocks_used == 0);
}

TEST_CASE("a request of exactly the cache's size ends, alone and in company") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options(4));
  CHECK(engine->max_context() == 65);
  CHECK(absl::IsInvalidArgument(engine->Submit(Make(1, 56, 10))));
  CHECK(RunAlone(*engine, Make(1, 0, 10)).ids.size() == 55);
  Results results;
  for (uint64_t id = 0; id < 5; ++id) REQUIRE_OK(engine->Submit(Make(id, 55, 10)));
  RunToEnd(*engine, results);
  for (uint64_t id = 0; id < 5; ++id) CHECK(results[id].ids.size() == 55);
  CHECK(engine->stats().num_preemptions > 0);
  // No loop of admission and preemption: of 275 tokens, few were computed more than a few times.
  CHECK(engine->stats().prompt_tokens_computed < 5 * 10 + engine->stats().num_preemptions * 64);
  CHECK(engine->stats().num_preemptions < 30);
  CHECK(engine->stats().blocks_used == 0);
}

TEST_CASE("the queue is bounded, draining refuses, duplicates are named") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  EngineOptions options = Options();
  options.max_queued = 3;
  const auto engine = model.Engine(options);
  REQUIRE_OK(engine->Submit(Make(1)));
  CHECK(absl::IsAlreadyExists(engine->SubmitGroup({Make(2), Make(2)})));
  std::vector<Request> group(4, Make(2));
  for (uint64_t i = 0; i < 4; ++i) group[i].id = 10 + i;
  CHECK(absl::IsInvalidArgument(engine->SubmitGroup(group)));  // never fits
  group.pop_back();
  CHECK(absl::IsResourceExhausted(engine->SubmitGroup(group)));
  group[2].priority = 1;
  CHECK(absl::IsInvalidArgument(engine->SubmitGroup(group)));
  CHECK(absl::IsInvalidArgument(engine->SubmitGroup({})));
  engine->Drain();
  CHECK(absl::IsUnavailable(engine->Submit(Make(3))));
  Results results;
  RunToEnd(*engine, results);
  CHECK(results.size() == 1);
  engine->Undrain();
  REQUIRE_OK(engine->Submit(Make(1)));  // its id is free again
}

TEST_CASE("cancelling in every state returns what was certain and frees everything") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  EngineOptions options = Options(4);
  options.max_running = 2;
  options.max_tokens_per_step = 8;
  const auto engine = model.Engine(options);
  CHECK(absl::IsNotFound(engine->Cancel(1)));
  for (uint64_t id = 1; id <= 3; ++id) REQUIRE_OK(engine->Submit(Make(id, 40, 20)));
  Results results;
  REQUIRE_OK(engine->Cancel(3));  // queued
  Collect(engine->Step(), results);
  REQUIRE_OK(engine->Cancel(1));  // prefilling
  CHECK(absl::IsNotFound(engine->Cancel(1)));
  while (results[2].ids.size() < 3 && engine->HasWork()) Collect(engine->Step(), results);
  REQUIRE_OK(engine->Submit(Make(4, 40, 20)));
  engine->Pause();
  REQUIRE_OK(engine->Cancel(2));  // decoding, paused
  Collect(engine->Step(), results);
  CHECK(results[2].num_ends == 1);
  CHECK(engine->Step().empty());
  CHECK(engine->HasWork());
  engine->Resume();
  REQUIRE_OK(engine->Submit(Make(5, 40, 10)));
  while (engine->stats().num_preemptions == 0 && engine->HasWork())
    Collect(engine->Step(), results);
  REQUIRE_OK(engine->Cancel(5));  // preempted
  RunToEnd(*engine, results);
  for (const uint64_t id : {1, 2, 3, 5}) {
    CHECK(results[id].num_ends == 1);
    CHECK(results[id].end.reason == FinishReason::kAborted);
    CHECK(results[id].end.num_tokens == static_cast<int32_t>(results[id].ids.size()));
  }
  CHECK(results[2].ids.size() == 3);
  CHECK(results[5].ids.size() > 0);
  CHECK(results[4].ids.size() == 40);
  CHECK(engine->stats().blocks_used == 0);
  CHECK(engine->stats().num_aborted == 4);
}

TEST_CASE("EOS, stop ids, ignore_eos and min_tokens") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  Request r = Make(1);
  r.sampling.ignore_eos = false;
  r.sampling.logit_bias = {{5, 1000.0f}};
  Result result = RunAlone(*engine, r);
  CHECK(result.ids == std::vector<int32_t>{5});  // EOS is a token of the completion
  CHECK(result.end.reason == FinishReason::kStop);
  CHECK(result.end.stop_id == -1);
  r.sampling.min_tokens = 4;
  result = RunAlone(*engine, r);
  CHECK(result.ids.size() == 5);
  CHECK(result.ids.back() == 5);
  CHECK(std::count(result.ids.begin(), result.ids.end(), 5) == 1);
  r.sampling.ignore_eos = true;
  result = RunAlone(*engine, r);
  CHECK(result.ids == std::vector<int32_t>(20, 5));
  CHECK(result.end.reason == FinishReason::kLength);
  r.sampling.stop_ids = {5, 6};
  r.sampling.max_tokens = 5;
  result = RunAlone(*engine, r);
  CHECK(result.ids.size() == 5);  // at the limit a stop is still a stop
  CHECK(result.end.reason == FinishReason::kStop);
  CHECK(result.end.stop_id == 5);
}

TEST_CASE("a forced prefix that is complete ends at once") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  Request r = Make(1);
  r.sampling.ignore_eos = false;
  r.forced_prefix = {9, 9, 5};
  Result result = RunAlone(*engine, r);
  CHECK(result.end.reason == FinishReason::kStop);
  CHECK(result.end.num_tokens == 3);
  CHECK(result.ids.empty());
  r.forced_prefix.assign(20, 9);
  CHECK(RunAlone(*engine, r).end.reason == FinishReason::kLength);
  r.forced_prefix = {0, 1, 2};
  r.sampling.stop_strings = {"bc"};
  CHECK(RunAlone(*engine, r).end.reason == FinishReason::kStop);
}

TEST_CASE("stop strings cut ids, log-probs and text together") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  Request r = Saying({0, 1, 2});  // "abccc…"
  r.sampling.stop_strings = {"cccc"};
  r.sampling.max_tokens = 20;
  Results results;
  REQUIRE_OK(engine->Submit(r));
  for (int i = 0; i < 3; ++i) Collect(engine->Step(), results);
  CHECK(results[1].ids.empty());  // held back
  RunToEnd(*engine, results);
  CHECK(results[1].ids.empty());
  CHECK(results[1].logprobs.empty());
  CHECK(results[1].text.empty());
  CHECK(results[1].end.num_tokens == 2);
  CHECK(results[1].end.reason == FinishReason::kStop);
  CHECK(results[1].end.stop_string == 0);

  r.sampling.keep_stop_string = true;
  Result result = RunAlone(*engine, r);
  CHECK(result.ids == std::vector<int32_t>(4, 2));
  CHECK(result.text == "cccc");

  // Held back, then released by the end.
  r.sampling.keep_stop_string = false;
  r.sampling.max_tokens = 5;
  result = RunAlone(*engine, r);
  CHECK(result.ids == std::vector<int32_t>(3, 2));
  CHECK(result.text == "ccc");
  CHECK(result.end.reason == FinishReason::kLength);

  // Or by cancellation.
  REQUIRE_OK(engine->Submit(r));
  engine->Step();
  REQUIRE_OK(engine->Cancel(1));
  Results cancelled;
  RunToEnd(*engine, cancelled);
  CHECK(cancelled[1].ids == std::vector<int32_t>{2});
  CHECK(cancelled[1].text == "c");

  // min_tokens: a string that would leave fewer tokens does not count.
  r.sampling.max_tokens = 20;
  r.sampling.stop_strings = {"cc"};
  r.sampling.min_tokens = 6;
  result = RunAlone(*engine, r);
  CHECK(result.end.num_tokens == 6);
  CHECK(result.text == "cccc");
}

TEST_CASE("text: whole characters, none twice, the rest at the end") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  Request r = Saying({0, 59});
  r.sampling.max_tokens = 4;
  const Result result = RunAlone(*engine, r);
  CHECK(result.ids == std::vector<int32_t>(3, 59));
  CHECK(result.text == "é\uFFFD");
  r.want_text = false;
  CHECK(RunAlone(*engine, r).text.empty());
}

TEST_CASE("logits that are not finite end their request alone") {
  testing::ModelShape shape;
  shape.tie_word_embeddings = false;
  const Model model = MakeModel("cpu", 1, DType::kF32, shape);
  ServedWeights weights{model.Weights(1, /*nan_id=*/13), 1, "nan"};
  auto engine = InferenceEngine::Create(*model.transformer, weights, Options(4));
  REQUIRE_OK(engine);
  const Request good = Make(0), bad = Make(6);  // the prompt of 6 is all 13
  Request safe = good;
  safe.sampling.logit_bias = {{13, -1e6f}};
  const Result alone = RunAlone(**engine, safe);
  REQUIRE_OK((*engine)->Submit(bad));
  REQUIRE_OK((*engine)->Submit(safe));
  Results results;
  RunToEnd(**engine, results);
  CHECK(results[6].end.reason == FinishReason::kError);
  CHECK(absl::IsInternal(results[6].end.status));
  CHECK(results[0].SameBits(alone));
  CHECK(RunAlone(**engine, safe).SameBits(alone));  // in the blocks that held NaN
}

TEST_CASE("new weights: what each policy does to running rollouts") {
  const Model model = MakeModel("cpu", 1, DType::kBF16);
  const Request r = Make(1, 40, 33);
  const auto old_engine = model.Engine(Options(), 1), new_engine = model.Engine(Options(), 2);
  const Result all_old = RunAlone(*old_engine, r), all_new = RunAlone(*new_engine, r);
  REQUIRE(!all_old.SameBits(all_new));
  std::vector<float> tails[3];
  for (const SwapPolicy policy : {SwapPolicy::kFinish, SwapPolicy::kRecompute, SwapPolicy::kKeep}) {
    const auto engine = model.Engine(Options(), 1);
    Results results;
    REQUIRE_OK(engine->Submit(r));
    while (results[1].ids.size() < 15) Collect(engine->Step(), results);
    ServedWeights served = model.Served(2);
    REQUIRE_OK(engine->SwapWeights(served, policy));
    CHECK(engine->version() == 2);
    CHECK(engine->weights_hash() == "hash2");
    Request later = r;
    later.id = 2;
    REQUIRE_OK(engine->Submit(later));
    RunToEnd(*engine, results);
    // No stale keys and values: the same prompt is computed again.
    CHECK(results[2].SameBits(all_new));
    CHECK(results[2].versions == std::vector<int64_t>(40, 2));
    std::vector<int64_t> versions(15, 1);
    versions.resize(40, policy == SwapPolicy::kFinish ? 1 : 2);
    CHECK(results[1].versions == versions);
    CHECK(engine->stats().blocks_used == 0);
    tails[static_cast<int>(policy)] = results[1].logprobs;
    if (policy == SwapPolicy::kFinish) CHECK(results[1].SameBits(all_old));
    if (policy != SwapPolicy::kRecompute) continue;
    Request resumed = r;
    resumed.forced_prefix.assign(results[1].ids.begin(), results[1].ids.begin() + 15);
    const Result elsewhere = RunAlone(*new_engine, resumed);
    CHECK(Result::Same(elsewhere.logprobs,
                       {results[1].logprobs.begin() + 15, results[1].logprobs.end()}));
  }
  // kept keys and values show in the log-probs: the comparison above can fail.
  CHECK(!Result::Same(tails[1], tails[2]));
}

TEST_CASE("requests that wrote no token take the new weights, in every policy") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const Request r = Make(1, 20, 60);
  const auto new_engine = model.Engine(Options(), 2);
  const Result all_new = RunAlone(*new_engine, r);
  for (const SwapPolicy policy : {SwapPolicy::kFinish, SwapPolicy::kRecompute, SwapPolicy::kKeep}) {
    for (const bool paused : {false, true}) {
      EngineOptions options = Options();
      options.max_running = 2;
      options.max_tokens_per_step = 16;
      const auto engine = model.Engine(options, 1);
      REQUIRE_OK(engine->Submit(r));
      engine->Step();  // prefilling
      Request queued = r;
      queued.id = 2;
      REQUIRE_OK(engine->Submit(queued));
      if (paused) engine->Pause();
      REQUIRE_OK(engine->SwapWeights(model.Served(2), policy));
      engine->Resume();
      Results results;
      RunToEnd(*engine, results);
      CHECK(results[1].SameBits(all_new));
      CHECK(results[2].SameBits(all_new));
    }
  }
}

TEST_CASE("old weights are released when their last rollout ends; too many are refused") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  ServedWeights first = model.Served(1);
  const std::weak_ptr<const ModelWeights> old = first.weights;
  auto created = InferenceEngine::Create(*model.transformer, std::move(first), Options());
  REQUIRE_OK(created);
  InferenceEngine& engine = **created;
  Results results;
  REQUIRE_OK(engine.Submit(Make(1, 30)));
  Collect(engine.Step(), results);
  REQUIRE_OK(engine.SwapWeights(model.Served(2), SwapPolicy::kFinish));
  REQUIRE_OK(engine.SwapWeights(model.Served(3), SwapPolicy::kFinish));  // nobody runs on 2
  REQUIRE_OK(engine.Submit(Make(2, 30)));
  Collect(engine.Step(), results);
  CHECK(absl::IsResourceExhausted(engine.SwapWeights(model.Served(4), SwapPolicy::kFinish)));
  CHECK(engine.version() == 3);
  CHECK(!old.expired());
  while (results[1].num_ends == 0) Collect(engine.Step(), results);
  CHECK(old.expired());
  REQUIRE_OK(engine.SwapWeights(model.Served(4), SwapPolicy::kFinish));
  REQUIRE_OK(engine.SwapWeights(model.Served(5), SwapPolicy::kRecompute));
  RunToEnd(engine, results);
  CHECK(results[2].versions.front() == 3);
  CHECK(results[2].versions.back() == 5);
  CHECK(absl::IsInvalidArgument(engine.SwapWeights({}, SwapPolicy::kKeep)));
  const Model other = MakeModel("cpu", 1, DType::kBF16);
  CHECK(absl::IsInvalidArgument(engine.SwapWeights(other.Served(6), SwapPolicy::kKeep)));
}

TEST_CASE("a prompt is found in the cache, flushed while paused, and computed again") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  const Request r = Make(1, 20, 50);
  const Result first = RunAlone(*engine, r), second = RunAlone(*engine, r);
  CHECK(first.end.cached_prompt_tokens == 0);
  CHECK(second.end.cached_prompt_tokens == 48);
  CHECK(engine->stats().prompt_tokens_cached == 48);
  CHECK(engine->stats().prompt_tokens_asked == 100);
  CHECK(second.SameBits(first));
  engine->Pause();
  engine->FlushPrefixCache();
  CHECK(engine->stats().blocks_cached == 0);
  engine->Resume();
  const Result third = RunAlone(*engine, r);
  CHECK(third.end.cached_prompt_tokens == 0);
  CHECK(third.SameBits(first));
}
}  // namespace stretto::engine
