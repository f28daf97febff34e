#include "rl/objective.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/philox.h"
#include "base/testing.h"

namespace stretto::rl {
namespace {
// A random step of several sequences, owned.
struct Step {
  struct Sequence {
    std::vector<float> logprobs, behaviour, reference, entropies, proximal;
    double advantage = 0;
  };
  std::vector<Sequence> sequences;
  StepTotals totals;

  explicit Step(uint64_t seed, double spread = 0.3) {
    PhiloxStream random(seed);
    for (size_t s = 0; s < 5; ++s) {
      Sequence q;
      const size_t num_tokens = s == 2 ? 0 : 1 + random.Below(9);
      for (size_t t = 0; t < num_tokens; ++t) {
        const double base = -0.2 - 3 * random.NextDouble();
        q.logprobs.push_back(static_cast<float>(base));
        q.behaviour.push_back(static_cast<float>(base + spread * random.NextGaussian()));
        q.reference.push_back(static_cast<float>(base + spread * random.NextGaussian()));
        q.proximal.push_back(static_cast<float>(base + spread * random.NextGaussian()));
        q.entropies.push_back(static_cast<float>(2 * random.NextDouble()));
      }
      q.advantage = random.NextGaussian();
      totals.num_tokens += static_cast<int64_t>(num_tokens);
      totals.num_sequences += num_tokens > 0 ? 1 : 0;
      sequences.push_back(std::move(q));
    }
  }
};

struct Result {
  LossSums sums;
  std::vector<std::vector<float>> d_logprobs, d_entropies;
};

Result Run(const Objective& objective, const Step& step, bool with_proximal) {
  Result result;
  for (const auto& q : step.sequences) {
    std::vector<float> d_logprobs(q.logprobs.size(), 9), d_entropies(q.logprobs.size(), 9);
    SequenceInputs in{q.logprobs, q.behaviour, q.reference, q.entropies, {}, q.advantage};
    if (with_proximal) in.proximal_logprobs_T = q.proximal;
    result.sums.Merge(objective.Evaluate(
        in, step.totals, {absl::MakeSpan(d_logprobs), absl::MakeSpan(d_entropies)}));
    result.d_logprobs.push_back(std::move(d_logprobs));
    result.d_entropies.push_back(std::move(d_entropies));
  }
  return result;
}

double Loss(const Objective& objective, const Step& step, bool with_proximal) {
  return Run(objective, step, with_proximal).sums.loss;
}

ObjectiveOptions RandomOptions(PhiloxStream& random) {
  ObjectiveOptions o;
  o.clip_low = 0.1 + 0.2 * random.NextDouble();
  o.clip_high = 0.1 + 0.4 * random.NextDouble();
  o.kl_coef = random.NextDouble();
  o.kl_estimator = static_cast<KlEstimator>(random.Below(3));
  o.denominator = static_cast<LossDenominator>(random.Below(2));
  o.entropy_coef = random.NextDouble() * 0.1;
  o.importance_cap = random.Below(2) == 0 ? 0 : 1 + random.NextDouble();
  return o;
}

TEST_CASE("gradients are the derivatives of the loss") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  for (int trial = 0; trial < 60; ++trial) {
    const ObjectiveOptions options = RandomOptions(random);
    for (const auto& name : ObjectiveNames()) {
      INFO(name << " trial " << trial);
      const auto objective = MakeObjective(name, options).value();
      Step step(random.NextU64());
      const Result result = Run(*objective, step, true);
      for (size_t s = 0; s < step.sequences.size(); ++s) {
        for (size_t t = 0; t < step.sequences[s].logprobs.size(); ++t) {
          const auto derivative = [&](std::vector<float> Step::Sequence::*field) {
            float& x = (step.sequences[s].*field)[t];
            const float saved = x, up = saved + 1e-3f, down = saved - 1e-3f;
            x = up;
            const double above = Loss(*objective, step, true);
            x = down;
            const double below = Loss(*objective, step, true);
            x = saved;
            return (above - below) / (double{up} - double{down});
          };
          // Where the clip begins within the step of the difference, the derivative jumps.
          const double numeric = derivative(&Step::Sequence::logprobs);
          const double ratio_base = options.importance_cap > 0 ? step.sequences[s].proximal[t]
                                                               : step.sequences[s].behaviour[t];
          const double ratio = std::exp(step.sequences[s].logprobs[t] - ratio_base);
          const bool near_kink = std::abs(ratio - 1 + options.clip_low) < 5e-3 ||
                                 std::abs(ratio - 1 - options.clip_high) < 5e-3;
          if (!near_kink)
            CHECK(result.d_logprobs[s][t] == Approx(numeric).margin(2e-6).epsilon(1e-4));
          CHECK(result.d_entropies[s][t] ==
                Approx(derivative(&Step::Sequence::entropies)).margin(1e-7).epsilon(1e-4));
        }
      }
    }
  }
}

TEST_CASE("on fresh data ratios are exactly 1 and grpo's gradient is reinforce's") {
  Step step(3);
  for (auto& q : step.sequences) q.behaviour = q.logprobs;
  const auto grpo = Run(*MakeObjective("grpo", {}).value(), step, false);
  const auto reinforce = Run(*MakeObjective("reinforce", {}).value(), step, false);
  CHECK(grpo.sums.ratio_min == 1.0);
  CHECK(grpo.sums.ratio_max == 1.0);
  CHECK(grpo.sums.num_clipped_low + grpo.sums.num_clipped_high == 0);
  CHECK(grpo.d_logprobs == reinforce.d_logprobs);
  CHECK(grpo.sums.Metrics().at("ratio_mean") == 1.0);
}

TEST_CASE("the clip binds on the side where it lowers the objective") {
  const auto evaluate = [](double advantage, double ratio) {
    const auto objective = MakeObjective("grpo", {.clip_low = 0.2, .clip_high = 0.28}).value();
    const std::vector<float> now = {static_cast<float>(std::log(ratio))}, old = {0.0f};
    std::vector<float> d(1);
    const LossSums sums =
        objective->Evaluate({now, old, {}, {}, {}, advantage},
                            {.num_tokens = 1, .num_sequences = 1}, {absl::MakeSpan(d), {}});
    return std::pair<double, double>(sums.loss, d[0]);
  };
  CHECK(evaluate(2, 1.5).first == Approx(-2 * 1.28));
  CHECK(evaluate(2, 1.5).second == 0);
  CHECK(evaluate(2, 0.5).first == Approx(-2 * 0.5));
  CHECK(evaluate(2, 0.5).second == Approx(-2 * 0.5));
  CHECK(evaluate(-2, 1.5).first == Approx(2 * 1.5));
  CHECK(evaluate(-2, 0.5).first == Approx(2 * 0.8));
  CHECK(evaluate(-2, 0.5).second == 0);
  CHECK(evaluate(0, 3).second == 0);
}

TEST_CASE("token mean weighs tokens alike, sequence mean sequences") {
  const std::vector<float> one = {-1.0f}, three = {-1.0f, -1.0f, -1.0f};
  const StepTotals totals{.num_tokens = 4, .num_sequences = 2};
  const auto gradients = [&](LossDenominator denominator) {
    const auto objective = MakeObjective("grpo", {.denominator = denominator}).value();
    std::vector<float> d1(1), d3(3);
    objective->Evaluate({one, one, {}, {}, {}, 1}, totals, {absl::MakeSpan(d1), {}});
    objective->Evaluate({three, three, {}, {}, {}, 1}, totals, {absl::MakeSpan(d3), {}});
    return std::pair<float, float>(d1[0], d3[0]);
  };
  CHECK(gradients(LossDenominator::kTokenMean) == std::pair<float, float>(-0.25f, -0.25f));
  CHECK(gradients(LossDenominator::kSequenceMean).first == -0.5f);
  CHECK(gradients(LossDenominator::kSequenceMean).second == Approx(-1.0f / 6));
}

TEST_CASE("importance weights are truncated at the cap") {
  const auto objective = MakeObjective("reinforce", {.importance_cap = 2}).value();
  const std::vector<float> now = {0, 0, 0}, old = {-3, 0, 1};
  std::vector<float> d(3);
  const LossSums sums = objective->Evaluate(
      {now, old, {}, {}, {}, 1}, {.num_tokens = 1, .num_sequences = 1}, {absl::MakeSpan(d), {}});
  CHECK(d[0] == -2.0f);
  CHECK(d[1] == -1.0f);
  CHECK(d[2] == Approx(-std::exp(-1.0)));
  CHECK(sums.num_truncated == 1);
  CHECK(sums.Metrics().at("truncated_fraction") == Approx(1.0 / 3));
}

TEST_CASE("extreme log-probs stay finite and NaN stays visible") {
  for (const auto& name : ObjectiveNames()) {
    const auto objective = MakeObjective(name, {.kl_coef = 0.1}).value();
    std::vector<float> d(1);
    const auto loss = [&](float now, float old, float reference) {
      const std::vector<float> a = {now}, b = {old}, c = {reference};
      return objective
          ->Evaluate({a, b, c, {}, {}, -1}, {.num_tokens = 1, .num_sequences = 1},
                     {absl::MakeSpan(d), {}})
          .loss;
    };
    CHECK(std::isfinite(loss(0, -1e4f, 0)));
    CHECK(std::isfinite(d[0]));
    CHECK(std::isfinite(loss(-1e4f, 0, 0)));
    CHECK(std::isfinite(d[0]));
    CHECK(std::isnan(loss(std::nanf(""), 0, 0)));
  }
}

TEST_CASE("unknown objectives are named with the known ones") {
  const auto objective = MakeObjective("ppo2", {});
  REQUIRE_FALSE(objective.ok());
  CHECK(std::string(objective.status().message()) ==
        "objective: expected one of grpo, reinforce, supervised, found 'ppo2'");
}
}  // namespace
}  // namespace stretto::rl
