#include "services/trainer/policy_trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/device/background.h"
#include "services/common/log.h"
#include "services/common/member_client.h"

namespace stretto::services {
using engine::Parameter;

namespace {
// Versions held for generators: the newest and the bases of its deltas, of which there is one where
// all generators have the last version before the next is made.
int NumVersionsHeld(const RunConfig& run) { return run.schedule.max_staleness == 0 ? 2 : 3; }

absl::StatusOr<rl::ObjectiveOptions> ObjectiveOptionsOf(const RunConfig& run) {
  const AlgorithmSection& algorithm = run.algorithm;
  rl::ObjectiveOptions options;
  options.clip_low = algorithm.clip_low;
  options.clip_high = algorithm.clip_high;
  options.dual_clip = algorithm.dual_clip;
  options.constant_length = static_cast<double>(run.rollout.max_tokens);
  options.kl_coef = algorithm.kl_coef;
  options.entropy_coef = algorithm.entropy_coef;
  options.importance_cap = algorithm.importance_cap;
  ASSIGN_OR_RETURN(options.ratio_level, rl::RatioLevelByName(algorithm.ratio_level));
  ASSIGN_OR_RETURN(options.kl_estimator, rl::KlEstimatorByName(algorithm.kl_estimator));
  ASSIGN_OR_RETURN(options.denominator, rl::LossDenominatorByName(algorithm.loss_denominator));
  return options;
}

absl::StatusOr<engine::TrainerOptions> EngineOptionsOf(const RunConfig& run, const ModelHost& host,
                                                       const std::string& layout,
                                                       int64_t tensor_parallel) {
  engine::TrainerOptions options;
  options.parallel.tensor_parallel = tensor_parallel;
  options.parallel.k_leaves = run.train.k_leaves;
  ASSIGN_OR_RETURN(options.parallel.kind, engine::ParseDataParallel(layout));
  options.parallel.reduction_leaves = run.train.reduction_leaves;
  options.dtype = host.dtype;
  options.max_sequence_length = host.transformer->options().max_sequence_length;
  options.temperature =
      run.rollout.temperature > 0 ? static_cast<float>(run.rollout.temperature) : 1.0f;
  options.micro_batch_tokens = run.train.micro_batch_tokens;
  // The run file's checks let no other names through.
  options.checkpointing =
      engine::ParseCheckpointing(run.train.checkpointing).value_or(engine::Checkpointing::kNone);
  ASSIGN_OR_RETURN(options.storage.eight_bit_moments,
                   engine::ParseOptimizerState(run.train.optimizer_state));
  options.gradient_dtype = run.train.gradient_dtype == "bf16" ? DType::kBF16 : DType::kF32;
  if (run.cluster.offload_optimizer) {
    options.storage.offload_folder = JoinPath(run.run.dir, "offload");
  }
  ASSIGN_OR_RETURN(options.schedule.kind, engine::ParseScheduleKind(run.train.lr_schedule));
  options.schedule.lr = run.train.lr;
  options.schedule.warmup_steps = run.train.warmup_steps;
  options.schedule.total_steps = run.train.steps;
  options.beta1 = run.train.beta1;
  options.beta2 = run.train.beta2;
  options.eps = run.train.eps;
  options.weight_decay = run.train.weight_decay;
  options.max_grad_norm = run.train.max_grad_norm;
  return options;
}

// That a group's exchanges have taken so far, waiting for other ranks included.
double CollectiveSeconds(const engine::Communicator* group) {
  double seconds = 0;
  for (int kind = 0; group != nullptr && kind < engine::kNumCollectiveKinds; ++kind) {
    seconds += group->traffic(static_cast<engine::CollectiveKind>(kind)).seconds;
  }
  return seconds;
}

double SecondsSince(int64_t start_ns) {
  return static_cast<double>(Clock::Real().NowNs() - start_ns) * 1e-9;
}

void LogMismatch(const Mismatch& mismatch, const StepRequest& request, double max) {
  LogError("LOG-PROB MISMATCH in step ", request.step, ": version ", request.base_version,
           " gives other bits in the trainer than in the generator. First: group ", mismatch.group,
           ", completion ", mismatch.completion, ", token ", mismatch.position, " (id ",
           mismatch.token, "): trainer ", mismatch.trainer_logprob, ", generator ",
           mismatch.generator_logprob, "; largest difference ", max);
}
}  // namespace

PolicyTrainer::PolicyTrainer(const RunConfig& run, const Parts& parts)
    : run_(run),
      host_(parts.host),
      metrics_(parts.metrics),
      seat_(parts.seat),
      files_(*parts.files),
      store_(NumVersionsHeld(run)),
      encoder_(&store_, host_->device->num_threads()) {}

PolicyTrainer::~PolicyTrainer() {
  if (opener_.joinable()) opener_.join();
}

absl::StatusOr<std::unique_ptr<PolicyTrainer>> PolicyTrainer::Open(const RunConfig& run,
                                                                   Parts parts) {
  std::unique_ptr<PolicyTrainer> trainer(new PolicyTrainer(run, parts));
  if (run.cluster.trainers > 1) return trainer;
  if (trainer->BeginsWithFiles()) {
    RETURN_IF_ERROR(trainer->OpenMeanwhile(std::move(parts.on_failed)));
    return trainer;
  }
  absl::MutexLock lock(&trainer->engine_mutex_);
  // Alone there is nothing to divide; the bits are those of every layout.
  RETURN_IF_ERROR(trainer->OpenEngine("ddp", 1));
  RETURN_IF_ERROR(trainer->Publish().status());
  return trainer;
}

bool PolicyTrainer::BeginsWithFiles() const {
  return run_.lora.rank == 0 && run_.lora.adapter.empty() && !has_critic() &&
         !files_.Exists(CheckpointRoot());
}

absl::Status PolicyTrainer::OpenMeanwhile(std::function<void(const absl::Status&)> on_failed) {
  ASSIGN_OR_RETURN(auto version, ReadInitialVersion(*host_));
  LogInfo("policy version ", version->number, " is ", version->hash);
  {
    absl::MutexLock lock(&state_mutex_);
    state_.version = version->number;
    state_.hash = version->hash;
  }
  store_.Put(std::move(version));
  absl::Notification begun;
  opener_ = std::thread([this, &begun, on_failed = std::move(on_failed)] {
    absl::MutexLock lock(&engine_mutex_);
    begun.Notify();
    open_status_ = OpenEngine("ddp", 1);
    host_->files.tensors->LetPagesGo();
    if (!open_status_.ok() && on_failed) on_failed(open_status_);
  });
  begun.WaitForNotification();
  return absl::OkStatus();
}

absl::Status PolicyTrainer::OpenEngine(const std::string& layout, int64_t tensor_parallel) {
  RETURN_IF_ERROR(CreateEngine(layout, tensor_parallel));
  OpenWriter();
  return RestoreOrBegin();
}

absl::Status PolicyTrainer::CreateEngine(const std::string& layout, int64_t tensor_parallel) {
  ASSIGN_OR_RETURN(engine::TrainerOptions options,
                   EngineOptionsOf(run_, *host_, layout, tensor_parallel));
  const LoraSection& lora = run_.lora;
  ASSIGN_OR_RETURN(engine::PeftAdapter adapter,
                   engine::ResolveLora(host_->files.config, {lora.rank, lora.alpha, lora.targets},
                                       lora.adapter));
  const engine::TrainerOptions options_of_critic = options;
  options.lora = adapter.lora;
  start_adapter_ = std::move(adapter.tensors);
  ASSIGN_OR_RETURN(engine_, engine::TrainerEngine::Create(*host_->device, host_->files.config,
                                                          options, Clock::Real(), group_.get()));
  RETURN_IF_ERROR(engine_->LoadBase(*host_->files.tensors));
  if (has_critic()) RETURN_IF_ERROR(CreateCritic(options_of_critic));
  absl::MutexLock lock(&state_mutex_);
  state_.num_parameters = engine_->num_parameters();
  return absl::OkStatus();
}

absl::StatusOr<std::string> PolicyTrainer::Publish() {
  store_.MakeRoom();                   // first, so that the new version takes the oldest's memory
  host_->files.tensors->LetPagesGo();  // of version 0, if a delta was made from it
  ASSIGN_OR_RETURN(const std::shared_ptr<const engine::HostWeights> weights,
                   engine_->GatherWeights());
  engine::Manifest manifest;
  std::vector<engine::SharedBytes> tensors;
  for (const Parameter& parameter : weights->parameters()) {
    manifest.push_back({.name = parameter.spec.name,
                        .dtype = weights->dtype(),
                        .shape = parameter.spec.shape,
                        .hash = ""});
    tensors.emplace_back(weights, weights->bytes(parameter));
  }
  const auto version =
      engine::MakeVersion(weights->version(), std::move(manifest), std::move(tensors));
  if (IsFirstRank()) store_.Put(version);
  absl::MutexLock lock(&state_mutex_);
  state_.version = version->number;
  state_.hash = version->hash;
  return version->hash;
}

absl::StatusOr<absl::optional<StepOutcome>> PolicyTrainer::Look(const StepRequest& request) const {
  RETURN_IF_ERROR(CheckGroup(request.group_epoch));
  absl::MutexLock lock(&state_mutex_);
  if (request.base_version != request.step - 1) {
    return absl::InvalidArgumentError(absl::StrCat("step ", request.step, " starts from version ",
                                                   request.step - 1, ", not ",
                                                   request.base_version));
  }
  if (request.step == state_.version && last_outcome_.has_value()) return last_outcome_;
  if (request.step == state_.version - 1 && outcome_before_.has_value()) return outcome_before_;
  if (request.base_version != state_.version) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", request.step, " cannot be taken: this trainer is at version ", state_.version));
  }
  if (!request.base_hash.empty() && request.base_hash != state_.hash) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", request.base_version, " is ", state_.hash, " here, not ", request.base_hash));
  }
  return absl::optional<StepOutcome>();
}

absl::Status PolicyTrainer::AwaitVersion(int64_t version,
                                         const std::function<bool()>& is_cancelled) const {
  absl::MutexLock lock(&state_mutex_);
  const auto is_there = [&]() ABSL_SHARED_LOCKS_REQUIRED(state_mutex_) {
    return state_.version >= version;
  };
  while (!state_mutex_.AwaitWithTimeout(absl::Condition(&is_there), absl::Milliseconds(100))) {
    if (is_cancelled()) return absl::CancelledError("nobody waits for the step any more");
  }
  return absl::OkStatus();
}

absl::StatusOr<StepOutcome> PolicyTrainer::TakeStep(const StepRequest& request) {
  absl::MutexLock lock(&engine_mutex_);
  RETURN_IF_ERROR(open_status_);
  // A repeat waited for the first call, and finds its result here.
  ASSIGN_OR_RETURN(absl::optional<StepOutcome> taken, Look(request));
  if (taken.has_value()) return *std::move(taken);
  encoder_.SetTrainerBusy(true);
  const std::vector<std::shared_ptr<void>> left = LeaveThreads(request);
  absl::StatusOr<StepOutcome> computed = Compute(request);
  encoder_.SetTrainerBusy(false);
  if (!computed.ok()) {
    absl::Status state = engine_->state_status();
    if (critic_ != nullptr) state.Update(critic_->state_status());
    if (state.ok()) return computed.status();
    GiveUpState(computed.status());
    return absl::UnavailableError(computed.status().message());
  }
  StepOutcome outcome = *std::move(computed);
  {
    absl::MutexLock state(&state_mutex_);
    state_.busy_seconds += outcome.seconds;
    outcome_before_ = std::exchange(last_outcome_, outcome);
  }
  Report(outcome);
  ReportGroup();
  return outcome;
}

// One update, by the whole batch.
absl::StatusOr<PolicyTrainer::Computed> PolicyTrainer::Update(const StepRequest& request,
                                                              const rl::ObjectiveOptions& options) {
  ASSIGN_OR_RETURN(const auto objective, rl::MakeObjective(run_.algorithm.name, options));
  const bool divides = run_.algorithm.advantage_scale == "batch_std";
  const StepObjective step_objective(objective, request.batch, request.base_version,
                                     divides ? AdvantageDivisor(request.batch) : 1.0);
  Computed computed;
  ASSIGN_OR_RETURN(computed.result,
                   engine_->Step(request.batch, step_objective, request.skip_above_norm));
  ASSIGN_OR_RETURN(const StepSums sums, SumsOfAll(request.batch, step_objective.step()));
  computed.metrics = sums.Total().Metrics();
  computed.refused = sums.refused.status;
  computed.mismatch = step_objective.first_mismatch();
  computed.rank_gradient = step_objective.gradients().RootMeanSquare();
  return computed;
}

std::vector<std::shared_ptr<void>> PolicyTrainer::LeaveThreads(const StepRequest& request) const {
  std::vector<std::shared_ptr<void>> left;
  if (threads_beside_generators_ == 0 || request.generators_wait) return left;
  for (int i = threads_beside_generators_; i < host_->device->num_threads(); ++i) {
    left.push_back(engine::BorrowThread(*host_->device));
  }
  return left;
}

absl::StatusOr<StepOutcome> PolicyTrainer::Compute(const StepRequest& request) {
  const int64_t start_ns = Clock::Real().NowNs();
  ASSIGN_OR_RETURN(rl::ObjectiveOptions options, ObjectiveOptionsOf(run_));
  if (request.kl_coef.has_value()) options.kl_coef = *request.kl_coef;
  const double collective_seconds = CollectiveSeconds(group_.get());
  ASSIGN_OR_RETURN(const Computed computed,
                   has_critic() ? UpdateByPpo(request, options) : Update(request, options));
  const engine::StepResult& result = computed.result;
  if (computed.mismatch.has_value() && run_.schedule.numerics == "exact" &&
      run_.schedule.weight_update != "keep") {
    LogMismatch(*computed.mismatch, request, result.logprob_mismatch_max);
  }
  const int64_t publish_ns = Clock::Real().NowNs();
  StepOutcome outcome;
  outcome.version = result.version;
  ASSIGN_OR_RETURN(outcome.hash, Publish());
  outcome.skipped = result.skipped;
  outcome.skip_reason = result.skip_reason;
  if (!computed.refused.ok()) {
    absl::StrAppend(&outcome.skip_reason, " (", computed.refused.message(), ")");
  }
  outcome.num_tokens = result.num_computed_tokens;
  outcome.metrics = computed.metrics;
  outcome.metrics["kl_coef"] = options.kl_coef;
  AddMetrics(request, result, outcome);
  outcome.metrics["publish_seconds"] = SecondsSince(publish_ns);
  outcome.metrics["rank_gradient"] = computed.rank_gradient;
  outcome.metrics["collective_seconds"] = CollectiveSeconds(group_.get()) - collective_seconds;
  outcome.seconds = SecondsSince(start_ns);
  outcome.metrics["train_seconds"] = outcome.seconds;
  if (matrix_ceiling_ > 0) outcome.metrics["mfu"] = Utilization(result, outcome.seconds);
  outcome.metrics["train_tokens_per_second"] =
      static_cast<double>(result.num_computed_tokens) / std::max(outcome.seconds, 1e-9);
  return outcome;
}

void PolicyTrainer::AddMetrics(const StepRequest& request, const engine::StepResult& result,
                               StepOutcome& outcome) const {
  outcome.metrics["entropy"] = result.entropy;
  outcome.metrics["grad_norm"] = result.grad_norm;
  outcome.metrics["lr"] = result.lr;
  outcome.metrics["logprob_mismatch_max"] = result.logprob_mismatch_max;
  // Between this trainer and the generators: of quantised weights, what quantising costs.
  outcome.metrics["logprob_mismatch_mean"] =
      result.logprob_mismatch_sum /
      static_cast<double>(std::max<int64_t>(1, result.num_compared_tokens));
  outcome.metrics["compared_tokens"] = static_cast<double>(result.num_compared_tokens);
  outcome.metrics["trained_tokens"] = static_cast<double>(request.batch.num_tokens());
  outcome.metrics["micro_batches"] = static_cast<double>(result.num_micro_batches);
  outcome.metrics["completion_length"] =
      static_cast<double>(request.batch.num_tokens()) /
      static_cast<double>(std::max<int64_t>(1, request.batch.num_completions()));
  outcome.metrics["reward_mean"] = request.reward_mean;
  outcome.metrics["reward_std"] = request.reward_std;
  outcome.metrics["forward_seconds"] = result.forward_seconds;
  outcome.metrics["objective_seconds"] = result.objective_seconds;
  outcome.metrics["backward_seconds"] = result.backward_seconds;
  outcome.metrics["optimizer_seconds"] = result.optimizer_seconds;
}

// The share of the machine's matrix throughput (of all ranks' machines, taken to be alike) that a
// step's products are: for each weight and token that it is multiplied with two operations forward,
// and four backward (two for a weight that is frozen) where the token's micro-batch had a gradient.
// Attention is left out. A critic is counted as one that sees the same rows, all backward.
double PolicyTrainer::Utilization(const engine::StepResult& result, double seconds) const {
  const engine::ModelConfig& c = engine_->config();
  const auto head = static_cast<double>(c.vocab_size * c.hidden_size);
  const double body = static_cast<double>(engine_->num_parameters()) - head;
  const double backward = engine_->options().lora ? 2 : 4;
  double flops = body * (2 * static_cast<double>(result.num_computed_tokens) +
                         backward * static_cast<double>(result.num_backward_tokens)) +
                 head * (2 * static_cast<double>(result.num_trained_tokens) +
                         backward * static_cast<double>(result.num_backward_targets));
  if (critic_ != nullptr) {
    const engine::ModelConfig& of_critic = critic_->config();
    const auto embedding = static_cast<double>(of_critic.vocab_size * of_critic.hidden_size);
    flops += 6 * (static_cast<double>(critic_->num_parameters()) - embedding) *
             static_cast<double>(result.num_computed_tokens);
  }
  const double num_ranks = group_ == nullptr ? 1 : group_->size();
  return flops / (num_ranks * matrix_ceiling_ * std::max(seconds, 1e-9));
}

void PolicyTrainer::Report(const StepOutcome& outcome) {
  for (const auto& [name, value] : outcome.metrics) {
    metrics_->gauge(absl::StrCat("stretto_trainer_", name), "Of the last step.").Set(value);
  }
  ReportQuantizationGap(outcome);
  metrics_->counter("stretto_trainer_skipped_steps_total", "Steps that changed nothing.")
      .Add(outcome.skipped ? 1 : 0);
  metrics_->gauge("stretto_trainer_peak_memory_bytes", "Resident in this process at most, so far.")
      .Set(static_cast<double>(PeakRssBytes()));
  metrics_->gauge("stretto_policy_version", "Policy version in use.")
      .Set(static_cast<double>(outcome.version));
  const auto metric = [&outcome](const char* name) {
    const auto found = outcome.metrics.find(name);
    return found == outcome.metrics.end() ? 0.0 : found->second;
  };
  LogInfo("step ", outcome.version, outcome.skipped ? " SKIPPED: " + outcome.skip_reason : "",
          ": reward ", metric("reward_mean"), ", loss ", metric("loss"), ", grad norm ",
          metric("grad_norm"), ", entropy ", metric("entropy"), ", mismatch ",
          metric("logprob_mismatch_max"), ", ", outcome.num_tokens, " tokens in ", outcome.seconds,
          " s");
}

// What quantised generators cost in log-probs, by what is quantised. Importance weights correct for
// it (the run file must cap them); a large gap makes them noisy.
void PolicyTrainer::ReportQuantizationGap(const StepOutcome& outcome) {
  const RolloutSection& rollout = run_.rollout;
  if (rollout.weight_dtype == "bf16" && rollout.kv_dtype == "bf16") return;
  for (const char* statistic : {"mean", "max"}) {
    const auto found = outcome.metrics.find(absl::StrCat("logprob_mismatch_", statistic));
    if (found == outcome.metrics.end()) continue;
    metrics_
        ->gauge("stretto_trainer_quantization_logprob_gap",
                "Distance of the generators' log-probs from the trainer's in the last step, over "
                "the tokens of its own version.",
                {{"weight_dtype", rollout.weight_dtype},
                 {"kv_dtype", rollout.kv_dtype},
                 {"statistic", statistic}})
        .Set(found->second);
  }
}

TrainerState PolicyTrainer::State() const {
  absl::MutexLock lock(&state_mutex_);
  return state_;
}
}  // namespace stretto::services
