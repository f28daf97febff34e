#include "services/coordinator/step_metrics.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "rl/staleness.h"

namespace stretto::services {
namespace {
// Sums over the rollouts of a batch, in batch order.
struct Sums {
  double num_rollouts = 0, num_tokens = 0, num_truncated = 0, num_flat_groups = 0;
  double reward = 0, reward_squares = 0, reward_max = -HUGE_VAL;
  double length_max = 0, staleness = 0, staleness_max = 0;
  std::map<std::string, double> components;

  void Add(const RolloutRecord& rollout, int64_t base_version) {
    num_rollouts += 1;
    const auto length = static_cast<double>(rollout.ids.size());
    num_tokens += length;
    length_max = std::max(length_max, length);
    num_truncated += rollout.finish_reason == "length" ? 1 : 0;
    reward += rollout.reward;
    reward_squares += rollout.reward * rollout.reward;
    reward_max = std::max(reward_max, rollout.reward);
    for (const auto& [name, value] : rollout.components) components[name] += value;
    const auto age = static_cast<double>(rl::Staleness(base_version, rollout.versions));
    staleness += age;
    staleness_max = std::max(staleness_max, age);
  }
};

bool IsFlat(const GroupRecord& group) {
  return std::all_of(group.rollouts.begin(), group.rollouts.end(), [&](const auto& rollout) {
    return rollout.reward == group.rollouts.front().reward;
  });
}
}  // namespace

std::map<std::string, double> StepMetrics(const std::vector<GroupRecord>& batch,
                                          int64_t base_version,
                                          const std::map<std::string, double>& trainer,
                                          const StepTiming& timing) {
  Sums sums;
  for (const GroupRecord& group : batch) {
    for (const RolloutRecord& rollout : group.rollouts) sums.Add(rollout, base_version);
    sums.num_flat_groups += IsFlat(group) ? 1 : 0;
  }
  std::map<std::string, double> metrics = trainer;
  metrics["step_seconds"] = timing.step_seconds;
  metrics["train_seconds"] = timing.train_seconds;
  if (sums.num_rollouts == 0) return metrics;
  const double n = sums.num_rollouts;
  const double mean = sums.reward / n;
  metrics["reward_mean"] = mean;
  metrics["reward_std"] = std::sqrt(std::max(0.0, sums.reward_squares / n - mean * mean));
  metrics["reward_max"] = sums.reward_max;
  for (const auto& [name, sum] : sums.components) metrics[absl::StrCat("reward_", name)] = sum / n;
  metrics["completion_length"] = sums.num_tokens / n;
  metrics["completion_length_max"] = sums.length_max;
  metrics["length_fraction"] = sums.num_truncated / n;
  metrics["zero_signal_fraction"] = sums.num_flat_groups / static_cast<double>(batch.size());
  metrics["staleness_mean"] = sums.staleness / n;
  metrics["staleness_max"] = sums.staleness_max;
  metrics["num_tokens"] = sums.num_tokens;
  if (timing.step_seconds > 0) metrics["tokens_per_second"] = sums.num_tokens / timing.step_seconds;
  return metrics;
}

std::optional<double> EvalReward(const std::vector<GroupRecord>& groups) {
  double sum = 0;
  int64_t count = 0;
  for (const GroupRecord& group : groups) {
    if (group.rollouts.empty()) continue;
    sum += group.rollouts.front().reward;
    ++count;
  }
  if (count == 0) return std::nullopt;
  return sum / static_cast<double>(count);
}

double EvalScore(const std::vector<GroupRecord>& groups, const std::string& reward) {
  if (groups.empty()) return -1;
  double num_correct = 0;
  for (const GroupRecord& group : groups) {
    if (group.rollouts.empty()) continue;
    const auto& components = group.rollouts.front().components;
    const auto it = components.find(reward);
    if (it != components.end() && it->second >= 1) num_correct += 1;
  }
  return num_correct / static_cast<double>(groups.size());
}
}  // namespace stretto::services
