#include "rl/objective.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "base/philox.h"
#include "base/testing.h"

namespace stretto::rl {
namespace {
// A random step of several sequences, owned.
struct Step {
  struct Sequence {
    std::vector<float> logprobs, behaviour, reference, entropies, proximal;
    std::vector<float> values, old_values, returns;
    double advantage = 0;
    int64_t id = 0;
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
        const auto near = [&] { return static_cast<float>(base + spread * random.NextGaussian()); };
        q.logprobs.push_back(static_cast<float>(base));
        for (auto* v : {&q.behaviour, &q.reference, &q.proximal}) v->push_back(near());
        for (auto* v : {&q.values, &q.old_values, &q.returns}) v->push_back(near());
        q.entropies.push_back(static_cast<float>(2 * random.NextDouble()));
      }
      q.advantage = random.NextGaussian();
      q.id = 100 + static_cast<int64_t>(s);
      totals.num_tokens += static_cast<int64_t>(num_tokens);
      totals.num_sequences += num_tokens > 0 ? 1 : 0;
      sequences.push_back(std::move(q));
    }
  }
};

SequenceInputs InputsOf(const Step::Sequence& q) {
  SequenceInputs in;
  in.logprobs_T = q.logprobs;
  in.behaviour_logprobs_T = q.behaviour;
  in.reference_logprobs_T = q.reference;
  in.entropies_T = q.entropies;
  in.advantage = q.advantage;
  in.values_T = q.values;
  in.old_values_T = q.old_values;
  in.returns_T = q.returns;
  in.id = q.id;
  return in;
}

struct Result {
  LossSums sums;
  std::vector<std::vector<float>> d_logprobs, d_entropies, d_values;
};

Result Run(const Objective& objective, const Step& step, bool with_proximal) {
  Result result;
  for (const auto& q : step.sequences) {
    const size_t num_tokens = q.logprobs.size();
    std::vector<float> d_logprobs(num_tokens, 9), d_entropies(num_tokens, 9),
        d_values(num_tokens, 9);
    SequenceInputs in = InputsOf(q);
    if (with_proximal) in.proximal_logprobs_T = q.proximal;
    const auto sums = objective.Evaluate(
        in, step.totals,
        {absl::MakeSpan(d_logprobs), absl::MakeSpan(d_entropies), absl::MakeSpan(d_values)});
    if (!sums.ok()) FAIL(sums.status().ToString());
    result.sums.Merge(*sums);
    result.d_logprobs.push_back(std::move(d_logprobs));
    result.d_entropies.push_back(std::move(d_entropies));
    result.d_values.push_back(std::move(d_values));
  }
  return result;
}

// One token of one sequence.
struct Single {
  double loss = 0, d_logprob = 0;
};
Single RunSingle(const std::string& name, const ObjectiveOptions& options, double advantage,
                 double ratio) {
  const auto objective = MakeObjective(name, options).value();
  const std::vector<float> now = {static_cast<float>(std::log(ratio))}, old = {0.0f};
  std::vector<float> d(1);
  const LossSums sums =
      objective
          .Evaluate({now, old, {}, {}, {}, advantage}, {.num_tokens = 1, .num_sequences = 1},
                    {absl::MakeSpan(d), {}})
          .value();
  return {sums.loss, d[0]};
}

ObjectiveOptions RandomOptions(PhiloxStream& random) {
  ObjectiveOptions o;
  o.clip_low = 0.1 + 0.2 * random.NextDouble();
  o.clip_high = 0.1 + 0.4 * random.NextDouble();
  o.dual_clip = random.Below(2) == 0 ? 0 : 1.5 + random.NextDouble();
  o.ratio_level = static_cast<RatioLevel>(random.Below(2));
  o.kl_coef = random.NextDouble();
  o.kl_estimator = static_cast<KlEstimator>(random.Below(3));
  o.denominator = static_cast<LossDenominator>(random.Below(4));
  o.constant_length = 5;
  o.entropy_coef = random.NextDouble() * 0.1;
  o.importance_cap = random.Below(2) == 0 ? 0 : 1 + random.NextDouble();
  o.value_coef = random.NextDouble();
  o.value_clip = random.Below(2) == 0 ? 0 : 0.1;
  return o;
}

// (f(x + h) − f(x)) / h and (f(x) − f(x − h)) / h by a field's token.
std::pair<double, double> Slopes(const Objective& objective, Step& step, size_t s, size_t t,
                                 std::vector<float> Step::Sequence::*field) {
  float& x = (step.sequences[s].*field)[t];
  const float saved = x, up = saved + 1e-3f, down = saved - 1e-3f;
  const auto loss = [&](float value) {
    x = value;
    return Run(objective, step, true).sums.loss;
  };
  const double here = loss(saved), above = loss(up), below = loss(down);
  x = saved;
  return {(above - here) / (double{up} - saved), (here - below) / (saved - double{down})};
}

// A gradient is the mean of the slopes on both sides. Where they differ much, a clip begins between
// them, and it may be either.
void CheckGradient(double gradient, const std::pair<double, double>& slopes, int* num_kinks) {
  const double size = std::max(std::abs(slopes.first), std::abs(slopes.second));
  if (std::abs(slopes.first - slopes.second) > 1e-2 * size + 1e-5) {
    *num_kinks += 1;
    return;
  }
  CHECK(gradient == Approx((slopes.first + slopes.second) / 2).margin(2e-6).epsilon(1e-4));
}

TEST_CASE("gradients are the derivatives of the loss") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  int num_kinks = 0, num_checked = 0;
  for (int trial = 0; trial < 25; ++trial) {
    const ObjectiveOptions options = RandomOptions(random);
    for (const auto& name : ObjectiveNames()) {
      INFO(name << " trial " << trial);
      const auto objective = MakeObjective(name, options).value();
      Step step(random.NextU64());
      const Result result = Run(objective, step, true);
      for (size_t s = 0; s < step.sequences.size(); ++s) {
        for (size_t t = 0; t < step.sequences[s].logprobs.size(); ++t) {
          const auto slopes = [&](auto field) { return Slopes(objective, step, s, t, field); };
          CheckGradient(result.d_logprobs[s][t], slopes(&Step::Sequence::logprobs), &num_kinks);
          CheckGradient(result.d_entropies[s][t], slopes(&Step::Sequence::entropies), &num_kinks);
          CheckGradient(result.d_values[s][t], slopes(&Step::Sequence::values), &num_kinks);
          num_checked += 3;
        }
      }
    }
  }
  CHECK(num_kinks < num_checked / 20);
}

TEST_CASE("on fresh data ratios are exactly 1 and grpo's gradient is reinforce's") {
  Step step(3);
  for (auto& q : step.sequences) q.behaviour = q.logprobs;
  const auto grpo = Run(MakeObjective("grpo", {}).value(), step, false);
  const auto reinforce = Run(MakeObjective("reinforce", {}).value(), step, false);
  CHECK(grpo.sums.ratio_min == 1.0);
  CHECK(grpo.sums.ratio_max == 1.0);
  CHECK(grpo.sums.num_clipped_low + grpo.sums.num_clipped_high == 0);
  CHECK(grpo.d_logprobs == reinforce.d_logprobs);
  CHECK(grpo.sums.Metrics().at("ratio_mean") == 1.0);
}

TEST_CASE("the clip binds on the side where it lowers the objective") {
  for (const char* name : {"grpo", "rloo"}) {
    const auto run = [&](double advantage, double ratio) {
      return RunSingle(name, {.clip_low = 0.2, .clip_high = 0.28}, advantage, ratio);
    };
    CHECK(run(2, 1.5).loss == Approx(-2 * 1.28));
    CHECK(run(2, 1.5).d_logprob == 0);
    CHECK(run(2, 0.5).loss == Approx(-2 * 0.5));
    CHECK(run(2, 0.5).d_logprob == Approx(-2 * 0.5));
    CHECK(run(-2, 1.5).loss == Approx(2 * 1.5));
    CHECK(run(-2, 0.5).loss == Approx(2 * 0.8));
    CHECK(run(-2, 0.5).d_logprob == 0);
    CHECK(run(0, 3).d_logprob == 0);
  }
}

TEST_CASE("the dual clip bounds what a negative advantage can cost") {
  const ObjectiveOptions options{.dual_clip = 3};
  CHECK(RunSingle("grpo", options, -2, 2.5).loss == Approx(5));
  CHECK(RunSingle("grpo", options, -2, 1000).loss == Approx(6));
  CHECK(RunSingle("grpo", options, -2, 1000).d_logprob == 0);
  CHECK(RunSingle("grpo", options, 2, 1000).loss == Approx(-2.4));
}

TEST_CASE("a sequence's ratio is the mean of its tokens for grpo, their product for rloo") {
  const float half = std::log(0.5f);
  const std::vector<float> now = {half, 0, 0, 3 * half}, old = {0, 0, 0, 0};
  const StepTotals totals{.num_tokens = 4, .num_sequences = 1};
  const auto run = [&](const char* name) {
    std::vector<float> d(4);
    const auto objective = MakeObjective(name, {.ratio_level = RatioLevel::kSequence}).value();
    const auto sums =
        objective.Evaluate({now, old, {}, {}, {}, 8}, totals, {absl::MakeSpan(d), {}});
    REQUIRE_OK(sums);
    for (const float x : d) CHECK(x == d[0]);
    return std::pair<double, double>(sums->loss, d[0]);
  };
  CHECK(run("grpo").first == Approx(-4));         // half of 8
  CHECK(run("grpo").second == Approx(-4.0 / 4));  // by each of four log-probs
  CHECK(run("rloo").first == Approx(-8.0 / 16));  // 1/2 · 1/8
  CHECK(run("rloo").second == Approx(-8.0 / 16));
}

TEST_CASE("denominators") {
  const std::vector<float> one = {-1.0f}, three = {-1.0f, -1.0f, -1.0f};
  const StepTotals totals{.num_tokens = 4, .num_sequences = 2};
  const auto gradients = [&](LossDenominator denominator) {
    const auto objective =
        MakeObjective("grpo", {.denominator = denominator, .constant_length = 8}).value();
    std::vector<float> d1(1), d3(3);
    CHECK(objective.Evaluate({one, one, {}, {}, {}, 1}, totals, {absl::MakeSpan(d1), {}}).ok());
    CHECK(objective.Evaluate({three, three, {}, {}, {}, 1}, totals, {absl::MakeSpan(d3), {}}).ok());
    return std::pair<float, float>(d1[0], d3[0]);
  };
  CHECK(gradients(LossDenominator::kTokenMean) == std::pair<float, float>(-0.25f, -0.25f));
  CHECK(gradients(LossDenominator::kSequenceMean).first == -0.5f);
  CHECK(gradients(LossDenominator::kSequenceMean).second == Approx(-1.0f / 6));
  CHECK(gradients(LossDenominator::kConstant) == std::pair<float, float>(-1.0f / 16, -1.0f / 16));
  CHECK(gradients(LossDenominator::kSequenceSum) == std::pair<float, float>(-0.5f, -0.5f));
}

TEST_CASE("importance weights are truncated at the cap") {
  const auto objective = MakeObjective("reinforce", {.importance_cap = 2}).value();
  const std::vector<float> now = {0, 0, 0}, old = {-3, 0, 1};
  std::vector<float> d(3);
  const LossSums sums =
      objective
          .Evaluate({now, old, {}, {}, {}, 1}, {.num_tokens = 1, .num_sequences = 1},
                    {absl::MakeSpan(d), {}})
          .value();
  CHECK(d[0] == -2.0f);
  CHECK(d[1] == -1.0f);
  CHECK(d[2] == Approx(-std::exp(-1.0)));
  CHECK(sums.num_truncated == 1);
  CHECK(sums.Metrics().at("truncated_fraction") == Approx(1.0 / 3));
}

TEST_CASE("ratios that overflow are bounded") {
  for (const auto& name : ObjectiveNames()) {
    INFO(name);
    for (const auto level : {RatioLevel::kToken, RatioLevel::kSequence}) {
      const auto objective =
          MakeObjective(name, {.ratio_level = level, .kl_coef = 0.1, .importance_cap = 2}).value();
      std::vector<float> d(1);
      const auto loss = [&](float now, float old, float reference) {
        const std::vector<float> a = {now}, b = {old}, c = {reference}, zero = {0};
        SequenceInputs in{a, b, c, {}, {}, -1};
        in.values_T = in.old_values_T = in.returns_T = zero;
        return objective
            .Evaluate(in, {.num_tokens = 1, .num_sequences = 1}, {absl::MakeSpan(d), {}})
            .value()
            .loss;
      };
      CHECK(std::isfinite(loss(0, -1e4f, 0)));
      CHECK(std::isfinite(d[0]));
      CHECK(std::isfinite(loss(-1e4f, 0, 0)));
      CHECK(std::isfinite(d[0]));
    }
  }
}

// Wholly off-policy data: e^20 bounds the loss of a negative advantage, 1 + clip_high that of a
// positive one, and neither has a gradient any more.
TEST_CASE("wholly off-policy data has no gradient") {
  const double far = std::exp(50.0);
  CHECK(RunSingle("grpo", {}, 1, far).loss == Approx(-1.2));
  CHECK(RunSingle("grpo", {}, 1, far).d_logprob == 0);
  CHECK(RunSingle("grpo", {}, -1, far).loss == Approx(std::exp(20.0)));
  CHECK(RunSingle("grpo", {}, -1, far).d_logprob == 0);
  CHECK(RunSingle("grpo", {.dual_clip = 3}, -1, far).loss == Approx(3));
  CHECK(RunSingle("grpo", {}, 1, 1 / far).loss == Approx(-std::exp(-20.0)));
  CHECK(RunSingle("grpo", {}, 1, 1 / far).d_logprob == 0);
  CHECK(RunSingle("grpo", {}, -1, 1 / far).loss == Approx(0.8));
}

TEST_CASE("a group without spread and a completion without tokens move nothing") {
  for (const auto& name : ObjectiveNames()) {
    if (name == "supervised") continue;  // knows no advantage
    INFO(name);
    const auto objective = MakeObjective(name, {.value_coef = 0}).value();
    Step step(5);
    for (auto& q : step.sequences) q.advantage = 0;
    const Result result = Run(objective, step, false);
    CHECK(result.sums.loss == 0);
    for (const auto& d : result.d_logprobs) {
      for (const float x : d) CHECK(x == 0);
    }
    const LossSums none = objective.Evaluate({}, {}, {}).value();
    CHECK(none.num_tokens == 0);
    CHECK(none.loss == 0);
  }
}

TEST_CASE("what is not finite is refused by name, and nothing is written") {
  using Field = std::vector<float> Step::Sequence::*;
  const std::pair<Field, const char*> fields[] = {
      {&Step::Sequence::logprobs, "log-prob"},
      {&Step::Sequence::behaviour, "behaviour log-prob"},
      {&Step::Sequence::reference, "reference log-prob"},
      {&Step::Sequence::entropies, "entropy"},
      {&Step::Sequence::proximal, "proximal log-prob"},
      {&Step::Sequence::values, "value"},
      {&Step::Sequence::old_values, "old value"},
      {&Step::Sequence::returns, "return"}};
  for (const auto& name : ObjectiveNames()) {
    const auto objective = MakeObjective(name, {}).value();
    for (const auto& [field, what] : fields) {
      for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
        Step step(6);
        Step::Sequence& q = step.sequences[3];
        (q.*field).back() = bad;
        SequenceInputs in = InputsOf(q);
        in.proximal_logprobs_T = q.proximal;
        std::vector<float> d(q.logprobs.size(), 9);
        const auto result = objective.Evaluate(in, step.totals, {absl::MakeSpan(d), {}});
        REQUIRE(absl::IsInvalidArgument(result.status()));
        const std::string message(result.status().message());
        INFO(message);
        CHECK(message.find("sequence 103, token " + std::to_string(d.size() - 1) + ": " + what +
                           ": ") == 0);
        CHECK(d[0] == 9);
      }
    }
    Step step(6);
    step.sequences[3].advantage = std::nan("");
    std::vector<float> d(step.sequences[3].logprobs.size());
    CHECK(objective.Evaluate(InputsOf(step.sequences[3]), step.totals, {absl::MakeSpan(d), {}})
              .status()
              .message() == "sequence 103: advantage: expected a finite number, found nan");
  }
}

TEST_CASE("ppo's values are held within the clip of the old ones") {
  const auto value_loss = [](float value, float old_value, float target) {
    const std::vector<float> zero = {0}, now = {value}, old = {old_value}, wanted = {target};
    std::vector<float> d(1), d_value(1);
    SequenceInputs in{zero, zero, {}, {}, {}, 0};
    in.values_T = now;
    in.old_values_T = old;
    in.returns_T = wanted;
    const auto sums = MakeObjective("ppo", {.value_coef = 1, .value_clip = 0.5})
                          .value()
                          .Evaluate(in, {.num_tokens = 1, .num_sequences = 1},
                                    {absl::MakeSpan(d), {}, absl::MakeSpan(d_value)});
    REQUIRE_OK(sums);
    return std::pair<double, double>(sums->value_loss, d_value[0]);
  };
  CHECK(value_loss(0.25f, 0, 1) == std::pair<double, double>(0.5 * 0.5625, -0.75));
  CHECK(value_loss(0.75f, 0, 1) == std::pair<double, double>(0.125, 0));  // far enough
  CHECK(value_loss(-1.0f, 0, 1) == std::pair<double, double>(2, -2));     // the wrong way
  const auto without = MakeObjective("ppo", {}).value();
  const std::vector<float> zero = {0};
  std::vector<float> d(1);
  CHECK(without.Evaluate({zero, zero, {}, {}, {}, 1}, {1, 1}, {absl::MakeSpan(d), {}})
            .status()
            .message() == "sequence 0: expected values, old values and returns of a critic");
}

TEST_CASE("a critic alone has ppo's value loss") {
  const Step step(testing::Seed());
  INFO("seed " << testing::Seed());
  ObjectiveOptions options;
  options.value_coef = 0.7;
  const auto ppo = MakeObjective("ppo", options);
  REQUIRE_OK(ppo);
  for (const Step::Sequence& q : step.sequences) {
    const size_t n = q.values.size();
    std::vector<float> d_logprobs(n), d_values(n), d_alone(n);
    const auto both = ppo->Evaluate(InputsOf(q), step.totals,
                                    {absl::MakeSpan(d_logprobs), {}, absl::MakeSpan(d_values)});
    REQUIRE_OK(both);
    const auto alone = EvaluateCritic(options, {q.values, q.old_values, q.returns, q.id},
                                      step.totals, absl::MakeSpan(d_alone));
    REQUIRE_OK(alone);
    CHECK(d_alone == d_values);
    CHECK(alone->value_loss == both->value_loss);
    CHECK(alone->loss == both->value_loss);
    CHECK(alone->num_clipped_values == both->num_clipped_values);
  }
  Step bad(testing::Seed());
  bad.sequences[0].values[0] = std::nanf("");
  std::vector<float> d(bad.sequences[0].values.size(), 7.0f);
  const Step::Sequence& q = bad.sequences[0];
  const auto refused = EvaluateCritic(options, {q.values, q.old_values, q.returns, q.id},
                                      bad.totals, absl::MakeSpan(d));
  CHECK(absl::IsInvalidArgument(refused.status()));
  CHECK(refused.status().message().find("sequence 100, token 0: value") != std::string::npos);
  CHECK(d[0] == 7.0f);
}

TEST_CASE("unknown objectives are named with the known ones, options that cannot be too") {
  const auto objective = MakeObjective("ppo2", {});
  REQUIRE_FALSE(objective.ok());
  CHECK(std::string(objective.status().message()) ==
        "objective: expected one of grpo, ppo, reinforce, rloo, supervised, found 'ppo2'");
  CHECK(MakeObjective("grpo", {.dual_clip = 1.1}).status().message() ==
        "objective: dual_clip: expected 0 or at least 1 + clip_high, found 1.1");
  CHECK(!MakeObjective("grpo", {.clip_low = 1.5}).ok());
  CHECK(!MakeObjective("grpo", {.kl_coef = std::nan("")}).ok());
  CHECK(!MakeObjective("grpo", {.denominator = LossDenominator::kConstant}).ok());
  CHECK(!MakeObjective("grpo", {.importance_cap = -1}).ok());
  CHECK(!LossDenominatorByName("mean").ok());
  CHECK(!RatioLevelByName("word").ok());
}
}  // namespace
}  // namespace stretto::rl
