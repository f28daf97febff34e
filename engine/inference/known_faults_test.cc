// Faults that other engines are known for, one case each, so that the list can be run. What they
// share: they show only in company, after an end, or across a change, never in a first request
// alone. Those of model files are in known_faults_model_test.cc.
#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "engine/inference/inference_fixture.h"
#include "engine/inference/prefix_cache.h"
#include "engine/text/stream_decoder.h"

namespace stretto::engine {
namespace {
using testing::MakeModel;
using testing::Model;
using testing::Result;
using testing::Results;
using testing::RunAlone;

// The byte-level tokenizer of examples/tiny-model: byte b is token b + 1, token 0 the end.
constexpr int32_t kEos = 0;
int32_t Byte(uint8_t byte) { return byte + 1; }

class Text final : public TextDecoder {
 public:
  Text() : decoder_(TinyTokenizer()) {}
  std::string Push(int32_t token) override { return decoder_.Push(token); }
  std::string Finish() override { return decoder_.Finish(); }

 private:
  static const Tokenizer& TinyTokenizer() {
    static const auto* tokenizer = [] {
      auto read = Tokenizer::FromFolder(STRETTO_SOURCE_DIR "/examples/tiny-model");
      STRETTO_CHECK(read.ok());
      return read->release();
    }();
    return *tokenizer;
  }
  StreamDecoder decoder_;
};

Model TinyModel() {
  testing::ModelShape shape;
  shape.vocab_size = 257;
  return MakeModel("cpu", 1, DType::kBF16, shape);
}

EngineOptions Options(int64_t num_blocks = 64) {
  EngineOptions options;
  options.num_kv_blocks = num_blocks;
  options.eos_ids = {kEos};
  options.text_decoder = [](const SamplingParams&) { return std::make_unique<Text>(); };
  return options;
}

Request Make(uint64_t id, int32_t max_tokens = 20, size_t num_prompt = 10) {
  Request r;
  r.id = id;
  r.prompt_ids.assign(num_prompt, static_cast<int32_t>(id % 200 + 7));
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  r.draw = {1, id, 0};
  return r;
}

// A completion that is nothing but `token`.
Request Saying(int32_t token, int32_t max_tokens) {
  Request r = Make(1, max_tokens);
  r.sampling.temperature = 0;
  r.sampling.logit_bias = {{token, 1000.0f}};
  r.want_text = true;
  return r;
}

// What an engine with these weights writes that has never seen another request.
Result Fresh(const Model& model, const Request& request, uint64_t seed = 1) {
  return RunAlone(*model.Engine(Options(), seed), request);
}
}  // namespace

// Elsewhere it is admitted as soon as it heads the queue, never fits, and everybody waits for it.
TEST_CASE("known fault: a request larger than the cache") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options(4));
  REQUIRE_OK(engine->Submit(Make(1, 30)));
  for (const Request& large : {Make(2, 56), Make(2, 20, 100), Make(2, 0, 65)}) {
    const absl::Status status = engine->Submit(large);
    INFO(status.ToString());
    CHECK(absl::IsInvalidArgument(status));
    CHECK(std::string(status.message()).find("enlarge the cache") != std::string::npos);
  }
  CHECK(absl::IsInvalidArgument(engine->SubmitGroup({Make(2, 30), Make(3, 56)})));
  REQUIRE_OK(engine->Submit(Make(4, 55)));  // the largest that fits
  Results results;
  RunToEnd(*engine, results);
  CHECK(results.size() == 2);
  CHECK(results[1].ids.size() == 30);
  CHECK(results[4].ids.size() == 55);
}

// Elsewhere a preempted request takes back the blocks it has just given up, and two of them evict
// one another for ever, or the oldest starves. Here company never costs more steps than turns.
TEST_CASE("known fault: admit–preempt loop") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options(4));
  Results results;
  int64_t steps_in_turn = 0;
  for (uint64_t id = 1; id <= 8; ++id) {
    const auto alone = model.Engine(Options(4));
    RunAlone(*alone, Make(id, 50, 10));
    steps_in_turn += alone->stats().num_steps;
  }
  for (uint64_t id = 1; id <= 8; ++id) REQUIRE_OK(engine->Submit(Make(id, 50, 10)));
  while (engine->HasWork() && engine->stats().num_steps <= steps_in_turn) {
    Collect(engine->Step(), results);
  }
  CHECK(engine->stats().num_steps < steps_in_turn);
  CHECK(engine->stats().num_preemptions > 0);
  CHECK(engine->stats().num_preemptions < 8);  // no admission is undone by the next steps
  for (uint64_t id = 1; id <= 8; ++id) CHECK(results[id].ids.size() == 50);
  CHECK(results[1].end.num_preemptions == 0);
}

// Elsewhere one of the ways to end forgets the blocks, and the cache is a little smaller each time.
TEST_CASE("known fault: blocks kept after completion") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options(8));
  Results results;
  Request eos = Saying(kEos, 20), text = Saying(Byte('a'), 20), held = Saying(Byte('a'), 20);
  eos.sampling.ignore_eos = false;
  text.sampling.stop_strings = {"aaa"};
  held.sampling.stop_strings = {"aaab"};
  Request forced = Make(1);
  forced.forced_prefix.assign(20, 9);  // complete before it begins
  for (const Request& r : {Make(1), eos, text, held, forced}) {
    RunAlone(*engine, r);
    CHECK(engine->stats().blocks_used == 0);
  }
  for (int steps = 0; steps < 3; ++steps) {
    REQUIRE_OK(engine->SubmitGroup({Make(1, 20, 40), [] {
                                      Request second = Make(1, 20, 40);
                                      second.id = 2;
                                      return second;
                                    }()}));
    for (int i = 0; i < steps; ++i) Collect(engine->Step(), results);
    REQUIRE_OK(engine->Cancel(1));
    REQUIRE_OK(engine->Cancel(2));
    CHECK(engine->stats().blocks_used == 0);
    engine->Step();
  }
  CHECK(RunAlone(*engine, Make(9, 0, 10)).ids.size() == 119);  // the whole cache is there
}

// Elsewhere it is looked for among the running ones alone: it comes back and runs for nobody, or
// its blocks are freed twice.
TEST_CASE("known fault: aborting a retracted request") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options(4));
  const Result alone = Fresh(model, Make(1, 50, 10));
  REQUIRE_OK(engine->Submit(Make(1, 50, 10)));
  REQUIRE_OK(engine->Submit(Make(2, 50, 10)));
  Results results;
  while (engine->stats().num_preemptions == 0) Collect(engine->Step(), results);
  const size_t written = results[2].ids.size();
  CHECK(written > 0);
  REQUIRE_OK(engine->Cancel(2));
  CHECK(absl::IsNotFound(engine->Cancel(2)));
  RunToEnd(*engine, results);
  CHECK(results[2].num_ends == 1);
  CHECK(results[2].end.reason == FinishReason::kAborted);
  CHECK(results[2].ids.size() == written);
  CHECK(results[2].end.num_tokens == static_cast<int32_t>(written));
  CHECK(results[1].SameBits(alone));
  CHECK(engine->stats().blocks_used == 0);
  CHECK(RunAlone(*engine, Make(2, 50, 10)).ids.size() == 50);  // its id is free
}

// Elsewhere n samples of a seeded request get the seed itself each, and are n times the same text.
TEST_CASE("known fault: n children sharing a seed") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options());
  std::vector<Request> group(8, Make(1, 30));
  for (uint32_t i = 0; i < group.size(); ++i) {
    group[i].id = i;
    group[i].draw.sample_index = i;
  }
  REQUIRE_OK(engine->SubmitGroup(group));
  Results results;
  RunToEnd(*engine, results);
  std::set<std::vector<int32_t>> distinct;
  for (const Request& r : group) {
    distinct.insert(results[r.id].ids);
    CHECK(results[r.id].SameBits(Fresh(model, r)));  // and each is repeatable by itself
  }
  CHECK(distinct.size() == group.size());
}

// Elsewhere one generator serves the batch: a seeded request's draws depend on who else draws.
TEST_CASE("known fault: a seeded request beside unseeded ones") {
  const Model model = TinyModel();
  const Result alone = Fresh(model, Make(1, 40));
  PhiloxStream random(::stretto::testing::Seed());
  INFO("seed " << ::stretto::testing::Seed());
  for (int round = 0; round < 8; ++round) {
    const auto engine = model.Engine(Options(200));
    Results results;
    const int before = round % 4;
    for (int i = 0; i < before; ++i) {
      REQUIRE_OK(engine->Submit(testing::RandomRequest(random, 100 + i, 257)));
    }
    REQUIRE_OK(engine->Submit(Make(1, 40)));
    for (int i = 0; i < 6; ++i) {
      Request stranger = testing::RandomRequest(random, 200 + i, 257);
      if (i % 2 == 0) stranger.sampling.temperature = 0;
      REQUIRE_OK(engine->Submit(stranger));
      Collect(engine->Step(), results);
    }
    RunToEnd(*engine, results);
    CHECK(results[1].SameBits(alone));
  }
}

// Elsewhere the prefix cache outlives the weights that filled it.
TEST_CASE("known fault: stale keys and values after an update") {
  const Model model = TinyModel();
  const Request request = Make(1, 20, 50);
  const Result old_result = Fresh(model, request, 1), new_result = Fresh(model, request, 2);
  REQUIRE(!old_result.SameBits(new_result));
  for (const SwapPolicy policy : {SwapPolicy::kFinish, SwapPolicy::kRecompute, SwapPolicy::kKeep}) {
    const auto engine = model.Engine(Options());
    CHECK(RunAlone(*engine, request).SameBits(old_result));
    // One that runs on, whose blocks become full after the update.
    Request runs_on = Make(2, 60, 50);
    REQUIRE_OK(engine->Submit(runs_on));
    Results results;
    while (results[2].ids.size() < 20) Collect(engine->Step(), results);
    REQUIRE_OK(engine->SwapWeights(model.Served(2), policy));
    RunToEnd(*engine, results);
    const Result again = RunAlone(*engine, request);
    CHECK(again.end.cached_prompt_tokens == 0);
    CHECK(again.SameBits(new_result));
    CHECK(RunAlone(*engine, request).end.cached_prompt_tokens == 48);
    // What the one that ran on has left behind is of one version or is not found.
    Request longer = runs_on;
    longer.prompt_ids.insert(longer.prompt_ids.end(), results[2].ids.begin(), results[2].ids.end());
    Request beginning = longer;  // up to where it was when the weights changed
    beginning.prompt_ids.resize(70);
    RunAlone(*engine, beginning);
    CHECK(RunAlone(*engine, longer).SameBits(Fresh(model, longer, 2)));
  }
}

// Elsewhere a flush waits for running requests to end, which a pause prevents, or it takes their
// blocks.
TEST_CASE("known fault: flush while paused") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options());
  const Request running = Make(1, 40, 50), later = Make(2, 20, 50);
  const Result first = RunAlone(*engine, later);
  REQUIRE_OK(engine->Submit(running));
  Results results;
  while (results[1].ids.size() < 10) Collect(engine->Step(), results);
  engine->Pause();
  REQUIRE_OK(engine->Submit(later));
  CHECK(engine->stats().blocks_cached > 0);
  engine->FlushPrefixCache();
  CHECK(engine->stats().blocks_cached == 0);
  CHECK(engine->Step().empty());
  engine->Resume();
  RunToEnd(*engine, results);
  CHECK(results[1].SameBits(Fresh(model, running)));
  CHECK(results[2].end.cached_prompt_tokens == 0);
  CHECK(results[2].SameBits(first));
  CHECK(engine->stats().blocks_used == 0);
}

// Elsewhere tokens that the cache had come without log-probs, or shift those of the rest.
TEST_CASE("known fault: prompt log-probs on a cache hit") {
  const Model model = TinyModel();
  Request request = Make(1, 4, 50);
  for (size_t i = 0; i < request.prompt_ids.size(); ++i) {
    request.prompt_ids[i] = static_cast<int32_t>(i * i % 200);
  }
  const auto prompt_logprobs = [](InferenceEngine& engine, Request r) {
    r.prompt_logprobs = true;
    REQUIRE_OK(engine.Submit(r));
    std::vector<float> logprobs;
    while (engine.HasWork()) {
      for (const Event& event : engine.Step()) {
        for (const PromptLogprob& p : event.prompt_logprobs) logprobs.push_back(p.logprob);
      }
    }
    return logprobs;
  };
  const std::vector<float> cold = prompt_logprobs(*model.Engine(Options()), request);
  REQUIRE(cold.size() == 49);
  const auto engine = model.Engine(Options());
  RunAlone(*engine, request);
  CHECK(RunAlone(*engine, request).end.cached_prompt_tokens == 48);
  CHECK(Result::Same(prompt_logprobs(*engine, request), cold));
}

// Elsewhere min_tokens holds back EOS alone: a stop string ends the text at once all the same.
TEST_CASE("known fault: min_tokens with stop strings") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options());
  Request request = Saying(Byte('a'), 30);
  request.sampling.stop_strings = {"aa"};
  Result result = RunAlone(*engine, request);
  CHECK(result.end.num_tokens == 0);
  CHECK(result.text.empty());
  request.sampling.min_tokens = 7;
  result = RunAlone(*engine, request);
  CHECK(result.end.reason == FinishReason::kStop);
  CHECK(result.ids.size() == 7);
  CHECK(result.logprobs.size() == 7);
  CHECK(result.text == "aaaaaaa");
}

// Elsewhere what was held back is lost when the text turns another way or the completion ends, or
// tokens and text part company.
TEST_CASE("known fault: stop-string prefix held back then released") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options());
  Request request = Saying(Byte('a'), 10);
  request.sampling.stop_strings = {"aaab"};  // three are held back, a fourth releases the first
  REQUIRE_OK(engine->Submit(request));
  Results results;
  for (int step = 1; engine->HasWork(); ++step) {
    Collect(engine->Step(), results);
    const size_t certain = results[1].num_ends > 0 ? 10 : std::max(step - 3, 0);
    CHECK(results[1].ids.size() == certain);
    CHECK(results[1].logprobs.size() == certain);
    CHECK(results[1].text == std::string(certain, 'a'));
  }
  CHECK(results[1].end.reason == FinishReason::kLength);
  REQUIRE_OK(engine->Submit(request));
  results.clear();
  for (int step = 0; step < 5; ++step) Collect(engine->Step(), results);
  CHECK(results[1].ids.size() == 2);
  REQUIRE_OK(engine->Cancel(1));
  RunToEnd(*engine, results);
  CHECK(results[1].ids.size() == 5);
  CHECK(results[1].text == "aaaaa");
}

// Elsewhere the first bytes of a character are sent as U+FFFD and never taken back, or vanish when
// the completion ends between them.
TEST_CASE("known fault: half a UTF-8 character") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options());
  const std::string emoji = "\xF0\x9F\x99\x82";
  Request request = Saying(Byte(emoji[3]), 4);
  for (int i = 0; i < 3; ++i) request.forced_prefix.push_back(Byte(emoji[i]));
  CHECK(RunAlone(*engine, request).text == emoji);  // begun elsewhere, it is whole with its last
  request.forced_prefix.clear();
  request.sampling.logit_bias = {{Byte(0xF0), 1000.0f}};
  request.sampling.max_tokens = 3;
  REQUIRE_OK(engine->Submit(request));
  std::vector<std::string> texts;
  while (engine->HasWork()) {
    for (const Event& event : engine->Step()) texts.push_back(event.text);
  }
  // Broken as soon as another first byte follows; the last one by the end, which comes with it.
  CHECK(texts == std::vector<std::string>{"", "\uFFFD", "\uFFFD\uFFFD", ""});
  // A stop string is found although its character came in halves.
  request = Saying(Byte(0xA9), 20);
  request.forced_prefix = {Byte(0xC3)};
  request.sampling.stop_strings = {"é"};
  const Result stopped = RunAlone(*engine, request);
  CHECK(stopped.end.reason == FinishReason::kStop);
  CHECK(stopped.ids.empty());
  CHECK(stopped.text.empty());
}

// Elsewhere a short or chained hash is taken for the contents: whoever finds a collision, or has
// the same last block after another beginning, reads a stranger's keys and values.
TEST_CASE("known fault: weak block hash") {
  BlockPool pool(4);
  PrefixCache cache(&pool, true);
  const ChainKey root = RootKey("weights", 1);
  std::vector<int32_t> ids(kBlockTokens, 5), other = ids;
  other[3] = 6;
  const int32_t block = cache.Allocate();
  cache.Insert(BlockKey(root, ids), ids, block);
  CHECK(cache.Find(BlockKey(root, ids), ids) == block);
  CHECK(cache.Find(BlockKey(root, ids), other) == BlockPool::kNone);  // a collision
  CHECK(cache.Find(BlockKey(BlockKey(root, ids), ids), ids) == BlockPool::kNone);
  CHECK(cache.Find(BlockKey(RootKey("weights", 2), ids), ids) == BlockPool::kNone);
  CHECK(cache.Find(BlockKey(RootKey("weight", 1), ids), ids) == BlockPool::kNone);
  // Blocks that differ in little have keys that differ in both halves.
  std::set<uint64_t> low, high;
  for (int32_t place = 0; place < kBlockTokens; ++place) {
    for (int32_t value = 0; value < 2000; ++value) {
      std::vector<int32_t> near(kBlockTokens, 0);
      near[place] = value + 1;
      const ChainKey key = BlockKey(root, near);
      low.insert(key.low);
      high.insert(key.high);
    }
  }
  CHECK(low.size() == 2000 * kBlockTokens);
  CHECK(high.size() == 2000 * kBlockTokens);
}

TEST_CASE("known fault: weak block hash, in the engine") {
  const Model model = TinyModel();
  const auto engine = model.Engine(Options());
  Request first = Make(1, 20, 50), second = first;
  std::rotate(second.prompt_ids.begin(), second.prompt_ids.begin() + 1, second.prompt_ids.end());
  second.prompt_ids[0] = 3;  // the same blocks behind another first one
  RunAlone(*engine, first);
  const Result result = RunAlone(*engine, second);
  CHECK(result.end.cached_prompt_tokens == 0);
  CHECK(result.SameBits(Fresh(model, second)));
}
}  // namespace stretto::engine
