#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "base/philox.h"
#include "base/testing.h"
#include "rl/advantages.h"
#include "rl/gae.h"
#include "rl/kl.h"
#include "rl/mini_batches.h"
#include "rl/spikes.h"
#include "rl/staleness.h"

namespace stretto::rl {
namespace {
std::vector<double> Advantages(std::vector<double> rewards, AdvantageScale scale) {
  std::vector<double> out(rewards.size(), -7);
  GroupAdvantages(rewards, scale, absl::MakeSpan(out));
  return out;
}

TEST_CASE("advantages of equal rewards are exactly zero") {
  for (const double r : {0.0, 1.0, 0.1, 1e300, -3.3}) {
    for (const size_t n : {2, 3, 7}) {
      for (const auto scale :
           {AdvantageScale::kStd, AdvantageScale::kNone, AdvantageScale::kLeaveOneOut}) {
        for (const double a : Advantages(std::vector<double>(n, r), scale)) CHECK(a == 0.0);
      }
    }
  }
}

TEST_CASE("advantages by hand") {
  // mean 0.25, deviations −.25 .75 −.25 −.25, sample variance 0.75/3.
  const auto scaled = Advantages({0, 1, 0, 0}, AdvantageScale::kStd);
  CHECK(scaled[1] == Approx(0.75 / (0.5 + 1e-4)).epsilon(1e-14));
  CHECK(scaled[0] == Approx(-0.25 / (0.5 + 1e-4)).epsilon(1e-14));
  CHECK(Advantages({0, 1, 0, 0}, AdvantageScale::kNone) ==
        std::vector<double>{-0.25, 0.75, -0.25, -0.25});
  CHECK(Advantages({0.7}, AdvantageScale::kStd) == std::vector<double>{0.7});
  CHECK(Advantages({0, 1, 0, 0}, AdvantageScale::kLeaveOneOut)[1] == Approx(1));
  CHECK(Advantages({0, 1, 0, 0}, AdvantageScale::kLeaveOneOut)[0] == Approx(-1.0 / 3));
  CHECK(Advantages({0.7}, AdvantageScale::kLeaveOneOut) == std::vector<double>{0.7});
  CHECK(Advantages({}, AdvantageScale::kStd).empty());
  CHECK(AdvantageScaleByName("leave_one_out").value() == AdvantageScale::kLeaveOneOut);
  CHECK_FALSE(AdvantageScaleByName("batch").ok());
}

TEST_CASE("whitened values have mean 0 and variance 1") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed(), 1);
  std::vector<double> values(50);
  double mean = 0;
  for (double& v : values) v = 5 + 3 * random.NextGaussian(), mean += v / 50;
  for (const bool shift_mean : {true, false}) {
    std::vector<double> white = values;
    Whiten(shift_mean, absl::MakeSpan(white));
    double sum = 0, squares = 0;
    for (const double v : white) sum += v;
    for (const double v : white) squares += (v - sum / 50) * (v - sum / 50);
    CHECK(sum / 50 == Approx(shift_mean ? 0 : mean).margin(1e-12));
    CHECK(squares / 49 == Approx(1).epsilon(1e-6));
  }
  std::vector<double> equal = {0.1, 0.1, 0.1}, kept = {0.1, 0.1}, single = {7};
  Whiten(true, absl::MakeSpan(equal));
  CHECK(equal == std::vector<double>{0, 0, 0});
  Whiten(false, absl::MakeSpan(kept));
  CHECK(kept == std::vector<double>{0.1, 0.1});
  Whiten(true, absl::MakeSpan(single));
  CHECK(single == std::vector<double>{0});
  Whiten(true, {});
}

TEST_CASE("the scale of a batch makes its advantages of unit size") {
  CHECK(BatchScale({3, -3, 3, -3}) == Approx(3));
  CHECK(BatchScale({0, 0, 2, -2}) == Approx(std::sqrt(2.0)));
  CHECK(BatchScale({0, 0}) == 1);
  CHECK(BatchScale({}) == 1);
}

TEST_CASE("generalised advantages by hand") {
  const std::vector<float> logprobs = {-1, -2, -3}, reference = {-1.5f, -2, -2.5f};
  std::vector<double> rewards(3), advantages(3), returns(3);
  TokenRewards(10, logprobs, reference, 0.1, absl::MakeSpan(rewards));
  CHECK(rewards[0] == Approx(-0.05));
  CHECK(rewards[1] == Approx(0));
  CHECK(rewards[2] == Approx(10.05));
  TokenRewards(10, logprobs, {}, 0.1, absl::MakeSpan(rewards));
  CHECK(rewards[2] == 10);
  const std::vector<float> values = {1, 2, 4};
  GeneralizedAdvantages({.gamma = 0.5, .lambda = 0.5}, rewards, values, absl::MakeSpan(advantages),
                        absl::MakeSpan(returns));
  // deltas 0 + 1 − 1, 0 + 2 − 2, 10 − 4
  CHECK(advantages == std::vector<double>{0.375, 1.5, 6});
  CHECK(returns == std::vector<double>{1.375, 3.5, 10});
  // With λ = 1 and γ = 1 the return is the score, whatever the critic thinks.
  GeneralizedAdvantages({.gamma = 1, .lambda = 1}, rewards, values, absl::MakeSpan(advantages),
                        absl::MakeSpan(returns));
  CHECK(returns == std::vector<double>{10, 10, 10});
  TokenRewards(1, {}, {}, 0.1, {});
  GeneralizedAdvantages({}, {}, {}, {}, {});
}

TEST_CASE("each epoch has every sequence once, and plans repeat") {
  const MiniBatchOptions options{.num_epochs = 3, .size = 4, .seed = 9, .step = 2};
  const auto plan = PlanMiniBatches(10, options);
  REQUIRE(plan.size() == 9);
  std::vector<std::vector<int64_t>> orders(3);
  for (size_t i = 0; i < plan.size(); ++i) {
    CHECK(plan[i].size() == (i % 3 == 2 ? 2 : 4));
    orders[i / 3].insert(orders[i / 3].end(), plan[i].begin(), plan[i].end());
  }
  CHECK(orders[0] != orders[1]);
  for (auto& order : orders) {
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < 10; ++i) CHECK(order[static_cast<size_t>(i)] == i);
  }
  CHECK(plan == PlanMiniBatches(10, options));
  CHECK(plan != PlanMiniBatches(10, {.num_epochs = 3, .size = 4, .seed = 9, .step = 3}));
  CHECK(PlanMiniBatches(0, options).empty());
}

TEST_CASE("advantages sum to zero and order as the rewards do") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> rewards(2 + random.Below(15));
    for (double& r : rewards) r = random.NextGaussian();
    const auto a = Advantages(rewards, AdvantageScale::kStd);
    double sum = 0;
    for (const double v : a) sum += v;
    CHECK(std::abs(sum) < 1e-10);
    for (size_t i = 1; i < a.size(); ++i) CHECK((rewards[i] > rewards[0]) == (a[i] > a[0]));
  }
}

TEST_CASE("KL estimators and their derivatives") {
  for (const auto estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    const KlTerm at_zero = EstimateKl(estimator, -1.5, -1.5);
    CHECK(at_zero.value == 0);
    if (estimator != KlEstimator::kK1) CHECK(at_zero.d_logprob == 0);
    for (const double reference : {-0.1, -1.0, -4.0}) {
      const double h = 1e-5;
      const double numeric = (EstimateKl(estimator, -2 + h, reference).value -
                              EstimateKl(estimator, -2 - h, reference).value) /
                             (2 * h);
      CHECK(EstimateKl(estimator, -2, reference).d_logprob == Approx(numeric).epsilon(1e-6));
    }
  }
  CHECK(EstimateKl(KlEstimator::kK1, -1, -3).value == 2);
  CHECK(EstimateKl(KlEstimator::kK2, -1, -3).value == 2);
  CHECK(EstimateKl(KlEstimator::kK3, -1, -3).value == Approx(std::exp(-2) - 1 + 2));
  const KlTerm far = EstimateKl(KlEstimator::kK3, -1000, 0);
  CHECK(std::isfinite(far.value));
  CHECK(far.d_logprob == 0);
  CHECK(std::isnan(EstimateKl(KlEstimator::kK3, std::nan(""), 0).value));
  CHECK(KlEstimatorByName("k2").value() == KlEstimator::kK2);
  CHECK_FALSE(KlEstimatorByName("k4").ok());
}

TEST_CASE("the KL controller pulls towards its target, by bounded steps") {
  const KlController controller{.target = 6, .horizon = 10000};
  CHECK(controller.Next(0.2, 6, 64) == 0.2);
  CHECK(controller.Next(0.2, 6.6, 100) == Approx(0.2 * (1 + 0.1 * 100 / 10000)));
  CHECK(controller.Next(0.2, 600, 100) == Approx(0.2 * (1 + 0.2 * 100 / 10000)));
  CHECK(controller.Next(0.2, 0, 100) == Approx(0.2 * (1 - 0.2 * 100 / 10000)));
  CHECK(controller.Next(0.2, std::nan(""), 100) == 0.2);
  CHECK(KlController{.target = 0}.Next(0.1, 50, 100) == 0.1);
}

TEST_CASE("staleness goes by the oldest token") {
  const std::vector<int64_t> versions = {5, 4, 6};
  CHECK(Staleness(6, versions) == 2);
  CHECK(Staleness(6, {}) == 0);
  CHECK(WithinStaleness(6, 4, 2));
  CHECK_FALSE(WithinStaleness(6, 4, 1));
  CHECK(WithinStaleness(6, 6, 0));
}
TEST_CASE("a spike is judged by the median of the newest steps") {
  std::vector<double> norms(kSpikeMinSteps - 1, 2.0);
  CHECK(std::isinf(SpikeThreshold(norms, 10)));  // too few
  norms.push_back(1000);
  CHECK(SpikeThreshold(norms, 10) == 20);  // one outlier doesn't move it
  CHECK(std::isinf(SpikeThreshold(norms, 0)));
  norms.insert(norms.end(), kSpikeWindow, 3.0);  // older ones are forgotten
  CHECK(SpikeThreshold(norms, 2) == 6);
  CHECK(SpikeThreshold(std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8}, 1) == 4.5);
}
}  // namespace
}  // namespace stretto::rl
