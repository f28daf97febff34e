#include "rl/objective.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "rl/terms.h"

namespace stretto::rl {
namespace {
using Factory = std::unique_ptr<Objective> (*)(const ObjectiveOptions&);
const std::map<std::string, Factory>& Registry() {
  static const auto* registry = new std::map<std::string, Factory>{
      {"grpo", MakeGrpo}, {"reinforce", MakeReinforce}, {"supervised", MakeSupervised}};
  return *registry;
}
}  // namespace

absl::StatusOr<LossDenominator> LossDenominatorByName(absl::string_view name) {
  if (name == "token_mean") return LossDenominator::kTokenMean;
  if (name == "sequence_mean") return LossDenominator::kSequenceMean;
  return absl::InvalidArgumentError(absl::StrCat(
      "loss denominator: expected one of token_mean, sequence_mean, found '", name, "'"));
}

void LossSums::Merge(const LossSums& other) {
  loss += other.loss;
  policy_loss += other.policy_loss;
  kl += other.kl;
  entropy += other.entropy;
  ratio += other.ratio;
  importance_weight += other.importance_weight;
  ratio_min = std::min(ratio_min, other.ratio_min);
  ratio_max = std::max(ratio_max, other.ratio_max);
  num_tokens += other.num_tokens;
  num_clipped_low += other.num_clipped_low;
  num_clipped_high += other.num_clipped_high;
  num_truncated += other.num_truncated;
  has_kl |= other.has_kl;
  has_entropy |= other.has_entropy;
  has_importance |= other.has_importance;
}

std::map<std::string, double> LossSums::Metrics() const {
  const double count = static_cast<double>(std::max<int64_t>(num_tokens, 1));
  const double low = static_cast<double>(num_clipped_low) / count;
  const double high = static_cast<double>(num_clipped_high) / count;
  std::map<std::string, double> metrics = {
      {"loss", loss},
      {"policy_loss", policy_loss},
      {"ratio_mean", ratio / count},
      {"ratio_min", ratio_min},
      {"ratio_max", ratio_max},
      {"clip_fraction", low + high},
      {"clip_fraction_low", low},
      {"clip_fraction_high", high},
  };
  if (has_kl) metrics["kl"] = kl / count;
  if (has_entropy) metrics["entropy"] = entropy / count;
  if (has_importance) {
    metrics["importance_weight_mean"] = importance_weight / count;
    metrics["truncated_fraction"] = static_cast<double>(num_truncated) / count;
  }
  return metrics;
}

absl::StatusOr<std::unique_ptr<Objective>> MakeObjective(const std::string& name,
                                                         const ObjectiveOptions& options) {
  const auto it = Registry().find(name);
  if (it == Registry().end()) {
    return absl::InvalidArgumentError(absl::StrCat("objective: expected one of ",
                                                   absl::StrJoin(ObjectiveNames(), ", "),
                                                   ", found '", name, "'"));
  }
  return it->second(options);
}

std::vector<std::string> ObjectiveNames() {
  std::vector<std::string> names;
  for (const auto& entry : Registry()) names.push_back(entry.first);
  return names;
}
}  // namespace stretto::rl
