// What a step is reported with.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "services/coordinator/journal.h"

namespace stretto::services {
struct StepTiming {
  double step_seconds = 0;   // since the step (or evaluation) before
  double train_seconds = 0;  // of the trainer's call
};

// reward_mean, reward_std, reward_max, reward_NAME (means of the components), completion_length
// (mean, tokens), completion_length_max, length_fraction (ended by length), zero_signal_fraction
// (groups with equal rewards), staleness_mean, staleness_max, num_tokens, tokens_per_second,
// step_seconds, train_seconds, kl_coef; and `trainer`'s own metrics as they are. `base_version` is
// the version that the step started from.
std::map<std::string, double> StepMetrics(const std::vector<GroupRecord>& batch,
                                          int64_t base_version,
                                          const std::map<std::string, double>& trainer,
                                          const StepTiming& timing);

// The mean reward of the groups' first rollouts; nothing for no groups.
std::optional<double> EvalReward(const std::vector<GroupRecord>& groups);
// The share of the groups whose first rollout has the named reward at 1 or more; -1 for no groups.
double EvalScore(const std::vector<GroupRecord>& groups, const std::string& reward);
}  // namespace stretto::services
