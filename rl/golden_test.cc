// Objectives, KL estimators and advantages against tests/golden/losses.json (PyTorch autograd).
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/testing.h"
#include "rl/advantages.h"
#include "rl/objective.h"

namespace stretto::rl {
namespace {
using nlohmann::json;

const json& Golden() {
  static const auto* golden = [] {
    const auto text =
        Files::Real().ReadAll(absl::StrCat(STRETTO_SOURCE_DIR, "/tests/golden/losses.json"));
    REQUIRE(text.ok());
    return new json(json::parse(*text));
  }();
  return *golden;
}

// The unmasked tokens of one golden rollout, as this code holds them.
struct Rollout {
  explicit Rollout(const json& r) : advantage(r["advantage"]) {
    for (size_t t = 0; t < r["mask"].size(); ++t) {
      if (r["mask"][t] == 0) continue;
      kept.push_back(t);
      logprobs.push_back(r["logp"][t]);
      old.push_back(r["old_logp"][t]);
      reference.push_back(r["ref_logp"][t]);
      sampler.push_back(r["sampler_logp"][t]);
    }
  }
  std::vector<size_t> kept;
  std::vector<float> logprobs, old, reference, sampler;
  double advantage;
};

TEST_CASE("grpo has PyTorch's losses and gradients") {
  int num_checked = 0;
  for (const json& c : Golden()["grpo"]) {
    ++num_checked;
    const bool has_cap = !c["tis_cap"].is_null();
    const auto objective =
        MakeObjective("grpo",
                      {.clip_low = c["clip_low"],
                       .clip_high = c["clip_high"],
                       .kl_coef = c["beta"],
                       .denominator = LossDenominatorByName(std::string(c["reduction"])).value(),
                       .constant_length = c["max_length"],
                       .importance_cap = has_cap ? double{c["tis_cap"]} : 0.0})
            .value();
    std::vector<Rollout> rollouts;
    StepTotals totals;
    for (const json& r : c["rollouts"]) {
      rollouts.emplace_back(r);
      totals.num_tokens += static_cast<int64_t>(rollouts.back().kept.size());
      totals.num_sequences += 1;
    }
    LossSums sums;
    for (size_t i = 0; i < rollouts.size(); ++i) {
      const Rollout& r = rollouts[i];
      std::vector<float> d(r.kept.size());
      SequenceInputs in{r.logprobs, r.old, r.reference, {}, {}, r.advantage};
      if (has_cap) in.behaviour_logprobs_T = r.sampler, in.proximal_logprobs_T = r.old;
      sums.Merge(objective.Evaluate(in, totals, {absl::MakeSpan(d), {}}).value());
      for (size_t t = 0; t < d.size(); ++t) {
        CHECK(d[t] == Approx(double{c["grad_logp"][i][r.kept[t]]}).epsilon(2e-6).margin(1e-9));
      }
    }
    const auto metrics = sums.Metrics();
    CHECK(sums.loss == Approx(double{c["loss"]}).epsilon(1e-6));
    CHECK(metrics.at("kl") == Approx(double{c["mean_kl"]}).epsilon(1e-6));
    CHECK(metrics.at("clip_fraction_low") == Approx(double{c["clip_low_fraction"]}));
    CHECK(metrics.at("clip_fraction_high") == Approx(double{c["clip_high_fraction"]}));
  }
  CHECK(num_checked == 12);
}

TEST_CASE("advantages are PyTorch's") {
  for (const json& c : Golden()["advantages"]) {
    const std::vector<double> rewards = c["rewards"];
    std::vector<double> out(rewards.size());
    GroupAdvantages(rewards, AdvantageScale::kStd, absl::MakeSpan(out));
    for (size_t i = 0; i < out.size(); ++i) {
      CHECK(out[i] == Approx(double{c["normalized"][i]}).epsilon(1e-12).margin(1e-12));
    }
    GroupAdvantages(rewards, AdvantageScale::kNone, absl::MakeSpan(out));
    for (size_t i = 0; i < out.size(); ++i) {
      CHECK(out[i] == Approx(double{c["centred"][i]}).epsilon(1e-12).margin(1e-12));
    }
    GroupAdvantages(rewards, AdvantageScale::kLeaveOneOut, absl::MakeSpan(out));
    for (size_t i = 0; i < out.size(); ++i) {
      CHECK(out[i] == Approx(double{c["leave_one_out"][i]}).epsilon(1e-12).margin(1e-12));
    }
  }
}

TEST_CASE("KL estimators are PyTorch's") {
  const json& c = Golden()["kl"];
  for (const char* name : {"k1", "k2", "k3"}) {
    for (size_t t = 0; t < c["logp"].size(); ++t) {
      const KlTerm term =
          EstimateKl(KlEstimatorByName(name).value(), c["logp"][t], c["ref_logp"][t]);
      CHECK(term.value == Approx(double{c[name]["value"][t]}).epsilon(1e-12).margin(1e-14));
      CHECK(term.d_logprob == Approx(double{c[name]["grad"][t]}).epsilon(1e-12).margin(1e-14));
    }
  }
}
}  // namespace
}  // namespace stretto::rl
