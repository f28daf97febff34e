#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "base/philox.h"
#include "base/testing.h"
#include "rl/advantages.h"
#include "rl/kl.h"
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
      for (const auto scale : {AdvantageScale::kStd, AdvantageScale::kNone}) {
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
  CHECK(Advantages({}, AdvantageScale::kStd).empty());
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
}  // namespace
}  // namespace stretto::rl
