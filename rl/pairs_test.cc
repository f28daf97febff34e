#include "rl/pairs.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/philox.h"
#include "base/testing.h"

namespace stretto::rl {
namespace {
struct Pairs {
  explicit Pairs(PhiloxStream& random, double scale = 3) {
    const size_t num_pairs = 1 + random.Below(5);
    for (auto* values : {&chosen, &rejected, &ref_chosen, &ref_rejected, &margins}) {
      for (size_t p = 0; p < num_pairs; ++p) values->push_back(scale * random.NextGaussian());
    }
  }
  PairInputs Inputs() const {
    return {.chosen_P = chosen,
            .rejected_P = rejected,
            .reference_chosen_P = ref_chosen,
            .reference_rejected_P = ref_rejected,
            .margins_P = margins,
            .first_id = 40};
  }
  std::vector<double> chosen, rejected, ref_chosen, ref_rejected, margins;
};

struct Result {
  PairSums sums;
  std::vector<double> d_chosen, d_rejected;
};

Result Run(const PairObjective& objective, const Pairs& pairs) {
  Result result;
  result.d_chosen.assign(pairs.chosen.size(), 9);
  result.d_rejected.assign(pairs.chosen.size(), 9);
  const auto sums = objective.Evaluate(
      pairs.Inputs(), 7, {absl::MakeSpan(result.d_chosen), absl::MakeSpan(result.d_rejected)});
  REQUIRE_OK(sums);
  result.sums = *sums;
  return result;
}

TEST_CASE("gradients of objectives on pairs are the derivatives of their losses") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  for (int trial = 0; trial < 40; ++trial) {
    const PairOptions options{.beta = 0.05 + random.NextDouble(),
                              .loss = static_cast<PreferenceLoss>(random.Below(2)),
                              .label_smoothing = 0.4 * random.NextDouble(),
                              .reference_free = random.Below(2) == 0,
                              .center_coef = random.NextDouble()};
    for (const auto& name : PairObjectiveNames()) {
      INFO(name << " trial " << trial);
      const auto objective = MakePairObjective(name, options).value();
      Pairs pairs(random);
      const Result result = Run(objective, pairs);
      for (size_t p = 0; p < pairs.chosen.size(); ++p) {
        const auto derivative = [&](std::vector<double>& values) {
          const double saved = values[p], h = 1e-5;
          values[p] = saved + h;
          const double above = Run(objective, pairs).sums.loss;
          values[p] = saved - h;
          const double below = Run(objective, pairs).sums.loss;
          values[p] = saved;
          return (above - below) / (2 * h);
        };
        CHECK(result.d_chosen[p] == Approx(derivative(pairs.chosen)).epsilon(1e-5).margin(1e-8));
        CHECK(result.d_rejected[p] ==
              Approx(derivative(pairs.rejected)).epsilon(1e-5).margin(1e-8));
      }
    }
  }
}

TEST_CASE("pairs one by one give the bits of pairs at once") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed(), 1);
  const Pairs pairs(random);
  for (const auto& name : PairObjectiveNames()) {
    const auto objective = MakePairObjective(name, {}).value();
    const Result at_once = Run(objective, pairs);
    PairSums sums;
    const PairInputs in = pairs.Inputs();
    for (size_t p = 0; p < pairs.chosen.size(); ++p) {
      double d_chosen = 0, d_rejected = 0;
      sums.Merge(objective
                     .Evaluate({.chosen_P = in.chosen_P.subspan(p, 1),
                                .rejected_P = in.rejected_P.subspan(p, 1),
                                .reference_chosen_P = in.reference_chosen_P.subspan(p, 1),
                                .reference_rejected_P = in.reference_rejected_P.subspan(p, 1),
                                .margins_P = in.margins_P.subspan(p, 1)},
                               7, {absl::MakeSpan(&d_chosen, 1), absl::MakeSpan(&d_rejected, 1)})
                     .value());
      CHECK(d_chosen == at_once.d_chosen[p]);
      CHECK(d_rejected == at_once.d_rejected[p]);
    }
    CHECK(sums.Metrics() == at_once.sums.Metrics());
  }
}

TEST_CASE("dpo by hand") {
  // At the reference the loss is log 2, and accuracy 0: neither is above the other.
  const std::vector<double> chosen = {-3}, rejected = {-5};
  std::vector<double> d_chosen(1), d_rejected(1);
  const auto evaluate = [&](const PairOptions& options) {
    return MakePairObjective("dpo", options)
        .value()
        .Evaluate({.chosen_P = chosen,
                   .rejected_P = rejected,
                   .reference_chosen_P = chosen,
                   .reference_rejected_P = rejected},
                  1, {absl::MakeSpan(d_chosen), absl::MakeSpan(d_rejected)})
        .value();
  };
  CHECK(evaluate({}).loss == Approx(std::log(2.0)));
  CHECK(evaluate({}).num_right == 0);
  CHECK(d_chosen[0] == Approx(-0.05));
  CHECK(d_rejected[0] == Approx(0.05));
  // Without the reference chosen leads by 2.
  CHECK(evaluate({.beta = 0.5, .reference_free = true}).loss ==
        Approx(std::log(1 + std::exp(-1.0))));
  CHECK(evaluate({.beta = 0.5, .reference_free = true}).num_right == 1);
  CHECK(evaluate({.beta = 0.25, .loss = PreferenceLoss::kIpo, .reference_free = true}).loss == 0);
  CHECK(d_chosen[0] == 0);
}

TEST_CASE("a margin moves where a reward model is content, centring pulls to zero") {
  const std::vector<double> chosen = {2}, rejected = {1}, margins = {1};
  std::vector<double> d_chosen(1), d_rejected(1);
  const auto evaluate = [&](double center_coef) {
    return MakePairObjective("reward_model", {.center_coef = center_coef})
        .value()
        .Evaluate({.chosen_P = chosen, .rejected_P = rejected, .margins_P = margins}, 1,
                  {absl::MakeSpan(d_chosen), absl::MakeSpan(d_rejected)})
        .value()
        .loss;
  };
  CHECK(evaluate(0) == Approx(std::log(2.0)));
  CHECK(d_chosen[0] == -0.5);
  CHECK(evaluate(0.1) == Approx(std::log(2.0) + 0.9));
  CHECK(d_chosen[0] == Approx(-0.5 + 0.6));
  CHECK(d_rejected[0] == Approx(0.5 + 0.6));
}

TEST_CASE("pairs far apart stay finite; what is not finite is refused by name") {
  for (const auto& name : PairObjectiveNames()) {
    const auto objective = MakePairObjective(name, {.beta = 1}).value();
    std::vector<double> d_chosen(2, 9), d_rejected(2, 9);
    const PairGradients out{absl::MakeSpan(d_chosen), absl::MakeSpan(d_rejected)};
    const std::vector<double> high = {1e5, 1e5}, low = {-1e5, -1e5}, zero = {0, 0};
    const auto evaluate = [&](const std::vector<double>& chosen,
                              const std::vector<double>& rejected) {
      return objective.Evaluate({.chosen_P = chosen,
                                 .rejected_P = rejected,
                                 .reference_chosen_P = zero,
                                 .reference_rejected_P = zero,
                                 .first_id = 40},
                                2, out);
    };
    CHECK(evaluate(high, low).value().loss == 0);
    CHECK(d_chosen[0] == 0);
    CHECK(evaluate(low, high).value().loss == Approx(2e5));
    CHECK(d_chosen[0] == -0.5);
    d_chosen = {9, 9};
    const auto refused = evaluate({1, std::numeric_limits<double>::infinity()}, low);
    CHECK(absl::IsInvalidArgument(refused.status()));
    CHECK(refused.status().message() == "pair 41: chosen: expected a finite number, found inf");
    CHECK(d_chosen[0] == 9);
    CHECK(!evaluate(low, {std::nan(""), 0}).ok());
  }
}

TEST_CASE("no pairs, no reference, options that cannot be") {
  const auto dpo = MakePairObjective("dpo", {}).value();
  CHECK(dpo.Evaluate({}, 0, {}).value().num_pairs == 0);
  const std::vector<double> one = {-1};
  double d_chosen = 0, d_rejected = 0;
  const PairGradients out{absl::MakeSpan(&d_chosen, 1), absl::MakeSpan(&d_rejected, 1)};
  CHECK(dpo.Evaluate({.chosen_P = one, .rejected_P = one, .first_id = 3}, 1, out)
            .status()
            .message() == "pair 3: expected the reference's log-probs");
  CHECK(MakePairObjective("kto", {}).status().message() ==
        "objective on pairs: expected one of dpo, reward_model, found 'kto'");
  CHECK(!MakePairObjective("dpo", {.beta = 0}).ok());
  CHECK(!MakePairObjective("dpo", {.beta = std::nan("")}).ok());
  CHECK(!MakePairObjective("dpo", {.label_smoothing = 0.5}).ok());
  CHECK(!MakePairObjective("reward_model", {.center_coef = -1}).ok());
  CHECK(!PreferenceLossByName("hinge").ok());
}

TEST_CASE("dpo compares sums of log-probs, ipo means") {
  const std::vector<float> logprobs = {-1, -2, -6};
  CHECK(ScoreSequence(PreferenceLoss::kSigmoid, logprobs).value == -9);
  CHECK(ScoreSequence(PreferenceLoss::kSigmoid, logprobs).d_logprob == 1);
  CHECK(ScoreSequence(PreferenceLoss::kIpo, logprobs).value == Approx(-3));
  CHECK(ScoreSequence(PreferenceLoss::kIpo, logprobs).d_logprob == Approx(1.0 / 3));
  CHECK(ScoreSequence(PreferenceLoss::kIpo, {}).value == 0);
}
}  // namespace
}  // namespace stretto::rl
