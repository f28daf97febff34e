// Speculation beside the bits (same_bits_test.cc) and the distribution
// (speculative_sampling_test.cc): what is drafted, how much, for whom, and that nothing of a
// rejected token stays.
#include "engine/inference/speculation.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "engine/inference/inference_fixture.h"
#include "engine/inference/model_drafter.h"
#include "engine/inference/ngram_drafter.h"

namespace stretto::engine {
namespace {
using testing::EagerModel;
using testing::EagerNgrams;
using testing::MakeModel;
using testing::Model;
using testing::Result;
using testing::Results;
using testing::RunAlone;
using Ids = std::vector<int32_t>;

Request Make(uint64_t id, int32_t max_tokens = 60) {
  Request r;
  r.id = id;
  r.prompt_ids = {7, 8, 9, 7, 8, 9, 7, 8};
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  r.draw = {1, id, 0};
  return r;
}

EngineOptions Options(const SpeculationOptions& speculation) {
  EngineOptions options;
  options.num_kv_blocks = 400;
  options.speculation = speculation;
  return options;
}

// Token t is the letter 'a' + t % 26.
class Letters final : public TextDecoder {
 public:
  std::string Push(int32_t token) override {
    return std::string(1, static_cast<char>('a' + token % 26));
  }
  std::string Finish() override { return ""; }
};

// A model that says 7, 8, 9, 7, 8, 9, … after any of them.
std::vector<std::pair<int32_t, float>> OnlyThree() { return {{7, 30.0f}, {8, 30.0f}, {9, 30.0f}}; }
}  // namespace

TEST_CASE("n-grams: the longest agreement, of equals the latest, goes on with itself") {
  const auto propose = [](const Ids& text, int32_t min_match, int32_t count) {
    return NgramIndex(min_match).Propose(text, count).tokens;
  };
  CHECK(propose({1, 2, 3, 4, 1, 2}, 2, 3) == Ids{3, 4, 1});
  CHECK(propose({5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2}, 2, 1) == Ids{3});  // 5 1 2 beats 6 1 2
  CHECK(propose({1, 2, 3, 1, 2, 4, 1, 2}, 2, 1) == Ids{4});           // the latest
  CHECK(propose({1, 2, 1, 2}, 2, 5) == Ids{1, 2, 1, 2, 1});           // a repetition goes on
  CHECK(propose({9, 9}, 1, 3) == Ids{9, 9, 9});
  CHECK(propose({1, 2, 3, 4}, 2, 3).empty());
  CHECK(propose({1, 2, 3, 2}, 2, 3).empty());  // one token agrees, two must
  CHECK(propose({1}, 2, 3).empty());
  CHECK(propose({1, 2}, 2, 3).empty());
}

TEST_CASE("n-grams: grown text gives what a new index gives; collisions don't matter") {
  PhiloxStream random(::stretto::testing::Seed());
  INFO("seed " << ::stretto::testing::Seed());
  for (int round = 0; round < 50; ++round) {
    const auto min_match = static_cast<int32_t>(1 + random.Below(4));
    const uint64_t alphabet = 2 + random.Below(5);
    NgramIndex grown(min_match);
    Ids text;
    for (int i = 0; i < 200; ++i) {
      text.push_back(static_cast<int32_t>(random.Below(alphabet)));
      if (random.Below(3) == 0) continue;  // drafts are not asked for at every token
      const Draft a = grown.Propose(text, 6), b = NgramIndex(min_match).Propose(text, 6);
      REQUIRE(a.tokens == b.tokens);
      REQUIRE(a.confidence == b.confidence);
      REQUIRE(grown.num_indexed() == text.size());  // each position once
      // What is proposed follows the last tokens somewhere.
      if (a.tokens.empty()) continue;
      Ids end(text.end() - min_match, text.end());
      end.push_back(a.tokens[0]);
      REQUIRE(std::search(text.begin(), text.end(), end.begin(), end.end()) != text.end());
    }
  }
}

TEST_CASE("the length follows acceptance and price; tries grow rare and come back") {
  Acceptance a(0.5f);
  CHECK(a.Length(0.1, 8) == 3);  // 1/8 is enough, 1/16 is not
  CHECK(a.Length(0.1, 2) == 2);
  CHECK(a.Length(0.6, 8) == 0);
  for (int i = 0; i < 40; ++i) a.Count(true);
  CHECK(a.Length(0.1, 8) == 8);
  CHECK(a.Length(0.97, 8) > 0);
  for (int i = 0; i < 40; ++i) a.Count(false);
  std::vector<int> tries;
  for (int i = 0; i < 4000; ++i) {
    const int32_t length = a.Length(0.1, 8);
    if (length == 0) continue;
    CHECK(length == 1);
    tries.push_back(i);
    a.Count(false);
  }
  REQUIRE(tries.size() > 5);
  CHECK(tries.size() < 16);
  for (size_t i = 2; i < tries.size(); ++i) {
    CHECK(tries[i] - tries[i - 1] >= tries[i - 1] - tries[i - 2]);
  }
  a.Count(true);
  CHECK(a.Length(0.1, 8) == 1);  // one success is worth a try at the next token
}

TEST_CASE(
    "repetitive text takes fewer steps, and alone costs nothing when it defeats the drafter") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  Request r = Make(1, 200);
  r.sampling.temperature = 0;  // a small model soon repeats itself
  const auto plain = model.Engine(Options({}));
  const Result expected = RunAlone(*plain, r);
  SpeculationOptions ngrams;
  ngrams.kind = SpeculationKind::kNgram;
  const auto engine = model.Engine(Options(ngrams));
  CHECK(RunAlone(*engine, r).SameBits(expected));
  const EngineStats stats = engine->stats();
  CHECK(plain->stats().num_steps == 200);
  CHECK(stats.num_steps < 190);
  CHECK(stats.tokens_generated == 200);
  CHECK(stats.speculation.num_accepted == 200 - stats.num_steps);
  CHECK(stats.speculation.num_fruitless == 0);
  int64_t verified = 0, accepted = 0;
  for (int i = 0; i < kMaxDraft; ++i) {
    verified += stats.speculation.verified_at[i];
    accepted += stats.speculation.accepted_at[i];
    if (i > 0) CHECK(stats.speculation.verified_at[i] <= stats.speculation.accepted_at[i - 1]);
  }
  CHECK(verified == stats.speculation.num_verified);
  CHECK(accepted == stats.speculation.num_accepted);
  CHECK(stats.speculation.num_verified <= stats.speculation.num_drafted);

  // A draft model of other weights is wrong nearly always.
  SpeculationOptions stranger = EagerModel(model, 0);
  stranger.draft_weights = model.Weights(77);
  stranger.row_cost = 0.1f;
  const auto defeated = model.Engine(Options(stranger));
  RunAlone(*defeated, r);
  const SpeculationStats waste = defeated->stats().speculation;
  CHECK(waste.num_drafted > 0);
  CHECK(waste.num_drafted < 60);
  CHECK(waste.num_fruitless > 3);
}

TEST_CASE("with many sequences nobody is drafted for, with few everybody") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  for (const uint64_t num_sequences : {2, 60}) {
    SpeculationOptions ngrams = EagerNgrams();
    ngrams.row_cost = 2;  // a row costs twice what a step costs
    if (num_sequences == 2) ngrams.row_cost = 0.05f;
    const auto engine = model.Engine(Options(ngrams));
    Results results;
    for (uint64_t i = 0; i < num_sequences; ++i) {
      Request r = Make(i, 20);
      r.sampling.logit_bias = OnlyThree();
      REQUIRE_OK(engine->Submit(r));
    }
    RunToEnd(*engine, results);
    CHECK((engine->stats().speculation.num_drafted > 0) == (num_sequences == 2));
  }
}

TEST_CASE("drafts take no row and no block that somebody else wants") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto run = [&](SpeculationOptions speculation) {
    EngineOptions options = Options(speculation);
    options.num_kv_blocks = 9;
    options.max_running = 4;
    options.max_tokens_per_step = 6;
    const auto engine = model.Engine(options);
    Results results;
    for (uint64_t i = 0; i < 6; ++i) {
      Request r = Make(i, 40);
      r.sampling.logit_bias = OnlyThree();
      REQUIRE_OK(engine->Submit(r));
    }
    while (engine->HasWork()) {
      const EngineStats before = engine->stats();
      Collect(engine->Step(), results);
      const EngineStats after = engine->stats();
      CHECK(after.speculation.num_drafted - before.speculation.num_drafted <= 5);
    }
    CHECK(engine->stats().blocks_used == 0);
    return std::pair(engine->stats(), results);
  };
  const auto [plain, expected] = run({});
  const auto [stats, results] = run(EagerNgrams());
  CHECK(stats.speculation.num_accepted > 0);
  CHECK(stats.num_steps < plain.num_steps);
  for (const auto& [id, result] : expected) CHECK(results.at(id).SameBits(result));
}

TEST_CASE("max_tokens, stop ids and penalties end a completion in the middle of a draft") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto plain = model.Engine(Options({}));
  for (const SpeculationOptions& speculation : {EagerNgrams(), EagerModel(model, 0)}) {
    const auto engine = model.Engine(Options(speculation));
    for (int32_t max_tokens = 1; max_tokens < 30; ++max_tokens) {
      Request r = Make(1, max_tokens);
      r.sampling.temperature = 0;
      if (max_tokens % 3 == 1) r.sampling.frequency_penalty = 0.1f;
      if (max_tokens % 3 == 2) {
        const Ids ids = RunAlone(*plain, r).ids;
        r.sampling.stop_ids = {ids[ids.size() / 2]};
      }
      const Result result = RunAlone(*engine, r), expected = RunAlone(*plain, r);
      CHECK(result.SameBits(expected));
      CHECK(result.end.num_tokens == expected.end.num_tokens);
      CHECK(engine->stats().blocks_used == 0);
    }
    CHECK(engine->stats().speculation.num_accepted > 50);
  }
}

TEST_CASE("stop strings in the middle of a draft cut ids, log-probs and text as ever") {
  PhiloxStream random(::stretto::testing::Seed());
  INFO("seed " << ::stretto::testing::Seed());
  const Model model = MakeModel("cpu", 1, DType::kF32);
  EngineOptions options = Options({});
  options.text_decoder = [](const SamplingParams&) { return std::make_unique<Letters>(); };
  const auto plain = model.Engine(options);
  options.speculation = EagerModel(model, 0.03);
  const auto engine = model.Engine(options);
  int num_stopped = 0;
  for (int round = 0; round < 60; ++round) {
    Request r = Make(1, 40);
    r.want_text = true;
    r.draw.prompt_id = random.NextU64();
    const std::string text = RunAlone(*plain, r).text;
    REQUIRE(text.size() == 40);
    r.sampling.stop_strings = {text.substr(random.Below(36), 1 + random.Below(4)), "zzzzzz"};
    r.sampling.keep_stop_string = random.Below(2) == 0;
    r.sampling.min_tokens = static_cast<int32_t>(random.Below(20));
    const Result result = RunAlone(*engine, r), expected = RunAlone(*plain, r);
    CHECK(result.SameBits(expected));
    CHECK(result.text == expected.text);
    CHECK(result.end.num_tokens == expected.end.num_tokens);
    num_stopped += result.end.reason == FinishReason::kStop ? 1 : 0;
    CHECK(engine->stats().blocks_used == 0);
  }
  CHECK(num_stopped > 10);
  CHECK(engine->stats().speculation.num_accepted > 100);
}

TEST_CASE("logits that are not finite behind a draft harm nobody unless they are reached") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  constexpr int32_t kPoison = 6;
  const ServedWeights poisoned = {model.Weights(1, kPoison), 1, "poisoned"};
  const auto run = [&](const SpeculationOptions& speculation, float bias) {
    auto engine = InferenceEngine::Create(*model.transformer, poisoned, Options(speculation));
    REQUIRE_OK(engine);
    Results results;
    for (uint64_t i = 0; i < 4; ++i) {
      Request r = Make(i, 40);
      r.sampling.logit_bias = {{kPoison, bias}};
      REQUIRE_OK((*engine)->Submit(r));
    }
    RunToEnd(**engine, results);
    return results;
  };
  // A draft model that says nothing but the poisonous token.
  SpeculationOptions drafting = EagerModel(model, 0);
  for (const float bias : {-1000.0f, 0.0f, 3.0f, 1000.0f}) {
    const Results expected = run({}, bias), results = run(drafting, bias);
    for (const auto& [id, result] : expected) {
      CHECK(results.at(id).SameBits(result));
      CHECK((result.end.reason == FinishReason::kError) ==
            (results.at(id).end.reason == FinishReason::kError));
    }
    if (bias > 0) CHECK(results.at(0).end.reason == FinishReason::kError);
  }
}

TEST_CASE("a draft model of the same weights drafts what the engine draws, and frees its blocks") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  ModelDrafterOptions options;
  options.num_blocks = 12;
  options.max_sequences = 2;
  options.max_rows = 16;
  options.cost = 0.5;
  auto drafter = ModelDrafter::Create(*model.transformer, model.Weights(1), options);
  REQUIRE_OK(drafter);
  std::vector<Request> requests = {Make(1), Make(2)};
  requests[0].sampling.top_k = 9;
  requests[0].sampling.repetition_penalty = 1.3f;
  requests[1].prompt_ids.assign(40, 11);
  const auto engine = model.Engine(Options({}));
  std::vector<Result> truth;
  for (const Request& r : requests) truth.push_back(RunAlone(*engine, r));
  for (const size_t num_written : {0, 1, 7, 20, 21, 50}) {
    std::vector<Ids> tokens(2);
    std::vector<Draft> drafts(2);
    // A long prompt is caught up with in several calls.
    for (int calls = 0; calls < 8 && (drafts[0].tokens.empty() || drafts[1].tokens.empty());
         ++calls) {
      std::vector<DraftRequest> wanted;
      for (size_t i = 0; i < 2; ++i) {
        tokens[i] = requests[i].prompt_ids;
        tokens[i].insert(tokens[i].end(), truth[i].ids.begin(),
                         truth[i].ids.begin() + static_cast<int64_t>(num_written));
        wanted.push_back({requests[i].id, tokens[i],
                          static_cast<int32_t>(requests[i].prompt_ids.size()),
                          &requests[i].sampling, &requests[i].draw, 5});
      }
      drafts.assign(2, {});
      (*drafter)->Propose(wanted, absl::MakeSpan(drafts));
    }
    for (size_t i = 0; i < 2; ++i) {
      const auto from = truth[i].ids.begin() + static_cast<int64_t>(num_written);
      CHECK(drafts[i].tokens == Ids(from, from + 5));
    }
  }
  CHECK((*drafter)->pool().num_used() > 0);
  (*drafter)->Forget(1);
  (*drafter)->Forget(2);
  (*drafter)->Forget(3);  // never came
  CHECK((*drafter)->pool().num_used() == 0);
  (*drafter)->pool().CheckBalance(0);
}

TEST_CASE("impossible speculation is refused") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  testing::ModelShape other_shape;
  other_shape.vocab_size = 60;
  const Model other = MakeModel("cpu", 1, DType::kF32, other_shape);
  const auto refused = [&](const std::function<void(SpeculationOptions&)>& change) {
    SpeculationOptions speculation = EagerModel(model, 0);
    change(speculation);
    const auto engine =
        InferenceEngine::Create(*model.transformer, model.Served(1), Options(speculation));
    CHECK(absl::IsInvalidArgument(engine.status()));
  };
  refused([](SpeculationOptions& o) { o.max_draft = 0; });
  refused([](SpeculationOptions& o) { o.max_draft = kMaxDraft + 1; });
  refused([](SpeculationOptions& o) { o.max_drafted_rows = 0; });
  refused([](SpeculationOptions& o) { o.min_match = 0; });
  refused([](SpeculationOptions& o) { o.min_match = 9; });
  refused([](SpeculationOptions& o) { o.row_cost = std::nanf(""); });
  refused([](SpeculationOptions& o) { o.draft_model = nullptr; });
  refused([](SpeculationOptions& o) { o.draft_weights = nullptr; });
  refused([&](SpeculationOptions& o) { o.draft_model = other.transformer.get(); });
}
}  // namespace stretto::engine
