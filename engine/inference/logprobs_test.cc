// Alternatives of drawn tokens and log-probs of prompts.
#include <algorithm>
#include <catch2/catch.hpp>

#include "engine/inference/inference_fixture.h"
#include "engine/inference/score.h"

namespace stretto::engine::testing {
namespace {
struct Reported {
  std::vector<PromptLogprob> prompt;
  std::vector<std::vector<TokenLogprob>> top;
  Result result;
  int num_prompts = 0;
};

std::map<uint64_t, Reported> Run(InferenceEngine& engine) {
  std::map<uint64_t, Reported> all;
  while (engine.HasWork()) {
    for (const Event& event : engine.Step()) {
      Reported& r = all[event.request_id];
      if (event.kind == Event::Kind::kPrompt) {
        CHECK(r.result.ids.empty());
        r.prompt = event.prompt_logprobs;
        ++r.num_prompts;
        continue;
      }
      if (event.kind == Event::Kind::kToken) r.top.push_back(event.top_logprobs);
      Results one;
      one[event.request_id] = std::move(r.result);
      Collect({&event, 1}, one);
      r.result = std::move(one[event.request_id]);
    }
  }
  return all;
}

// The prompt's log-probs as the scorer has them: all but the first token as a completion of it.
std::vector<float> Scored(const Model& model, const std::vector<int32_t>& ids, float temperature,
                          uint64_t weights_seed) {
  auto scorer = SequenceScorer::Create(*model.transformer, {});
  REQUIRE_OK(scorer);
  const ScoreGroup group{{ids[0]}, {{ids.begin() + 1, ids.end()}}};
  auto scored = (*scorer)->Score(*model.Weights(weights_seed), {&group, 1}, temperature);
  REQUIRE_OK(scored);
  return (*scored)[0][0];
}

std::vector<float> LogprobsOf(const std::vector<PromptLogprob>& prompt) {
  std::vector<float> logprobs;
  for (const PromptLogprob& p : prompt) logprobs.push_back(p.logprob);
  return logprobs;
}

// Sorted, distinct, as many as asked for, and with the value of `id` where it is among them.
void CheckTop(const std::vector<TokenLogprob>& top, size_t count, int32_t id, float logprob) {
  REQUIRE(top.size() == count);
  bool found = false;
  for (size_t k = 0; k < count; ++k) {
    if (k > 0) {
      CHECK((top[k].logprob < top[k - 1].logprob ||
             (top[k].logprob == top[k - 1].logprob && top[k].token != top[k - 1].token)));
    }
    if (top[k].token != id) continue;
    found = true;
    CHECK(std::memcmp(&top[k].logprob, &logprob, sizeof(float)) == 0);
  }
  if (!found) CHECK(logprob <= top.back().logprob);
}
}  // namespace

TEST_CASE("the likeliest tokens beside each drawn one, with its bits") {
  for (const char* backend : {"cpu", "reference"}) {
    const Model model = MakeModel(backend, 2, DType::kBF16);
    EngineOptions options;
    options.num_kv_blocks = 64;
    const auto engine = model.Engine(options);
    Request r;
    r.prompt_ids = {5, 9, 11};
    r.sampling.max_tokens = 20;
    r.sampling.temperature = 0.7f;
    r.sampling.repetition_penalty = 1.5f;
    r.sampling.stop_ids = {3};
    const Result plain = RunAlone(*engine, r);
    for (const int32_t count : {1, 5, kMaxTopLogprobs}) {
      r.sampling.top_logprobs = count;
      REQUIRE_OK(engine->Submit(r));
      const Reported reported = Run(*engine).at(0);
      CHECK(reported.result.SameBits(plain));
      for (size_t i = 0; i < plain.ids.size(); ++i) {
        CheckTop(reported.top[i], static_cast<size_t>(count), plain.ids[i], plain.logprobs[i]);
      }
    }
    r.sampling.top_logprobs = kMaxTopLogprobs + 1;
    CHECK(engine->Submit(r).code() == absl::StatusCode::kInvalidArgument);
    r.sampling.top_logprobs = -1;
    CHECK(engine->Submit(r).code() == absl::StatusCode::kInvalidArgument);
  }
}

TEST_CASE("a prompt's log-probs are the scorer's: chunked, on a cache hit, preempted, in company") {
  PhiloxStream random(::stretto::testing::Seed());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Model model = MakeModel("cpu", 2, dtype);
    for (const int32_t rows : {4, 7, 64, 300}) {
      EngineOptions options;
      options.num_kv_blocks = 24;  // tiny: some are preempted
      options.max_running = 4;
      options.max_tokens_per_step = rows;
      const auto engine = model.Engine(options);
      std::vector<Request> requests;
      for (uint64_t id = 0; id < 12; ++id) {
        Request r = RandomRequest(random, id, model.transformer->config().vocab_size);
        r.prompt_logprobs = id % 4 != 3;
        r.sampling.top_logprobs = id % 2 == 0 ? 3 : 0;
        // Every third repeats the one before: the cache knows its prompt.
        if (id % 3 == 1) r.prompt_ids = requests.back().prompt_ids;
        if (id % 3 == 2) r.prompt_ids.insert(r.prompt_ids.begin(), 33, 7);
        requests.push_back(r);
        REQUIRE_OK(engine->Submit(r));
      }
      auto reported = Run(*engine);
      // Once more, now that the cache has seen them all.
      for (const Request& r : requests) REQUIRE_OK(engine->Submit(r));
      auto again = Run(*engine);
      for (const Request& r : requests) {
        INFO("rows " << rows << ", request " << r.id);
        const auto& ids = r.prompt_ids;
        const bool wanted = r.prompt_logprobs && ids.size() > 1;
        CHECK(reported[r.id].num_prompts == (wanted ? 1 : 0));
        CHECK(again[r.id].num_prompts == (wanted ? 1 : 0));
        CHECK(again[r.id].result.SameBits(reported[r.id].result));
        if (!wanted) continue;
        const std::vector<float> expected = Scored(model, ids, r.sampling.temperature, 1);
        CHECK(Result::Same(LogprobsOf(reported[r.id].prompt), expected));
        CHECK(Result::Same(LogprobsOf(again[r.id].prompt), expected));
        if (r.sampling.top_logprobs == 0) continue;
        for (size_t i = 0; i + 1 < ids.size(); ++i) {
          const PromptLogprob& entry = reported[r.id].prompt[i];
          CheckTop(entry.top, 3, ids[i + 1], expected[i]);
          int32_t place = 1;
          while (place <= 3 && entry.top[place - 1].token != ids[i + 1]) ++place;
          CHECK((place <= 3 ? entry.rank == place : entry.rank > 3));
          CHECK(entry.rank <= model.transformer->config().vocab_size);
        }
      }
      CHECK(engine->stats().blocks_used == 0);
    }
  }
}

TEST_CASE("a prompt's log-probs in a group, and with weights that change meanwhile") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  EngineOptions options;
  options.num_kv_blocks = 64;
  options.max_running = 8;
  options.max_tokens_per_step = 8;
  const auto engine = model.Engine(options);
  const std::vector<int32_t> prompt(40, 6);
  std::vector<Request> group(4);
  for (size_t i = 0; i < group.size(); ++i) {
    group[i].id = i;
    group[i].prompt_ids = prompt;
    group[i].draw = {1, 2, static_cast<uint32_t>(i)};
    group[i].sampling.max_tokens = 5;
    group[i].prompt_logprobs = i == 0 || i == 2;
  }
  REQUIRE_OK(engine->SubmitGroup(group));
  (void)engine->Step();
  (void)engine->Step();
  ServedWeights next;
  next.weights = model.Weights(2);
  next.version = 1;
  next.hash = "two";
  REQUIRE_OK(engine->SwapWeights(next, SwapPolicy::kFinish));
  auto reported = Run(*engine);
  const std::vector<float> expected = Scored(model, prompt, 1.0f, 2);
  for (size_t i = 0; i < group.size(); ++i) {
    CHECK(reported[i].result.num_ends == 1);
    CHECK(reported[i].num_prompts == (group[i].prompt_logprobs ? 1 : 0));
    if (group[i].prompt_logprobs) {
      CHECK(Result::Same(LogprobsOf(reported[i].prompt), expected));
    }
  }
}
}  // namespace stretto::engine::testing
