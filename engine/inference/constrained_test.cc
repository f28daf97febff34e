// Constrained output through the engine: whatever is drawn matches, judged by PCRE2 and a JSON
// parser; the rest of the batch doesn't notice. (same_bits_test.cc: the bits.)
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "engine/inference/inference_fixture.h"
#include "engine/inference/score.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using testing::EagerModel;
using testing::EagerNgrams;
using testing::MakeConstraint;
using testing::MakeModel;
using testing::Model;
using testing::RandomRequest;
using testing::Result;
using testing::Results;
using testing::RunAlone;
using testing::TestConstraints;
using testing::TokenTexts;
using Kind = ConstraintSpec::Kind;
constexpr int32_t kEos = 5;

std::string TextOf(const std::vector<int32_t>& ids) {
  static const std::vector<std::string> texts = TokenTexts();
  std::string text;
  for (const int32_t id : ids) text += texts[static_cast<size_t>(id)];
  return text;
}

// PCRE2's word on a text: it matches as a whole, or is the beginning of what could.
enum class Match { kNo, kPartial, kWhole };
Match Pcre(const std::string& expression, const std::string& text) {
  const std::string anchored = "(?:" + expression + ")\\z";
  int error = 0;
  size_t offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(anchored.data()), anchored.size(),
                                   PCRE2_ANCHORED | PCRE2_UTF, &error, &offset, nullptr);
  STRETTO_CHECK(code != nullptr);
  pcre2_match_data* data = pcre2_match_data_create_from_pattern(code, nullptr);
  const int rc = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                             PCRE2_PARTIAL_SOFT, data, nullptr);
  pcre2_match_data_free(data);
  pcre2_code_free(code);
  return rc >= 0 ? Match::kWhole : rc == PCRE2_ERROR_PARTIAL ? Match::kPartial : Match::kNo;
}

bool ObeysSchema(const nlohmann::json& json) {
  if (!json.is_object() || !json.contains("a") || !json["a"].is_number_integer()) return false;
  for (const auto& [key, value] : json.items()) {
    if (key == "b") {
      if (!value.is_array()) return false;
      for (const auto& entry : value) {
        if (!entry.is_boolean()) return false;
      }
    } else if (key == "c") {
      if (!value.is_string() || value.get<std::string>().size() > 4) return false;
    } else if (key != "a") {
      return false;
    }
  }
  return true;
}

// A text that ended where it may, or was cut off.
bool Obeys(const ConstraintSpec& spec, const std::string& text, bool whole) {
  if (spec.kind == Kind::kRegex) {
    const Match match = Pcre(spec.text, text);
    return match == Match::kWhole || (!whole && (match == Match::kPartial || text.empty()));
  }
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!whole) return !text.empty() && text[0] == '{';
  return spec.kind == Kind::kJsonObject ? json.is_object() : ObeysSchema(json);
}

EngineOptions Options(SpeculationOptions speculation = {}) {
  EngineOptions options;
  options.num_kv_blocks = 60;
  options.max_running = 20;
  options.max_tokens_per_step = 80;
  options.eos_ids = {kEos};
  options.speculation = std::move(speculation);
  return options;
}

Request Make(uint64_t id, const ConstraintSpec& spec, int32_t max_tokens = 60) {
  Request r;
  r.id = id;
  r.prompt_ids = {4, 8, 15, 16, 23, 42};
  r.draw = {1, id, 0};
  r.sampling.max_tokens = max_tokens;
  r.sampling.constraint = MakeConstraint(spec);
  return r;
}
}  // namespace

TEST_CASE("constrained completions match, whatever the model and the sampling") {
  PhiloxStream random(::stretto::testing::Seed());
  INFO("seed " << ::stretto::testing::Seed());
  int num_whole = 0, num_cut = 0;
  for (uint64_t round = 0; round < 12; ++round) {
    const Model model = MakeModel("cpu", 2, round % 2 == 0 ? DType::kF32 : DType::kBF16);
    EngineOptions options = Options();
    if (round % 3 == 1) options.speculation = EagerNgrams();
    if (round % 3 == 2) options.speculation = EagerModel(model, 0.05);
    options.num_kv_blocks = 10 + static_cast<int64_t>(random.Below(60));
    const auto engine = model.Engine(options, /*seed=*/1 + round);
    std::vector<size_t> specs;
    for (uint64_t id = 0; id < 40; ++id) {
      Request r = RandomRequest(random, id, 61);
      specs.push_back(random.Below(TestConstraints().size()));
      r.sampling.constraint = MakeConstraint(TestConstraints()[specs.back()]);
      r.sampling.stop_ids.clear();
      if (random.Below(3) == 0) r.sampling.logit_bias = {{kEos, 20.0f}, {30, -1e6f}};
      if (random.Below(4) == 0) r.sampling.presence_penalty = 1.5f;
      REQUIRE_OK(engine->Submit(r));
    }
    Results results;
    RunToEnd(*engine, results);
    for (uint64_t id = 0; id < 40; ++id) {
      const Result& result = results[id];
      const bool whole = result.end.reason == FinishReason::kStop;
      const std::string text = TextOf(result.ids);
      INFO("constraint " << specs[id] << ": '" << text << "'");
      REQUIRE((whole || result.end.reason == FinishReason::kLength));
      REQUIRE(Obeys(TestConstraints()[specs[id]], text, whole));
      // EOS is the last token if it is any.
      REQUIRE(std::count(result.ids.begin(), result.ids.end(), kEos) <=
              (result.ids.back() == kEos ? 1 : 0));
      ++(whole ? num_whole : num_cut);
    }
    CHECK(engine->stats().blocks_used == 0);
  }
  CHECK(num_whole > 100);
  CHECK(num_cut > 50);
}

TEST_CASE("EOS is drawn exactly where the match may end, and the completion ends where it must") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  // Nothing but EOS is likely.
  Request r = Make(1, {Kind::kRegex, "(?:abc01)+2?"});
  r.sampling.logit_bias = {{kEos, 1e6f}};
  Result result = RunAlone(*engine, r);
  CHECK(TextOf(result.ids) == "abc01");
  CHECK(result.ids.back() == kEos);
  CHECK(result.end.reason == FinishReason::kStop);
  // Nothing is less likely than EOS.
  r.sampling.logit_bias = {{kEos, -1e6f}};
  result = RunAlone(*engine, r);
  CHECK(result.ids.back() != kEos);
  CHECK(Obeys({Kind::kRegex, "(?:abc01)+2?"}, TextOf(result.ids),
              result.end.reason == FinishReason::kStop));
  // Where EOS doesn't count, or nothing can follow.
  r = Make(1, {Kind::kRegex, "(?:ab){3}"});
  r.sampling.ignore_eos = true;
  result = RunAlone(*engine, r);
  CHECK(TextOf(result.ids) == "ababab");
  CHECK(result.ids.back() != kEos);
  CHECK(result.end.reason == FinishReason::kStop);
  r = Make(1, {Kind::kRegex, "[ab]*"}, 12);
  r.sampling.ignore_eos = true;
  r.sampling.logit_bias = {{kEos, 1e6f}};
  result = RunAlone(*engine, r);
  CHECK(result.ids.size() == 12);
  CHECK(result.end.reason == FinishReason::kLength);
}

TEST_CASE("stop ids and min_tokens beside a constraint") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  // A stop id with text (4 is "1") obeys it, and ends the completion.
  Request r = Make(1, {Kind::kRegex, "[ab]{3}1[ab]*"});
  r.sampling.stop_ids = {4};
  Result result = RunAlone(*engine, r);
  CHECK(result.ids.back() == 4);
  CHECK(result.end.reason == FinishReason::kStop);
  CHECK(Obeys({Kind::kRegex, "[ab]{3}1"}, TextOf(result.ids), true));
  // Before min_tokens it is drawn only where nothing else can be; so is EOS never.
  r.sampling.constraint = MakeConstraint({Kind::kRegex, "[ab1]*"});
  r.sampling.min_tokens = 20;
  r.sampling.logit_bias = {{4, 100.0f}, {kEos, 90.0f}};
  result = RunAlone(*engine, r);
  CHECK(result.ids.size() == 21);
  CHECK(result.ids.back() == 4);
  r.sampling.constraint = MakeConstraint({Kind::kRegex, "a1[ab]*"});
  result = RunAlone(*engine, r);
  CHECK(TextOf(result.ids) == "a1");
  // The constraint's end comes first.
  r.sampling.stop_ids.clear();
  r.sampling.constraint = MakeConstraint({Kind::kRegex, "[ab]{4}"});
  result = RunAlone(*engine, r);
  CHECK(TextOf(result.ids).size() == 4);
  CHECK(result.end.reason == FinishReason::kStop);
}

TEST_CASE("constrained draws have the model's distribution over what is allowed") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  Request r = Make(1, {Kind::kRegex, "(?:[abc]|01|\\{\"|xyz)*"});
  const auto engine = model.Engine(Options());
  ScoreGroup group;
  group.prompt_ids = r.prompt_ids;
  for (int32_t t = 0; t < 61; ++t) group.completions.push_back({t});
  auto scorer = SequenceScorer::Create(*model.transformer, {});
  REQUIRE_OK(scorer);
  const auto scored = (*scorer)->Score(*model.Weights(1), {&group, 1}, 1.0f);
  REQUIRE_OK(scored);
  const auto mask = r.sampling.constraint->Mask(r.sampling.constraint->start());
  double allowed = 0;
  for (int32_t t = 0; t < 61; ++t) {
    if (mask->Allows(t) || t == kEos) allowed += std::exp((*scored)[0][t][0]);
  }
  REQUIRE(mask->count > 5);
  REQUIRE(allowed < 0.9);
  std::vector<int> counts(61, 0);
  constexpr int kDraws = 3000;
  r.sampling.max_tokens = 1;
  for (uint32_t i = 0; i < kDraws; ++i) {
    r.draw.sample_index = i;
    const Result result = RunAlone(*engine, r);
    const int32_t token = result.ids[0];
    REQUIRE((mask->Allows(token) || token == kEos));
    ++counts[token];
    CHECK(result.logprobs[0] == (*scored)[0][token][0]);  // of the raw logits, as ever
    CHECK(result.sampling_logprobs[0] ==
          Approx(result.logprobs[0] - std::log(allowed)).margin(1e-4));
  }
  double statistic = 0;
  int cells = 0;
  for (int32_t t = 0; t < 61; ++t) {
    const double expected = kDraws * std::exp((*scored)[0][t][0]) / allowed;
    if (!(mask->Allows(t) || t == kEos) || expected < 5) continue;
    statistic += (counts[t] - expected) * (counts[t] - expected) / expected;
    ++cells;
  }
  REQUIRE(cells > 5);
  CHECK((statistic - cells) / std::sqrt(2.0 * cells) < 5);
}

TEST_CASE("drafts go as far as the constraint lets them, and are accepted") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  for (const SpeculationOptions& speculation : {EagerNgrams(), EagerModel(model, 0.02)}) {
    const auto plain = model.Engine(Options());
    const auto engine = model.Engine(Options(speculation));
    int64_t num_steps = 0;
    for (const ConstraintSpec& spec : TestConstraints()) {
      Request r = Make(1, spec, 50);
      r.sampling.min_tokens = 30;
      const Result expected = RunAlone(*plain, r);
      const int64_t before = engine->stats().num_steps;
      CHECK(RunAlone(*engine, r).SameBits(expected));
      num_steps += engine->stats().num_steps - before;
    }
    const EngineStats stats = engine->stats();
    CHECK(stats.speculation.num_accepted > 50);
    CHECK(num_steps < plain->stats().num_steps);
  }
}

TEST_CASE("a resumed completion goes on where its tokens have led the constraint") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  Request r = Make(1, {Kind::kRegex, "ab[01]{2,9}c"});
  const Result whole = RunAlone(*engine, r);
  for (size_t cut = 1; cut <= whole.ids.size(); ++cut) {
    Request rest = r;
    rest.forced_prefix.assign(whole.ids.begin(), whole.ids.begin() + static_cast<int64_t>(cut));
    const Result tail = RunAlone(*engine, rest);
    CHECK(std::vector<int32_t>(whole.ids.begin() + static_cast<int64_t>(cut), whole.ids.end()) ==
          tail.ids);
    CHECK(tail.end.reason == FinishReason::kStop);
  }
}

TEST_CASE("what can't be served is refused; the others in the batch don't notice") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const auto engine = model.Engine(Options());
  Request other;
  other.id = 9;
  other.prompt_ids = {1, 2, 3};
  other.sampling.max_tokens = 40;
  const Result alone = RunAlone(*engine, other);
  REQUIRE_OK(engine->Submit(other));
  Results results;
  Collect(engine->Step(), results);

  Request r = Make(1, {Kind::kRegex, "[ab]+"});
  r.forced_prefix = {0, 3};  // "a0"
  absl::Status status = engine->Submit(r);
  CHECK(absl::IsInvalidArgument(status));
  CHECK(absl::StrContains(status.message(), "forced prefix"));
  r.forced_prefix = {0, kEos, 0};
  CHECK(absl::IsInvalidArgument(engine->Submit(r)));
  r.forced_prefix.clear();
  r.sampling.constraint = MakeConstraint({Kind::kRegex, "[ab]+"}, 62);
  status = engine->Submit(r);
  CHECK(absl::IsInvalidArgument(status));
  CHECK(absl::StrContains(status.message(), "62 tokens"));

  RunToEnd(*engine, results);
  CHECK(results[9].SameBits(alone));
  CHECK(results.size() == 1);
  CHECK(engine->stats().blocks_used == 0);
}
}  // namespace stretto::engine
