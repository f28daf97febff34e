// Objectives against tests/golden/trl_losses.json: TRL's own functions on random inputs.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "rl/advantages.h"
#include "rl/gae.h"
#include "rl/objective.h"
#include "rl/pairs.h"

namespace stretto::rl {
namespace {
using nlohmann::json;

const json& Golden() {
  static const auto* golden = [] {
    const auto text =
        Files::Real().ReadAll(absl::StrCat(STRETTO_SOURCE_DIR, "/tests/golden/trl_losses.json"));
    REQUIRE(text.ok());
    return new json(json::parse(*text));
  }();
  return *golden;
}

double OrZero(const json& value) { return value.is_null() ? 0.0 : double{value}; }

// The first `length` entries of a row.
template <class T = float>
std::vector<T> Row(const json& rows, size_t row, size_t length) {
  const std::vector<T> all = rows[row];
  return std::vector<T>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(length));
}

void CheckClose(absl::Span<const float> found, const json& row) {
  for (size_t t = 0; t < found.size(); ++t) {
    CHECK(found[t] == Approx(double{row[t]}).epsilon(2e-6).margin(1e-9));
  }
}

struct Batch {
  Batch(const json& lengths_json, const json& rows_json)
      : lengths(lengths_json.get<std::vector<size_t>>()), rows(rows_json) {
    totals.num_sequences = static_cast<int64_t>(lengths.size());
    for (const size_t length : lengths) totals.num_tokens += static_cast<int64_t>(length);
  }
  // Evaluates all rows, checks their gradients, and returns the sums.
  LossSums Evaluate(const Objective& objective, const json& grads, bool with_sampler) const {
    LossSums sums;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto logprobs = Row(rows["logp"], i, lengths[i]),
                 old = Row(rows["old_logp"], i, lengths[i]),
                 reference = Row(rows["ref_logp"], i, lengths[i]),
                 sampler = Row(rows["sampler_logp"], i, lengths[i]);
      SequenceInputs in{.logprobs_T = logprobs,
                        .behaviour_logprobs_T = with_sampler ? sampler : old,
                        .reference_logprobs_T = reference,
                        .entropies_T = {},
                        .proximal_logprobs_T = {},
                        .advantage = float{rows["advantage"][i]}};
      if (with_sampler) in.proximal_logprobs_T = old;
      std::vector<float> d(lengths[i], 9);
      sums.Merge(objective.Evaluate(in, totals, {absl::MakeSpan(d), {}}).value());
      CheckClose(d, grads[i]);
    }
    return sums;
  }
  std::vector<size_t> lengths;
  const json& rows;
  StepTotals totals;
};

TEST_CASE("grpo in all its forms is TRL's") {
  const std::map<std::string, LossDenominator> denominators = {
      {"grpo", LossDenominator::kSequenceMean},
      {"bnpo", LossDenominator::kTokenMean},
      {"dapo", LossDenominator::kTokenMean},
      {"dr_grpo", LossDenominator::kConstant}};
  int num_cases = 0;
  for (const json& group : Golden()["grpo"]) {
    const Batch batch(Golden()["lengths"], group["rows"]);
    for (const json& c : group["cases"]) {
      INFO(c["loss_type"] << " " << c["level"] << " case " << num_cases);
      ++num_cases;
      ObjectiveOptions options;
      options.clip_low = c["clip_low"];
      options.clip_high = c["clip_high"];
      options.dual_clip = OrZero(c["delta"]);
      options.kl_coef = c["beta"];
      options.importance_cap = OrZero(c["cap"]);
      options.ratio_level = RatioLevelByName(c["level"].get<std::string>()).value();
      options.denominator = denominators.at(c["loss_type"]);
      options.constant_length = Golden()["max_length"];
      const LossSums sums = batch.Evaluate(MakeObjective("grpo", options).value(), c["grad"],
                                           options.importance_cap > 0);
      CHECK(sums.loss == Approx(double{c["loss"]}).epsilon(1e-9));
      const auto metrics = sums.Metrics();
      if (!c["kl"].is_null()) CHECK(metrics.at("kl") == Approx(double{c["kl"]}).epsilon(1e-9));
      if (options.ratio_level == RatioLevel::kSequence) continue;  // TRL averages over rows there
      CHECK(metrics.at("clip_fraction_low") == Approx(double{c["clip_low_fraction"]}));
      CHECK(metrics.at("clip_fraction_high") == Approx(double{c["clip_high_fraction"]}));
    }
  }
  CHECK(num_cases == 24);
}

TEST_CASE("rloo is TRL's") {
  for (const json& c : Golden()["rloo"]) {
    const Batch batch(Golden()["lengths"], c["rows"]);
    const auto objective =
        MakeObjective("rloo", {.clip_low = c["clip_low"], .clip_high = c["clip_high"]});
    const LossSums sums = batch.Evaluate(objective.value(), c["grad"], false);
    // A row without tokens has the ratio 1 in TRL: its advantage counts in the value, without a
    // gradient. Here it has no part.
    double without_tokens = 0;
    for (size_t i = 0; i < batch.lengths.size(); ++i) {
      if (batch.lengths[i] == 0) without_tokens -= double{c["rows"]["advantage"][i]};
    }
    without_tokens /= static_cast<double>(batch.lengths.size());
    CHECK(sums.loss + without_tokens == Approx(double{c["loss"]}).epsilon(1e-6));
  }
}

TEST_CASE("dpo is TRL's") {
  for (const json& c : Golden()["dpo"]) {
    INFO(c["loss_type"] << " beta " << c["beta"]);
    const auto objective =
        MakePairObjective("dpo",
                          {.beta = c["beta"],
                           .loss = PreferenceLossByName(c["loss_type"].get<std::string>()).value(),
                           .label_smoothing = c["label_smoothing"],
                           .reference_free = c["reference_free"]})
            .value();
    const std::vector<double> chosen = c["chosen"], rejected = c["rejected"],
                              ref_chosen = c["ref_chosen"], ref_rejected = c["ref_rejected"];
    std::vector<double> d_chosen(chosen.size()), d_rejected(chosen.size());
    const PairSums sums = objective
                              .Evaluate({.chosen_P = chosen,
                                         .rejected_P = rejected,
                                         .reference_chosen_P = ref_chosen,
                                         .reference_rejected_P = ref_rejected},
                                        static_cast<int64_t>(chosen.size()),
                                        {absl::MakeSpan(d_chosen), absl::MakeSpan(d_rejected)})
                              .value();
    // TRL's inputs are these, rounded to float.
    CHECK(sums.loss == Approx(double{c["loss"]}).epsilon(1e-6));
    for (size_t p = 0; p < chosen.size(); ++p) {
      CHECK(d_chosen[p] == Approx(double{c["grad_chosen"][p]}).epsilon(1e-6).margin(1e-9));
      CHECK(d_rejected[p] == Approx(double{c["grad_rejected"][p]}).epsilon(1e-6).margin(1e-9));
    }
    if (c["reference_free"]) continue;  // TRL's rewards keep the reference
    CHECK(sums.Metrics().at("chosen_reward") == Approx(double{c["chosen_reward"]}).epsilon(1e-5));
    CHECK(sums.Metrics().at("rejected_reward") ==
          Approx(double{c["rejected_reward"]}).epsilon(1e-5));
  }
}

TEST_CASE("the reward model's loss is TRL's") {
  for (const json& c : Golden()["reward_model"]) {
    const auto objective =
        MakePairObjective("reward_model", {.center_coef = c["center_coef"]}).value();
    const std::vector<double> chosen = c["chosen"], rejected = c["rejected"],
                              margins = c["margins"];
    std::vector<double> d_chosen(chosen.size()), d_rejected(chosen.size());
    const PairSums sums =
        objective
            .Evaluate({.chosen_P = chosen, .rejected_P = rejected, .margins_P = margins},
                      static_cast<int64_t>(chosen.size()),
                      {absl::MakeSpan(d_chosen), absl::MakeSpan(d_rejected)})
            .value();
    CHECK(sums.loss == Approx(double{c["loss"]}).epsilon(1e-6));
    for (size_t p = 0; p < chosen.size(); ++p) {
      CHECK(d_chosen[p] == Approx(double{c["grad_chosen"][p]}).epsilon(1e-6).margin(1e-7));
      CHECK(d_rejected[p] == Approx(double{c["grad_rejected"][p]}).epsilon(1e-6).margin(1e-7));
    }
  }
}

// Rewards, advantages and returns of a golden PPO batch, sequence by sequence.
struct Experience {
  explicit Experience(const json& c) {
    const std::vector<size_t> lengths = c["lengths"];
    std::vector<double> all;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const size_t length = lengths[i];
      std::vector<double> reward(length), advantage(length), target(length);
      TokenRewards(double{c["score"][i]}, Row(c["old_logp"], i, length),
                   Row(c["ref_logp"], i, length), c["kl_coef"], absl::MakeSpan(reward));
      GeneralizedAdvantages({.gamma = c["gamma"], .lambda = c["lambda"]}, reward,
                            Row(c["old_value"], i, length), absl::MakeSpan(advantage),
                            absl::MakeSpan(target));
      all.insert(all.end(), advantage.begin(), advantage.end());
      rewards.push_back(reward);
      returns.emplace_back(target.begin(), target.end());
    }
    Whiten(true, absl::MakeSpan(all));
    auto next = all.begin();
    for (const size_t length : lengths) {
      advantages.emplace_back(next, next + static_cast<std::ptrdiff_t>(length));
      next += static_cast<std::ptrdiff_t>(length);
    }
  }
  std::vector<std::vector<double>> rewards;
  std::vector<std::vector<float>> advantages, returns;
};

TEST_CASE("ppo is TRL's, from scores to gradients") {
  for (const json& c : Golden()["ppo"]) {
    const std::vector<size_t> lengths = c["lengths"];
    const Experience experience(c);
    StepTotals totals;
    totals.num_sequences = static_cast<int64_t>(lengths.size());
    for (const size_t length : lengths) totals.num_tokens += static_cast<int64_t>(length);
    const auto objective = MakeObjective("ppo", {.clip_low = c["clip"],
                                                 .clip_high = c["clip"],
                                                 .value_coef = c["value_coef"],
                                                 .value_clip = c["value_clip"]})
                               .value();
    LossSums sums;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const size_t length = lengths[i];
      for (size_t t = 0; t < length; ++t) {
        CHECK(experience.rewards[i][t] ==
              Approx(double{c["reward"][i][t]}).epsilon(1e-6).margin(1e-6));
        CHECK(experience.advantages[i][t] ==
              Approx(double{c["advantage"][i][t]}).epsilon(1e-6).margin(1e-6));
        CHECK(experience.returns[i][t] ==
              Approx(double{c["return"][i][t]}).epsilon(1e-6).margin(1e-6));
      }
      const auto logprobs = Row(c["logp"], i, length), old = Row(c["old_logp"], i, length),
                 values = Row(c["value"], i, length), old_values = Row(c["old_value"], i, length);
      std::vector<float> d_logprobs(length), d_values(length);
      SequenceInputs in;
      in.logprobs_T = logprobs;
      in.behaviour_logprobs_T = old;
      in.advantages_T = experience.advantages[i];
      in.values_T = values;
      in.old_values_T = old_values;
      in.returns_T = experience.returns[i];
      sums.Merge(
          objective.Evaluate(in, totals, {absl::MakeSpan(d_logprobs), {}, absl::MakeSpan(d_values)})
              .value());
      CheckClose(d_logprobs, c["grad_logp"][i]);
      CheckClose(d_values, c["grad_value"][i]);
    }
    const auto metrics = sums.Metrics();
    CHECK(metrics.at("policy_loss") == Approx(double{c["policy_loss"]}).epsilon(1e-6));
    CHECK(metrics.at("value_loss") == Approx(double{c["value_loss"]}).epsilon(1e-6));
    CHECK(metrics.at("loss") ==
          Approx(double{c["policy_loss"]} + double{c["value_loss"]}).epsilon(1e-6));
    CHECK(metrics.at("clip_fraction") == Approx(double{c["clip_fraction"]}));
    CHECK(metrics.at("value_clip_fraction") == Approx(double{c["value_clip_fraction"]}));
  }
}

TEST_CASE("the adaptive KL controller is TRL's") {
  const json& c = Golden()["kl_controller"];
  const KlController controller{.target = c["target"], .horizon = c["horizon"]};
  double coef = c["start"];
  for (const json& step : c["steps"]) {
    coef = controller.Next(coef, step["measured"], step["rollouts"]);
    CHECK(coef == Approx(double{step["coef"]}).epsilon(1e-14));
  }
}
}  // namespace
}  // namespace stretto::rl
