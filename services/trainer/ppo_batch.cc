#include "services/trainer/ppo_batch.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "rl/advantages.h"

namespace stretto::services {
namespace {
// Mean and variance of what has been added, over all of it.
class Moments {
 public:
  void Add(double value) {
    values_.push_back(value);
    sum_ += value;
  }
  double mean() const { return values_.empty() ? 0 : sum_ / static_cast<double>(values_.size()); }
  double variance() const {
    double sum = 0;
    for (const double value : values_) sum += (value - mean()) * (value - mean());
    return values_.empty() ? 0 : sum / static_cast<double>(values_.size());
  }

 private:
  std::vector<double> values_;
  double sum_ = 0;
};

// What a step's tokens come to for its metrics.
struct Tally {
  Moments values, returns, errors, penalties, kl;

  std::map<std::string, double> Metrics(bool has_reference) const {
    const double variance = returns.variance();
    std::map<std::string, double> metrics = {
        {"value_mean", values.mean()},
        {"return_mean", returns.mean()},
        {"return_std", std::sqrt(variance)},
        // Of returns that are all the same there is nothing to explain.
        {"explained_variance", variance > 0 ? 1 - errors.variance() / variance : 0.0}};
    if (has_reference) {
      metrics["kl"] = kl.mean();
      metrics["kl_penalty"] = penalties.mean();
    }
    return metrics;
  }
};

absl::Status CheckCompletion(const engine::TrainCompletion& completion, double score,
                             absl::Span<const float> values) {
  if (!std::isfinite(score)) return absl::InvalidArgumentError("its score is not finite");
  if (completion.behaviour_logprobs.size() != completion.ids.size()) {
    return absl::InvalidArgumentError("ppo needs the generator's log-prob of every token");
  }
  for (size_t t = 0; t < values.size(); ++t) {
    if (std::isfinite(values[t])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token ", t, ": the critic's value ", values[t], " is not finite"));
  }
  return absl::OkStatus();
}

// One completion's advantages and returns, in double; counted.
struct Estimates {
  std::vector<double> advantages, returns;
};
Estimates Estimate(const engine::TrainCompletion& completion, double score,
                   absl::Span<const float> values, const PpoBatchOptions& options, Tally& tally) {
  const size_t num_tokens = completion.ids.size();
  std::vector<double> rewards(num_tokens);
  Estimates e{std::vector<double>(num_tokens), std::vector<double>(num_tokens)};
  rl::TokenRewards(score, completion.behaviour_logprobs, completion.reference_logprobs,
                   options.kl_coef, absl::MakeSpan(rewards));
  rl::GeneralizedAdvantages(options.gae, rewards, values, absl::MakeSpan(e.advantages),
                            absl::MakeSpan(e.returns));
  for (size_t t = 0; t < num_tokens; ++t) {
    tally.values.Add(values[t]);
    tally.returns.Add(e.returns[t]);
    tally.errors.Add(e.returns[t] - values[t]);
    if (completion.reference_logprobs.empty()) continue;
    tally.penalties.Add(rewards[t] - (t + 1 == num_tokens ? score : 0.0));
    tally.kl.Add(rl::EstimateKl(options.kl_estimator, completion.behaviour_logprobs[t],
                                completion.reference_logprobs[t])
                     .value);
  }
  return e;
}
}  // namespace

absl::StatusOr<PpoBatch> MakePpoBatch(const PpoInputs& inputs, const PpoBatchOptions& options) {
  PpoBatch out;
  Tally tally;
  std::vector<double> advantages;  // of the whole batch, in its order
  bool has_reference = false;
  for (size_t g = 0; g < inputs.batch.groups.size(); ++g) {
    const engine::TrainGroup& group = inputs.batch.groups[g];
    out.targets.emplace_back();
    for (size_t c = 0; c < group.completions.size(); ++c) {
      const std::vector<float>& values = inputs.values[g][c];
      RETURN_IF_ERROR(Annotate(CheckCompletion(group.completions[c], inputs.scores[g][c], values),
                               absl::StrCat("group ", g, ", completion ", c)));
      const Estimates e =
          Estimate(group.completions[c], inputs.scores[g][c], values, options, tally);
      advantages.insert(advantages.end(), e.advantages.begin(), e.advantages.end());
      TokenTargets& targets = out.targets.back().emplace_back();
      targets.old_values = values;
      targets.returns.assign(e.returns.begin(), e.returns.end());
      has_reference |= !group.completions[c].reference_logprobs.empty();
    }
  }
  if (options.whiten_advantages) rl::Whiten(/*shift_mean=*/true, absl::MakeSpan(advantages));
  auto next = advantages.begin();
  for (auto& group : out.targets) {
    for (TokenTargets& targets : group) {
      const auto end = next + static_cast<std::ptrdiff_t>(targets.returns.size());
      targets.advantages.assign(next, end);
      next = end;
    }
  }
  out.metrics = tally.Metrics(has_reference);
  return out;
}

std::vector<std::vector<engine::CompletionRef>> PlanUpdates(const engine::TrainBatch& batch,
                                                            const rl::MiniBatchOptions& options) {
  std::vector<engine::CompletionRef> all;
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    for (size_t c = 0; c < batch.groups[g].completions.size(); ++c) {
      if (batch.groups[g].completions[c].ids.empty()) continue;
      all.push_back({static_cast<int64_t>(g), static_cast<int64_t>(c)});
    }
  }
  std::vector<std::vector<engine::CompletionRef>> updates;
  for (std::vector<int64_t> indices :
       rl::PlanMiniBatches(static_cast<int64_t>(all.size()), options)) {
    std::sort(indices.begin(), indices.end());  // completions of a prompt share its computation
    updates.emplace_back();
    for (const int64_t i : indices) updates.back().push_back(all[i]);
  }
  return updates;
}

MiniBatch TakeMiniBatch(const engine::TrainBatch& batch, const BatchTargets& targets,
                        const std::vector<engine::CompletionRef>& completions) {
  MiniBatch out;
  int64_t group = -1;
  for (const engine::CompletionRef& ref : completions) {
    STRETTO_CHECK(ref.group >= group);
    if (ref.group != group) {
      group = ref.group;
      out.batch.groups.emplace_back().prompt_ids = batch.groups[group].prompt_ids;
      out.targets.emplace_back();
    }
    out.batch.groups.back().completions.push_back(batch.groups[group].completions[ref.completion]);
    out.targets.back().push_back(targets[group][ref.completion]);
  }
  return out;
}
}  // namespace stretto::services
