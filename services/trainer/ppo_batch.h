// What PPO makes of a batch before it is trained on: per-token advantages and returns from scores,
// log-probs and a critic's values, and the mini-batches of its epochs. The same on all ranks.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/training/micro_batch.h"
#include "engine/training/objective.h"
#include "rl/gae.h"
#include "rl/kl.h"
#include "rl/mini_batches.h"
#include "services/trainer/step_objective.h"

namespace stretto::services {
struct PpoBatchOptions {
  rl::GaeOptions gae;
  bool whiten_advantages = true;
  double kl_coef = 0;                                   // of the penalty in the tokens' rewards
  rl::KlEstimator kl_estimator = rl::KlEstimator::kK3;  // of the metric
};

// By group and completion; `values` by token, as the critic gave them before the first update.
struct PpoInputs {
  const engine::TrainBatch& batch;
  const std::vector<std::vector<double>>& scores;
  const std::vector<std::vector<std::vector<float>>>& values;
};
struct PpoBatch {
  BatchTargets targets;
  // value_mean, return_mean, return_std, explained_variance, and with a reference kl and
  // kl_penalty.
  std::map<std::string, double> metrics;
};
// InvalidArgument names the group and completion of a value or score that isn't finite.
absl::StatusOr<PpoBatch> MakePpoBatch(const PpoInputs& inputs, const PpoBatchOptions& options);

// Completions of each update, in the order of the batch; those without tokens are in none.
std::vector<std::vector<engine::CompletionRef>> PlanUpdates(const engine::TrainBatch& batch,
                                                            const rl::MiniBatchOptions& options);

struct MiniBatch {
  engine::TrainBatch batch;
  BatchTargets targets;
};
MiniBatch TakeMiniBatch(const engine::TrainBatch& batch, const BatchTargets& targets,
                        const std::vector<engine::CompletionRef>& completions);
}  // namespace stretto::services
