// A step by PPO: the critic's values of the batch, advantages and returns from them, and then
// epochs of mini-batches, each of which updates the critic and the policy. Every rank of a group
// does the same, in the same order.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"
#include "engine/formats/model_files.h"
#include "engine/training/critic.h"
#include "services/trainer/policy_trainer.h"

namespace stretto::services {
// What the updates of one step add up to.
struct PolicyTrainer::PpoUpdates {
  engine::StepResult policy, critic;
  rl::LossSums policy_sums, critic_sums;
  int64_t num_policy = 0, num_critic = 0;  // that changed something
  int64_t num_skipped = 0;
  absl::Status refused;
  absl::optional<Mismatch> mismatch;
  TokenGradients gradients;
};

namespace {
// Adds one update to those of its step; norms are taken of those that count.
void Add(const engine::StepResult& update, engine::StepResult& all) {
  all.version = update.version;
  all.loss += update.loss;
  if (!update.skipped) all.grad_norm += update.grad_norm;
  all.lr = update.lr;
  all.entropy += update.entropy * static_cast<double>(update.num_trained_tokens);
  if (!(update.logprob_mismatch_max <= all.logprob_mismatch_max)) {  // a NaN is kept
    all.logprob_mismatch_max = update.logprob_mismatch_max;
  }
  all.logprob_mismatch_sum += update.logprob_mismatch_sum;
  all.num_compared_tokens += update.num_compared_tokens;
  all.num_trained_tokens += update.num_trained_tokens;
  all.num_computed_tokens += update.num_computed_tokens;
  all.num_backward_tokens += update.num_backward_tokens;
  all.num_backward_targets += update.num_backward_targets;
  all.num_micro_batches += update.num_micro_batches;
  if (update.skipped && all.skip_reason.empty()) all.skip_reason = update.skip_reason;
  all.forward_seconds += update.forward_seconds;
  all.objective_seconds += update.objective_seconds;
  all.backward_seconds += update.backward_seconds;
  all.optimizer_seconds += update.optimizer_seconds;
}

double Mean(double sum, int64_t count) {
  return sum / static_cast<double>(std::max<int64_t>(1, count));
}
}  // namespace

absl::Status PolicyTrainer::CreateCritic(engine::TrainerOptions options) {
  engine::ModelConfig config = host_->files.config;
  if (!run_.ppo.critic_model.empty()) {
    ASSIGN_OR_RETURN(const engine::ModelFiles files,
                     engine::OpenModelOfAnyHead(run_.ppo.critic_model));
    if (files.config.vocab_size != config.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("ppo.critic_model: ", run_.ppo.critic_model, " has a vocabulary of ",
                       files.config.vocab_size, " tokens, the policy one of ", config.vocab_size,
                       ": they must have the same tokenizer"));
    }
    config = files.config;
  }
  if (run_.ppo.critic_lr > 0) options.schedule.lr = run_.ppo.critic_lr;
  if (!options.storage.offload_folder.empty()) {
    options.storage.offload_folder = JoinPath(options.storage.offload_folder, "critic");
  }
  ASSIGN_OR_RETURN(
      critic_, engine::TrainerEngine::Create(*host_->device, engine::WithValueHead(config), options,
                                             Clock::Real(), group_.get()));
  return absl::OkStatus();
}

absl::Status PolicyTrainer::LoadCritic() {
  std::shared_ptr<const engine::TensorSource> start = host_->files.tensors;
  if (!run_.ppo.critic_model.empty()) {
    ASSIGN_OR_RETURN(engine::ModelFiles files, engine::OpenModelOfAnyHead(run_.ppo.critic_model));
    start = std::move(files.tensors);
  }
  return critic_->LoadModel(*engine::CriticTensors(start, critic_->config().hidden_size));
}

absl::StatusOr<PpoBatch> PolicyTrainer::CollectPpoBatch(const StepRequest& request,
                                                        double kl_coef) {
  PpoBatchOptions options;
  options.gae = {.gamma = run_.ppo.gamma, .lambda = run_.ppo.lambda};
  options.whiten_advantages = run_.ppo.whiten_advantages;
  options.kl_coef = kl_coef;
  ASSIGN_OR_RETURN(options.kl_estimator, rl::KlEstimatorByName(run_.algorithm.kl_estimator));
  ASSIGN_OR_RETURN(const engine::BatchLogProbs values, critic_->LogProbs(request.batch));
  ASSIGN_OR_RETURN(PpoBatch batch,
                   MakePpoBatch({request.batch, request.rewards, values.logprobs}, options));
  if (run_.algorithm.importance_cap <= 0) return batch;
  // Ratios are taken against the policy as the step finds it; the cap corrects for the rest.
  ASSIGN_OR_RETURN(engine::BatchLogProbs proximal, engine_->LogProbs(request.batch));
  for (size_t g = 0; g < batch.targets.size(); ++g) {
    for (size_t c = 0; c < batch.targets[g].size(); ++c) {
      batch.targets[g][c].proximal_logprobs = std::move(proximal.logprobs[g][c]);
    }
  }
  return batch;
}

absl::Status PolicyTrainer::UpdatePolicy(const StepRequest& request, const rl::Objective& objective,
                                         const MiniBatch& batch, const engine::UpdateOfStep& update,
                                         PpoUpdates& updates) {
  const StepObjective step_objective(objective, batch.batch,
                                     update.is_first() ? request.base_version : -1,
                                     /*advantage_divisor=*/1.0, &batch.targets);
  ASSIGN_OR_RETURN(const engine::StepResult result,
                   engine_->Step(batch.batch, step_objective, request.skip_above_norm, update));
  ASSIGN_OR_RETURN(const StepSums sums, SumsOfAll(batch.batch, step_objective.step()));
  Add(result, updates.policy);
  if (result.skipped) {
    ++updates.num_skipped;
  } else {
    ++updates.num_policy;
    updates.policy_sums.Merge(sums.Total());
  }
  updates.refused.Update(sums.refused.status);
  if (update.is_first()) updates.mismatch = step_objective.first_mismatch();
  updates.gradients.Merge(step_objective.gradients());
  return absl::OkStatus();
}

absl::Status PolicyTrainer::UpdateCritic(const rl::ObjectiveOptions& options,
                                         const MiniBatch& batch, const engine::UpdateOfStep& update,
                                         PpoUpdates& updates) {
  const CriticObjective objective(options, batch.targets);
  ASSIGN_OR_RETURN(
      const engine::StepResult result,
      critic_->Step(batch.batch, objective, std::numeric_limits<double>::infinity(), update));
  ASSIGN_OR_RETURN(const StepSums sums, SumsOfAll(batch.batch, objective.step()));
  Add(result, updates.critic);
  if (result.skipped) {
    ++updates.num_skipped;
  } else {
    ++updates.num_critic;
    updates.critic_sums.Merge(sums.Total());
  }
  updates.refused.Update(sums.refused.status);
  return absl::OkStatus();
}

absl::StatusOr<PolicyTrainer::Computed> PolicyTrainer::UpdateByPpo(
    const StepRequest& request, const rl::ObjectiveOptions& run_options) {
  rl::ObjectiveOptions options = run_options;
  options.kl_coef = 0;  // the penalty is in the rewards
  options.value_coef = 1;
  options.value_clip = run_.ppo.value_clip;
  // PPO's surrogate is GRPO's, with an advantage for each token.
  ASSIGN_OR_RETURN(const auto objective, rl::MakeObjective("grpo", options));
  const auto plan = PlanUpdates(request.batch, {.num_epochs = run_.ppo.epochs,
                                                .size = run_.ppo.mini_batch,
                                                .seed = run_.run.seed,
                                                .step = static_cast<uint64_t>(request.step)});
  if (plan.empty()) {
    return absl::InvalidArgumentError("training step: the batch has no completion tokens");
  }
  ASSIGN_OR_RETURN(const PpoBatch batch, CollectPpoBatch(request, run_options.kl_coef));
  const bool trains_policy = request.step > run_.ppo.critic_warmup_steps;
  PpoUpdates updates;
  for (size_t i = 0; i < plan.size(); ++i) {
    const engine::UpdateOfStep update{static_cast<int64_t>(i), static_cast<int64_t>(plan.size())};
    const MiniBatch mini_batch = TakeMiniBatch(request.batch, batch.targets, plan[i]);
    RETURN_IF_ERROR(UpdateCritic(options, mini_batch, update, updates));
    if (!trains_policy) continue;
    RETURN_IF_ERROR(UpdatePolicy(request, objective, mini_batch, update, updates));
  }
  if (!trains_policy) {
    engine_->PassStep();
    updates.policy.version = engine_->version();
  }
  return ComputedOf(updates, batch, static_cast<int64_t>(plan.size()));
}

// Losses and norms are means over the step's updates that counted.
PolicyTrainer::Computed PolicyTrainer::ComputedOf(PpoUpdates& updates, const PpoBatch& batch,
                                                  int64_t num_updates) const {
  Computed computed;
  computed.metrics = updates.policy_sums.Metrics();
  for (const char* loss : {"loss", "policy_loss"}) {
    computed.metrics[loss] = Mean(computed.metrics[loss], updates.num_policy);
  }
  const std::map<std::string, double> critic = updates.critic_sums.Metrics();
  computed.metrics["value_loss"] = Mean(updates.critic_sums.value_loss, updates.num_critic);
  const auto clipped = critic.find("value_clip_fraction");
  computed.metrics["value_clip_fraction"] = clipped == critic.end() ? 0.0 : clipped->second;
  computed.metrics["critic_grad_norm"] = Mean(updates.critic.grad_norm, updates.num_critic);
  computed.metrics["critic_lr"] = updates.critic.lr;
  computed.metrics["updates"] = static_cast<double>(num_updates);
  computed.metrics["skipped_updates"] = static_cast<double>(updates.num_skipped);
  computed.metrics.erase("kl");
  for (const auto& [name, value] : batch.metrics) computed.metrics[name] = value;
  computed.refused = updates.refused;
  computed.mismatch = updates.mismatch;
  computed.rank_gradient = updates.gradients.RootMeanSquare();
  computed.result = updates.policy;
  computed.result.grad_norm = Mean(updates.policy.grad_norm, updates.num_policy);
  computed.result.entropy = Mean(updates.policy.entropy, updates.policy.num_trained_tokens);
  computed.result.forward_seconds += updates.critic.forward_seconds;
  computed.result.backward_seconds += updates.critic.backward_seconds;
  computed.result.optimizer_seconds += updates.critic.optimizer_seconds;
  // A step of which some updates were skipped has changed something.
  computed.result.skipped = updates.num_policy + updates.num_critic == 0;
  return computed;
}
}  // namespace stretto::services
