// What the engine draws against distributions computed from the model's own log-probs in double.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "engine/inference/inference_fixture.h"
#include "engine/inference/score.h"

namespace stretto::engine {
namespace {
using testing::MakeModel;
using testing::Model;
using testing::Result;
using testing::Results;
using testing::RunAlone;

const std::vector<int32_t> kPrompt = {4, 8, 15, 16, 23, 42};

// log p(token | ids) for every token, from the scorer.
std::vector<float> NextLogProbs(const Model& model, const std::vector<int32_t>& ids,
                                float temperature) {
  ScoreGroup group;
  group.prompt_ids = ids;
  for (int32_t t = 0; t < model.transformer->config().vocab_size; ++t) {
    group.completions.push_back({t});
  }
  auto scorer = SequenceScorer::Create(*model.transformer, {});
  REQUIRE_OK(scorer);
  auto scored = (*scorer)->Score(*model.Weights(1), {&group, 1}, temperature);
  REQUIRE_OK(scored);
  std::vector<float> logprobs;
  for (const auto& l : (*scored)[0]) logprobs.push_back(l[0]);
  return logprobs;
}

// The distribution that SamplingParams define: top-k, then top-p, then min-p.
std::vector<double> Truncate(const std::vector<float>& logprobs, const SamplingParams& p) {
  std::vector<double> prob(logprobs.size());
  for (size_t i = 0; i < prob.size(); ++i) prob[i] = std::exp(static_cast<double>(logprobs[i]));
  std::vector<size_t> order(prob.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return prob[a] > prob[b]; });
  const size_t k = p.top_k > 0 ? std::min<size_t>(p.top_k, prob.size()) : prob.size();
  double top_k_mass = 0;
  for (size_t i = 0; i < k; ++i) top_k_mass += prob[order[i]];
  std::vector<double> kept(prob.size(), 0.0);
  double mass = 0, sum = 0;
  for (size_t i = 0; i < k && mass < p.top_p * top_k_mass; ++i) {
    mass += prob[order[i]];
    if (prob[order[i]] >= p.min_p * prob[order[0]]) sum += kept[order[i]] = prob[order[i]];
  }
  for (double& x : kept) x /= sum;
  return kept;
}

// The chi-square statistic over cells of at least 5 expected counts (the rest is one cell), less
// its expectation, in standard deviations of it.
double ChiSquareSigmas(const std::vector<int>& counts, const std::vector<double>& expected, int n) {
  double statistic = 0, rest_expected = 0;
  int rest = 0, cells = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (expected[i] * n < 5) {
      rest += counts[i];
      rest_expected += expected[i] * n;
      continue;
    }
    statistic += (counts[i] - expected[i] * n) * (counts[i] - expected[i] * n) / (expected[i] * n);
    ++cells;
  }
  if (rest_expected >= 5) {
    statistic += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
    ++cells;
  }
  const double freedom = std::max(cells - 1, 1);
  return (statistic - freedom) / std::sqrt(2 * freedom);
}

// Draws `n` first tokens with the samples of one prompt.
Results Draw(const Model& model, const SamplingParams& params, int n) {
  EngineOptions options;
  options.num_kv_blocks = 200;
  options.max_queued = n;
  const auto engine = model.Engine(options);
  std::vector<Request> group(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) {
    group[i].id = static_cast<uint64_t>(i);
    group[i].prompt_ids = kPrompt;
    group[i].draw = {17, 4, static_cast<uint32_t>(i)};
    group[i].sampling = params;
    group[i].sampling.max_tokens = 1;
  }
  REQUIRE_OK(engine->SubmitGroup(std::move(group)));
  Results results;
  RunToEnd(*engine, results);
  return results;
}
}  // namespace

TEST_CASE("draws follow the distribution of every sampling parameter") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  std::vector<SamplingParams> all(8);
  all[1].temperature = 0.7f;
  all[2].top_k = 5;
  all[3].top_p = 0.8f;
  all[4].min_p = 0.1f;
  all[5].top_k = 20, all[5].top_p = 0.9f, all[5].min_p = 0.02f;
  all[6].temperature = 1.5f, all[6].top_k = 3, all[6].top_p = 0.7f;
  all[7].top_k = 1;
  constexpr int kDraws = 20000;
  for (size_t i = 0; i < all.size(); ++i) {
    INFO("parameters " << i);
    const std::vector<float> logprobs = NextLogProbs(model, kPrompt, all[i].temperature);
    const std::vector<double> expected = Truncate(logprobs, all[i]);
    std::vector<int> counts(logprobs.size(), 0);
    for (const auto& [id, result] : Draw(model, all[i], kDraws)) {
      REQUIRE(result.ids.size() == 1);
      const int32_t token = result.ids[0];
      ++counts[token];
      REQUIRE(expected[token] > 0);
      REQUIRE(Result::Same(result.logprobs, {logprobs[token]}));
      REQUIRE(std::fabs(result.sampling_logprobs[0] - std::log(expected[token])) < 1e-4);
    }
    CHECK(ChiSquareSigmas(counts, expected, kDraws) < 4.5);
    // The test can fail: the counts do not fit a distribution that is a little off.
    std::vector<double> other =
        Truncate(NextLogProbs(model, kPrompt, all[i].temperature * 1.2f), all[i]);
    if (all[i].top_k != 1) CHECK(ChiSquareSigmas(counts, other, kDraws) > 4.5);
  }
}

TEST_CASE("greedy takes the likeliest token, beside sampled rows as well") {
  const Model model = MakeModel("cpu", 2, DType::kBF16);
  EngineOptions options;
  options.num_kv_blocks = 100;
  const auto engine = model.Engine(options);
  Request greedy, sampled;
  greedy.prompt_ids = sampled.prompt_ids = kPrompt;
  greedy.sampling.temperature = 0;
  greedy.sampling.max_tokens = sampled.sampling.max_tokens = 20;
  sampled.id = 1;
  REQUIRE_OK(engine->Submit(sampled));
  REQUIRE_OK(engine->Submit(greedy));
  Results results;
  RunToEnd(*engine, results);
  std::vector<int32_t> ids = kPrompt;
  for (size_t i = 0; i < results[0].ids.size(); ++i) {
    const std::vector<float> logprobs = NextLogProbs(model, ids, 1.0f);
    const auto best = std::max_element(logprobs.begin(), logprobs.end());
    CHECK(results[0].ids[i] == best - logprobs.begin());
    CHECK(results[0].logprobs[i] == *best);
    CHECK(results[0].sampling_logprobs[i] == 0.0f);
    ids.push_back(results[0].ids[i]);
  }
  CHECK(results[1].ids != results[0].ids);
}

TEST_CASE("bias, penalties and masks change the draw but not the log-prob") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  const std::vector<float> logprobs = NextLogProbs(model, kPrompt, 0.9f);
  SamplingParams params;
  params.temperature = 0.9f;
  params.logit_bias = {{3, 2.0f}, {9, -1e6f}};
  params.stop_ids = {11};
  params.min_tokens = 1;
  // The same transformation of log-probs, which are logits over the temperature less a constant.
  std::vector<float> changed = logprobs;
  changed[3] += 2.0f / 0.9f;
  changed[9] = changed[11] = -1e6f;
  double sum = 0;
  for (const float l : changed) sum += std::exp(static_cast<double>(l));
  std::vector<double> expected;
  for (const float l : changed) expected.push_back(std::exp(static_cast<double>(l)) / sum);
  std::vector<int> counts(logprobs.size(), 0);
  constexpr int kDraws = 5000;
  for (const auto& [id, result] : Draw(model, params, kDraws)) {
    const int32_t token = result.ids[0];
    ++counts[token];
    REQUIRE(Result::Same(result.logprobs, {logprobs[token]}));
    REQUIRE(std::fabs(result.sampling_logprobs[0] - std::log(expected[token])) < 1e-4);
  }
  CHECK(counts[9] == 0);
  CHECK(counts[11] == 0);
  CHECK(ChiSquareSigmas(counts, expected, kDraws) < 4.5);
}

TEST_CASE("penalties: strong ones forbid what was there") {
  const Model model = MakeModel("cpu", 1, DType::kF32);
  EngineOptions options;
  options.num_kv_blocks = 100;
  const auto engine = model.Engine(options);
  const auto distinct = [](std::vector<int32_t> ids) {
    std::sort(ids.begin(), ids.end());
    return std::unique(ids.begin(), ids.end()) - ids.begin();
  };
  Request r;
  r.prompt_ids = kPrompt;
  r.sampling.temperature = 0;
  r.sampling.max_tokens = 50;
  CHECK(distinct(RunAlone(*engine, r).ids) < 50);
  r.sampling.presence_penalty = 100;
  CHECK(distinct(RunAlone(*engine, r).ids) == 50);
  r.sampling.presence_penalty = 0;
  r.sampling.frequency_penalty = 100;
  CHECK(distinct(RunAlone(*engine, r).ids) == 50);
  // Prompt tokens too: a bias makes all logits positive, then the penalty divides them by 100.
  r.sampling.frequency_penalty = 0;
  r.sampling.repetition_penalty = 100;
  r.sampling.max_tokens = 40;
  for (int32_t t = 0; t < 61; ++t) r.sampling.logit_bias.emplace_back(t, 50.0f);
  std::vector<int32_t> ids = RunAlone(*engine, r).ids;
  ids.insert(ids.end(), kPrompt.begin(), kPrompt.end());
  CHECK(distinct(ids) == static_cast<int64_t>(ids.size()));
}
}  // namespace stretto::engine
