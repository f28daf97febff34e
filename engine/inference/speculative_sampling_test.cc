// What is drawn with speculation against the known distribution of a small model, for every
// sampling parameter: the joint distribution of four tokens, of which all but the first are drawn
// from rows of drafted tokens. Expected probabilities come from the model's logits, transformed
// here in double.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <numeric>

#include "engine/inference/batch_builder.h"
#include "engine/inference/inference_fixture.h"

namespace stretto::engine {
namespace {
using testing::EagerModel;
using testing::EagerNgrams;
using testing::MakeModel;
using testing::Model;
using testing::Results;

constexpr int kVocabulary = 6, kTokens = 4, kCompletions = 34000;  // > 100,000 drafted positions
// A block and a token: all but the last come out of the prefix cache.
const std::vector<int32_t> kPrompt = {0, 3, 1, 4, 2, 5, 0, 3, 4, 1, 2, 0, 5, 1, 3, 2, 4};
using Ids = std::vector<int32_t>;

Model SmallModel() {
  testing::ModelShape shape;
  shape.vocab_size = kVocabulary;
  shape.hidden_size = 16;
  shape.intermediate_size = 16;
  shape.num_layers = 1;
  shape.num_heads = 2;
  shape.num_kv_heads = 1;
  return MakeModel("cpu", 1, DType::kF32, shape);
}

// Pairs of tokens, where the first decides what the second can be.
std::shared_ptr<const Constraint> Pairs() {
  const auto trie =
      std::make_shared<const TokenTrie>(std::vector<std::string>{"a", "b", "c", "d", "e", "f"});
  auto pairs = Constraint::Compile({ConstraintSpec::Kind::kRegex, "(?:[a-d][bdf]|e[ace])*"}, trie);
  REQUIRE_OK(pairs);
  return *std::move(pairs);
}
bool ObeysPairs(const Ids& completion, int32_t token) {
  if (completion.size() % 2 == 0) return token != 5;
  return (token % 2 == 1) == (completion.back() != 4);
}

class Oracle {
 public:
  explicit Oracle(const Model& model) : model_(model), weights_(model.Weights(1)) {
    stream_ = model.device->CreateStream();
    auto cache = model.device->AllocateKvCache(model.transformer->CacheShape(2));
    REQUIRE_OK(cache);
    cache_ = *std::move(cache);
    auto workspace =
        Workspace::Create(*model.device, model.transformer->config(), DType::kF32, {32, 1, 1, 2});
    REQUIRE_OK(workspace);
    workspace_ = *std::move(workspace);
  }

  // The probability of every completion of kTokens tokens, or of fewer with a stop id at its end.
  std::map<Ids, double> Distribution(const SamplingParams& params) {
    std::map<Ids, double> distribution;
    Extend(params, {}, 1.0, distribution);
    return distribution;
  }

 private:
  void Extend(const SamplingParams& params, const Ids& completion, double probability,
              std::map<Ids, double>& distribution) {
    const bool stopped =
        !completion.empty() &&
        std::count(params.stop_ids.begin(), params.stop_ids.end(), completion.back()) > 0;
    if (stopped || completion.size() == kTokens) {
      distribution[completion] = probability;
      return;
    }
    const std::vector<double> next = Next(params, completion);
    for (int32_t t = 0; t < kVocabulary; ++t) {
      if (next[t] == 0) continue;
      Ids longer = completion;
      longer.push_back(t);
      Extend(params, longer, probability * next[t], distribution);
    }
  }

  std::vector<float> Logits(const Ids& completion) {
    Ids text = kPrompt;
    text.insert(text.end(), completion.begin(), completion.end());
    BatchBuilder batch;
    const std::vector<int32_t> blocks = {0, 1};
    batch.AddLogits(batch.AddRows(text, 0, static_cast<int32_t>(text.size()), blocks));
    const Tensor logits =
        model_.transformer->ForwardPaged(*stream_, *weights_, batch.Build(), *cache_, *workspace_);
    std::vector<float> host(kVocabulary);
    model_.device->Download(*stream_, logits, host.data());
    return host;
  }

  // The distribution that SamplingParams define (request.h), term by term.
  std::vector<double> Next(const SamplingParams& p, const Ids& completion) {
    const std::vector<float> logits = Logits(completion);
    std::vector<double> z(logits.begin(), logits.end());
    for (const auto& [token, bias] : p.logit_bias) z[token] += bias;
    for (int32_t t = 0; t < kVocabulary; ++t) {
      const auto in_prompt = std::count(kPrompt.begin(), kPrompt.end(), t);
      const auto count = std::count(completion.begin(), completion.end(), t);
      if (in_prompt + count > 0) {
        z[t] = z[t] > 0 ? z[t] / p.repetition_penalty : z[t] * p.repetition_penalty;
      }
      if (count > 0) z[t] -= p.presence_penalty + p.frequency_penalty * static_cast<double>(count);
    }
    if (static_cast<int32_t>(completion.size()) < p.min_tokens) {
      for (const int32_t t : p.stop_ids) z[t] = -1e30;
    }
    for (int32_t t = 0; t < kVocabulary; ++t) {
      if (p.constraint != nullptr && !ObeysPairs(completion, t)) z[t] = -1e30;
    }
    std::vector<double> probability(kVocabulary, 0.0);
    std::vector<int32_t> order(kVocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
    if (p.temperature == 0) {
      probability[order[0]] = 1;
      return probability;
    }
    std::vector<double> e(kVocabulary);
    for (int32_t t = 0; t < kVocabulary; ++t) e[t] = std::exp((z[t] - z[order[0]]) / p.temperature);
    const int32_t k = p.top_k > 0 ? std::min(p.top_k, kVocabulary) : kVocabulary;
    double top_k_mass = 0, mass = 0, kept = 0;
    for (int32_t i = 0; i < k; ++i) top_k_mass += e[order[i]];
    for (int32_t i = 0; i < k && mass < p.top_p * top_k_mass; ++i) {
      mass += e[order[i]];
      if (e[order[i]] >= p.min_p) kept += probability[order[i]] = e[order[i]];
    }
    for (double& x : probability) x /= kept;
    return probability;
  }

  const Model& model_;
  std::shared_ptr<const ModelWeights> weights_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Workspace> workspace_;
};

std::map<Ids, int> Count(const Model& model, std::shared_ptr<const ModelWeights> weights,
                         const SamplingParams& params, const SpeculationOptions& speculation,
                         EngineStats* stats = nullptr) {
  EngineOptions options;
  options.num_kv_blocks = 600;
  options.max_running = 128;
  options.max_tokens_per_step = 512;
  options.max_queued = kCompletions;
  options.speculation = speculation;
  auto engine = InferenceEngine::Create(*model.transformer, {std::move(weights), 1, "w"}, options);
  REQUIRE_OK(engine);
  std::vector<Request> group(kCompletions);
  for (int i = 0; i < kCompletions; ++i) {
    group[i].id = static_cast<uint64_t>(i);
    group[i].prompt_ids = kPrompt;
    group[i].draw = {23, 9, static_cast<uint32_t>(i)};
    group[i].sampling = params;
    group[i].sampling.max_tokens = kTokens;
  }
  REQUIRE_OK((*engine)->SubmitGroup(std::move(group)));
  Results results;
  RunToEnd(**engine, results);
  std::map<Ids, int> counts;
  for (const auto& [id, result] : results) ++counts[result.ids];
  if (stats != nullptr) *stats = (*engine)->stats();
  return counts;
}

// The chi-square statistic over cells of at least 5 expected counts (the rest is one cell), less
// its expectation, in standard deviations of it. Infinite when something impossible was drawn.
double Sigmas(const std::map<Ids, int>& counts, const std::map<Ids, double>& expected) {
  double statistic = 0, rest_expected = 0;
  int rest = kCompletions, cells = 0;
  for (const auto& [ids, count] : counts) {
    if (!expected.contains(ids)) return INFINITY;
  }
  for (const auto& [ids, probability] : expected) {
    const double e = probability * kCompletions;
    if (e < 5) {
      rest_expected += e;
      continue;
    }
    const auto it = counts.find(ids);
    const int count = it == counts.end() ? 0 : it->second;
    statistic += (count - e) * (count - e) / e;
    rest -= count;
    ++cells;
  }
  if (rest_expected >= 5) {
    statistic += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
    ++cells;
  }
  const double freedom = std::max(cells - 1, 1);
  return (statistic - freedom) / std::sqrt(2 * freedom);
}

// One for each parameter, and some together.
std::map<std::string, SamplingParams> AllParams() {
  std::map<std::string, SamplingParams> all;
  all["plain"] = {};
  all["greedy"].temperature = 0;
  all["temperature"].temperature = 0.6f;
  all["top_k"].top_k = 3;
  all["top_p"].top_p = 0.8f;
  all["min_p"].min_p = 0.15f;
  all["repetition"].repetition_penalty = 1.6f;
  all["presence"].presence_penalty = 0.9f;
  all["frequency"].frequency_penalty = 0.7f;
  all["bias"].logit_bias = {{1, 0.8f}, {4, -0.5f}};
  all["stop, min_tokens"].stop_ids = {2};
  all["stop, min_tokens"].min_tokens = 3;
  all["constraint"].constraint = Pairs();
  all["constraint, top_k"].constraint = Pairs();
  all["constraint, top_k"].top_k = 2;
  SamplingParams& p = all["together"];
  p.temperature = 1.3f, p.top_k = 5, p.top_p = 0.95f, p.min_p = 0.02f, p.stop_ids = {3};
  p.min_tokens = 2, p.repetition_penalty = 1.2f, p.presence_penalty = 0.3f;
  p.frequency_penalty = -0.2f, p.logit_bias = {{0, 0.4f}};
  return all;
}
}  // namespace

TEST_CASE("speculated draws follow the distribution of every sampling parameter") {
  const Model model = SmallModel();
  Oracle oracle(model);
  int index = 0;
  for (const auto& [name, params] : AllParams()) {
    const bool by_model = ++index % 2 == 0;
    INFO(name << ", drafts by " << (by_model ? "a model" : "n-grams"));
    const std::map<Ids, double> expected = oracle.Distribution(params);
    EngineStats stats;
    const std::map<Ids, int> counts = Count(
        model, model.Weights(1), params, by_model ? EagerModel(model, 0.5) : EagerNgrams(), &stats);
    CHECK(Sigmas(counts, expected) < 4.5);
    CHECK(stats.tokens_generated - kCompletions > (params.stop_ids.empty() ? 100000 : 60000));
    if (name == "greedy") continue;  // one completion, whose drafts may all be right or wrong
    CHECK(stats.speculation.num_accepted > kCompletions / 20);
    CHECK(stats.speculation.num_verified - stats.speculation.num_accepted > kCompletions / 50);
    // The test can fail: the counts don't fit a distribution that is a little off.
    SamplingParams other = params;
    other.temperature *= 1.15f;
    CHECK(Sigmas(counts, oracle.Distribution(other)) > 4.5);
  }
}

TEST_CASE("negative control: the test sees draws that take every draft") {
  const Model model = SmallModel();
  Oracle oracle(model);
  for (const auto& [name, params] : AllParams()) {
    if (name != "plain" && name != "together") continue;
    INFO(name);
    CHECK(Sigmas(Count(model, model.Weights(1, -1, 0.5), params, {}), oracle.Distribution(params)) >
          4.5);
  }
}
}  // namespace stretto::engine
