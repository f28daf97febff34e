#include "engine/training/trainer_engine.h"

#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "engine/collectives/direct_communicator.h"
#include "engine/training/tensor_parallel_pass.h"

namespace stretto::engine {
namespace {
constexpr double kClipEpsilon = 1e-6;

absl::Status CheckOptions(const TrainerOptions& o) {
  const auto require = [](bool ok, absl::string_view what) -> absl::Status {
    return ok ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat("trainer: ", what));
  };
  RETURN_IF_ERROR(require(o.micro_batch_tokens > 0, "micro_batch_tokens must be at least 1"));
  RETURN_IF_ERROR(require(o.temperature > 0, "temperature must be positive"));
  RETURN_IF_ERROR(require(o.schedule.lr >= 0, "lr must not be negative"));
  RETURN_IF_ERROR(require(o.schedule.warmup_steps >= 0, "warmup_steps must not be negative"));
  RETURN_IF_ERROR(require(o.beta1 >= 0 && o.beta1 < 1, "beta1 must be in [0, 1)"));
  RETURN_IF_ERROR(require(o.beta2 >= 0 && o.beta2 < 1, "beta2 must be in [0, 1)"));
  RETURN_IF_ERROR(require(o.eps > 0, "eps must be positive"));
  RETURN_IF_ERROR(require(o.weight_decay >= 0, "weight_decay must not be negative"));
  return require(o.max_grad_norm >= 0, "max_grad_norm must not be negative");
}

// Adds the seconds it lived to a sum.
class PhaseTimer {
 public:
  PhaseTimer(Clock& clock, double& seconds)
      : clock_(clock), seconds_(seconds), begin_(clock.NowSeconds()) {}
  ~PhaseTimer() { seconds_ += clock_.NowSeconds() - begin_; }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  Clock& clock_;
  double& seconds_;
  double begin_;
};
}  // namespace

TrainerEngine::TrainerEngine(Device& device, const TrainerOptions& options, Clock& clock,
                             Communicator* group)
    : device_(device),
      options_(options),
      clock_(clock),
      stream_(device.CreateStream()),
      world_(group),
      group_(group) {}
TrainerEngine::~TrainerEngine() = default;

absl::StatusOr<std::unique_ptr<TrainerEngine>> TrainerEngine::Create(Device& device,
                                                                     const ModelConfig& config,
                                                                     const TrainerOptions& options,
                                                                     Clock& clock,
                                                                     Communicator* group) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<TrainerEngine> engine(new TrainerEngine(device, options, clock, group));
  ASSIGN_OR_RETURN(
      engine->transformer_,
      Transformer::Create(device, config, {options.dtype, options.max_sequence_length}));
  RETURN_IF_ERROR(engine->Allocate(config));
  return engine;
}

absl::Status TrainerEngine::Allocate(const ModelConfig& config) {
  const ParallelOptions& parallel = options_.parallel;
  layout_ = held_layout_ = trained_layout_ = std::make_shared<const ParameterLayout>(config);
  if (parallel.tensor_parallel != 1 || parallel.k_leaves != 1) {
    ASSIGN_OR_RETURN(tensor_, TensorParallel::Create(config, parallel, world_));
    held_layout_ = tensor_->layout();
    group_ = tensor_->data();
  }
  if (group_ == nullptr && parallel.kind != DataParallel::kDdp) {
    ASSIGN_OR_RETURN(own_group_, GroupOfOne("trainer"));
    group_ = own_group_.get();
  }
  if (options_.lora) RETURN_IF_ERROR(AllocateAdapted(config));
  Communicator* leaves = tensor_ == nullptr ? nullptr : tensor_->leaves();
  if (tensor_ != nullptr && !options_.storage.is_plain()) {
    return absl::InvalidArgumentError(
        "trainer: 8-bit or offloaded optimizer state: expected tensor_parallel = 1 and k_leaves = "
        "1");
  }
  if (tensor_ != nullptr && options_.gradient_dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        "trainer: gradients of bf16: expected tensor_parallel = 1 and k_leaves = 1");
  }
  TrainingStateOptions state{options_.dtype, options_.storage, {}};
  if (adapted_ != nullptr) state = {DType::kF32, options_.storage, adapted_.get()};
  ASSIGN_OR_RETURN(
      state_,
      TrainingState::Create(device_, *stream_, adapted_ != nullptr ? trained_layout_ : held_layout_,
                            state, parallel, group_, leaves));
  PackedPassOptions pass;
  pass.max_rows = pass.max_targets =
      std::max(options_.micro_batch_tokens, options_.max_sequence_length);
  pass.temperature = options_.temperature;
  pass.checkpointing = options_.checkpointing;
  pass.logits_bytes = options_.logits_bytes;
  pass.gradient_dtype = options_.gradient_dtype;
  pass.units = state_->units();
  if (adapted_ != nullptr) pass.lora = &adapted_->adapter();
  if (tensor_ == nullptr) {
    ASSIGN_OR_RETURN(pass_, PackedPass::Create(*transformer_, pass));
  } else {
    ASSIGN_OR_RETURN(pass_, TensorParallelPass::Create(*transformer_, pass, *stream_, leaves,
                                                       parallel.k_leaves));
  }
  return absl::OkStatus();
}

MicroBatchLimits TrainerEngine::Limits() const {
  return {options_.micro_batch_tokens, options_.max_sequence_length, config().vocab_size};
}

absl::StatusOr<StepResult> TrainerEngine::Step(const TrainBatch& batch, const Objective& objective,
                                               double skip_above_norm, const UpdateOfStep& update) {
  skip_above_norm_ = skip_above_norm;
  update_ = update;
  absl::StatusOr<StepResult> result = TakeStep(batch, objective);
  if (!result.ok() && tensor_ != nullptr) tensor_->EndBroken();
  return result;
}

absl::StatusOr<StepResult> TrainerEngine::TakeStep(const TrainBatch& batch,
                                                   const Objective& objective) {
  if (!broken_.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("training step: an earlier one ended half done; restore a checkpoint: ",
                     broken_.message()));
  }
  RETURN_IF_ERROR(AgreeOn(batch));
  ASSIGN_OR_RETURN(const std::vector<MicroBatch> micro_batches, CutMicroBatches(batch, Limits()));
  if (micro_batches.empty()) {
    return absl::InvalidArgumentError("training step: the batch has no completion tokens");
  }
  const ParallelOptions& parallel = options_.parallel;
  const auto num_micro_batches = static_cast<int64_t>(micro_batches.size());
  if (parallel.streams_gradients() && num_micro_batches > parallel.reduction_leaves) {
    return absl::InvalidArgumentError(
        absl::StrCat("training step: ", Name(parallel.kind),
                     " gives gradients away after each micro-batch, so "
                     "reduction_leaves (",
                     parallel.reduction_leaves, ") must be at least the batch's ",
                     num_micro_batches, " micro-batches"));
  }
  const LeafPlan plan(num_micro_batches, parallel.reduction_leaves,
                      group_ == nullptr ? 1 : group_->size());
  const StepContext step{batch, micro_batches, objective, plan};
  LeafResults results;
  if (parallel.streams_gradients()) {
    RETURN_IF_ERROR(RunRounds(step, results));
  } else {
    RETURN_IF_ERROR(RunLeaves(step, results));
    RETURN_IF_ERROR(state_->SumGradients());
  }
  ASSIGN_OR_RETURN(StepResult result, JoinResults(plan, std::move(results)));
  result.num_micro_batches = num_micro_batches;
  result.num_trained_tokens = batch.num_tokens();
  result.entropy /= static_cast<double>(result.num_trained_tokens);
  RETURN_IF_ERROR(Update(result));
  if (update_.is_last()) ++counters_.version;
  result.version = counters_.version;
  return result;
}

// Tensor-parallel passes don't part a tied embedding's gradient.
TiedEmbeddingSum::IdsOfRanks TrainerEngine::IdsOfLastPasses(const StepContext& step) const {
  TiedEmbeddingSum::IdsOfRanks ids;
  for (int r = 0; group_ != nullptr && tensor_ == nullptr && r < group_->size(); ++r) {
    const std::vector<int64_t> leaves = step.plan.LeavesOf(r);
    ids.emplace_back();
    if (leaves.empty()) continue;
    ids.back() =
        step.micro_batches[step.plan.MicroBatchesOf(leaves.back()).second - 1].packed.ids_T;
  }
  return ids;
}

TiedEmbeddingSum::IdsOfRanks TrainerEngine::IdsOfRound(
    const StepContext& step, const std::vector<int64_t>& leaf_of_rank) const {
  TiedEmbeddingSum::IdsOfRanks ids;
  for (size_t r = 0; tensor_ == nullptr && r < leaf_of_rank.size(); ++r) {
    ids.emplace_back();
    if (leaf_of_rank[r] < 0) continue;
    ids.back() = step.micro_batches[step.plan.MicroBatchesOf(leaf_of_rank[r]).first].packed.ids_T;
  }
  return ids;
}

absl::Status TrainerEngine::RunLeaves(const StepContext& step, LeafResults& results) {
  state_->BeginStep(step.plan, IdsOfLastPasses(step));
  state_->BeginLeaf();  // a rank without leaves has no gradients either
  const std::vector<int64_t> leaves = step.plan.LeavesOf(group_ == nullptr ? 0 : group_->rank());
  for (const int64_t leaf : leaves) {
    StepResult& result = results[leaf];
    result.num_trained_tokens = step.batch.num_tokens();
    if (results.size() > 1) state_->BeginLeaf();
    const auto [begin, end] = step.plan.MicroBatchesOf(leaf);
    for (int64_t i = begin; i < end; ++i) {
      const Targets targets =
          ForwardMicroBatch(step.batch, step.micro_batches[i], step.objective, result);
      if (leaves.size() == 1 && i + 1 == end) state_->ExpectLastPass();
      if (targets.any) BackwardMicroBatch(targets, result);
      RETURN_IF_ERROR(pass_->status());
    }
    state_->EndLeaf(step.plan, leaf);
  }
  return absl::OkStatus();
}

absl::Status TrainerEngine::RunRounds(const StepContext& step, LeafResults& results) {
  state_->stream()->BeginStep(step.plan.used());
  for (int64_t round = 0; round < step.plan.num_rounds(); ++round) {
    const absl::Status status = RunRound(step, round, results);
    if (!status.ok() && tensor_ != nullptr) tensor_->EndBroken();  // nobody waits for this rank
    const absl::Status ended = state_->stream()->EndRound();
    RETURN_IF_ERROR(pass_->status());
    RETURN_IF_ERROR(ended);
    RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::Status TrainerEngine::RunRound(const StepContext& step, int64_t round, LeafResults& results) {
  UnitStream& stream = *state_->stream();
  const std::vector<int64_t> leaf_of_rank = step.plan.Round(round);
  const int64_t leaf = leaf_of_rank[group_->rank()];
  stream.BeginRound(leaf_of_rank, IdsOfRound(step, leaf_of_rank));
  Targets targets;
  if (leaf >= 0) {
    StepResult& result = results[leaf];
    result.num_trained_tokens = step.batch.num_tokens();
    const int64_t micro_batch = step.plan.MicroBatchesOf(leaf).first;
    targets =
        ForwardMicroBatch(step.batch, step.micro_batches[micro_batch], step.objective, result);
    RETURN_IF_ERROR(pass_->status());
  } else {
    stream.ForwardAlone();
  }
  // Whether to go back is a matter of the objective's values: ranks ask one another.
  std::vector<uint8_t> any(group_->size());
  const uint8_t mine = targets.any ? 1 : 0;
  RETURN_IF_ERROR(group_->AllGather({&mine, 1}, absl::MakeSpan(any)));
  if (targets.any) {
    BackwardMicroBatch(targets, results[leaf]);
  } else if (std::any_of(any.begin(), any.end(), [](uint8_t a) { return a != 0; })) {
    stream.BackwardAlone();
  } else {
    RETURN_IF_ERROR(stream.EndRound());
    stream.AddZeros();
  }
  return absl::OkStatus();
}

TrainerEngine::Targets TrainerEngine::ForwardMicroBatch(const TrainBatch& batch,
                                                        const MicroBatch& micro_batch,
                                                        const Objective& objective,
                                                        StepResult& result) {
  const int64_t N = micro_batch.packed.num_targets();
  std::vector<float> logprobs(N), entropy(N);
  Targets targets{std::vector<float>(N, 0.0f), std::vector<float>(N, 0.0f)};
  result.num_computed_tokens += micro_batch.packed.num_rows();
  {
    PhaseTimer timer(clock_, result.forward_seconds);
    pass_->Forward(*stream_, weights(), micro_batch.packed, absl::MakeSpan(logprobs),
                   absl::MakeSpan(entropy));
  }
  PhaseTimer timer(clock_, result.objective_seconds);
  EvaluateObjective(batch, micro_batch, objective, logprobs, entropy,
                    absl::MakeSpan(targets.d_logprobs), absl::MakeSpan(targets.d_entropy), result);
  const auto not_zero = [](float d) { return d != 0.0f; };
  const auto any_of = [&](const std::vector<float>& d) {
    return std::any_of(d.begin(), d.end(), not_zero);
  };
  targets.any_entropy = any_of(targets.d_entropy);
  targets.any = targets.any_entropy || any_of(targets.d_logprobs);
  if (targets.any) {
    result.num_backward_tokens += micro_batch.packed.num_rows();
    result.num_backward_targets += N;
  }
  return targets;
}

void TrainerEngine::BackwardMicroBatch(const Targets& targets, StepResult& result) {
  PhaseTimer timer(clock_, result.backward_seconds);
  pass_->Backward(
      *stream_, weights(), *held_layout_, flat_weights(), state_->gradients(), targets.d_logprobs,
      targets.any_entropy ? absl::Span<const float>(targets.d_entropy) : absl::Span<const float>());
}

void TrainerEngine::EvaluateObjective(const TrainBatch& batch, const MicroBatch& micro_batch,
                                      const Objective& objective, absl::Span<const float> logprobs,
                                      absl::Span<const float> entropy, absl::Span<float> d_logprobs,
                                      absl::Span<float> d_entropy, StepResult& result) {
  std::vector<float> behaviour(logprobs.size(), 0.0f), reference, advantages;
  for (size_t i = 0; i < micro_batch.completions.size(); ++i) {
    const CompletionRef ref = micro_batch.completions[i];
    const TrainCompletion& c = batch.groups[ref.group].completions[ref.completion];
    const int64_t begin = micro_batch.target_begin[i];
    std::copy(c.behaviour_logprobs.begin(), c.behaviour_logprobs.end(), behaviour.begin() + begin);
    reference.insert(reference.end(), c.reference_logprobs.begin(), c.reference_logprobs.end());
    advantages.push_back(c.advantage);
    const bool compares = update_.is_first() && !c.behaviour_logprobs.empty();
    for (size_t j = 0; j < c.policy_versions.size() && compares; ++j) {
      if (c.policy_versions[j] != counters_.version) continue;
      const double difference = std::abs(double{logprobs[begin + j]} - c.behaviour_logprobs[j]);
      // Written so that a NaN is kept.
      if (!(difference <= result.logprob_mismatch_max)) result.logprob_mismatch_max = difference;
      result.logprob_mismatch_sum += difference;
      ++result.num_compared_tokens;
    }
  }
  ObjectiveInput input;
  input.logprobs = logprobs;
  input.entropy = entropy;
  input.behaviour_logprobs = behaviour;
  input.reference_logprobs = reference;
  input.completion_begin = micro_batch.target_begin;
  input.advantages = advantages;
  input.completions = micro_batch.completions;
  input.step_tokens = result.num_trained_tokens;
  input.step_completions = batch.num_completions();
  ObjectiveOutput output;
  output.d_logprobs = d_logprobs;
  output.d_entropy = d_entropy;
  objective.Evaluate(input, output);
  result.loss += output.loss;
  for (const auto& [name, value] : output.metrics) result.metrics[name] += value;
  for (float h : entropy) result.entropy += double{h};
}

absl::Status TrainerEngine::Update(StepResult& result) {
  PhaseTimer timer(clock_, result.optimizer_seconds);
  result.lr = options_.schedule.At(counters_.version + 1);
  ASSIGN_OR_RETURN(result.grad_norm, state_->GradientNorm());
  if (!std::isfinite(result.grad_norm) || !std::isfinite(result.loss)) {
    result.skipped = true;
    result.skip_reason =
        absl::StrCat("not finite: loss ", result.loss, ", gradient norm ", result.grad_norm);
    return state_->FinishSums();
  }
  if (result.grad_norm > skip_above_norm_) {
    result.skipped = true;
    result.skip_reason = absl::StrCat("gradient norm ", result.grad_norm, " is a spike (above ",
                                      skip_above_norm_, ")");
    return state_->FinishSums();
  }
  AdamWStep step;
  step.lr = static_cast<float>(result.lr);
  step.beta1 = static_cast<float>(options_.beta1);
  step.beta2 = static_cast<float>(options_.beta2);
  step.eps = static_cast<float>(options_.eps);
  step.step = ++counters_.optimizer_steps;
  if (options_.max_grad_norm > 0) {
    const double factor = options_.max_grad_norm / (result.grad_norm + kClipEpsilon);
    step.grad_scale = static_cast<float>(std::min(1.0, factor));
  }
  broken_ = state_->Update(step, options_.weight_decay);
  if (broken_.ok() && adapted_ != nullptr) broken_ = adapted_->Merge(state_->flat_weights());
  return broken_;
}

absl::StatusOr<StepResult> TrainerEngine::SupervisedStep(
    absl::Span<const SupervisedSequence> sequences) {
  TrainBatch batch;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SupervisedSequence& s = sequences[i];
    if (s.loss_begin < 1 || s.loss_begin > static_cast<int64_t>(s.ids.size())) {
      return absl::InvalidArgumentError(absl::StrCat("sequence ", i, ": loss_begin ", s.loss_begin,
                                                     " must be in [1, ", s.ids.size(), "]"));
    }
    TrainGroup group;
    group.prompt_ids.assign(s.ids.begin(), s.ids.begin() + s.loss_begin);
    group.completions.emplace_back().ids.assign(s.ids.begin() + s.loss_begin, s.ids.end());
    batch.groups.push_back(std::move(group));
  }
  return Step(batch, CrossEntropy());
}

absl::StatusOr<BatchLogProbs> TrainerEngine::LogProbs(const TrainBatch& batch) {
  ASSIGN_OR_RETURN(const std::vector<MicroBatch> micro_batches, CutMicroBatches(batch, Limits()));
  BatchLogProbs out;
  for (const TrainGroup& g : batch.groups) {
    out.logprobs.emplace_back(g.completions.size());
    out.entropy.emplace_back(g.completions.size());
  }
  for (const MicroBatch& m : micro_batches) {
    std::vector<float> logprobs(m.packed.num_targets()), entropy(m.packed.num_targets());
    if (state_->stream() != nullptr) state_->stream()->BeginRound({});
    pass_->Forward(*stream_, weights(), m.packed, absl::MakeSpan(logprobs),
                   absl::MakeSpan(entropy));
    if (state_->stream() != nullptr) RETURN_IF_ERROR(state_->stream()->EndRound());
    RETURN_IF_ERROR(pass_->status());
    for (size_t i = 0; i < m.completions.size(); ++i) {
      const auto [g, c] = m.completions[i];
      const int64_t begin = m.target_begin[i], end = m.target_begin[i + 1];
      out.logprobs[g][c].assign(logprobs.begin() + begin, logprobs.begin() + end);
      out.entropy[g][c].assign(entropy.begin() + begin, entropy.begin() + end);
    }
  }
  return out;
}

const ModelConfig& TrainerEngine::config() const { return transformer_->config(); }

int64_t TrainerEngine::num_parameters() const {
  int64_t total = 0;
  for (const Parameter& p : layout_->parameters()) total += p.view.size();
  return total;
}

size_t TrainerEngine::device_bytes() const {
  const MemoryLedger m = memory();
  return m.weights + m.gradients + m.optimizer + m.packed + m.windows + pass_->bytes();
}

NumericProfile TrainerEngine::profile() const {
  NumericProfile profile = device_.Profile(options_.dtype);
  profile.k_leaves = static_cast<int>(options_.parallel.k_leaves);
  return profile;
}

std::vector<StatePart> TrainerEngine::PartsToWrite() {
  device_.Synchronize(*stream_);
  return tensor_ == nullptr ? state_->PartsToWrite() : tensor_->PartsToWrite(*state_);
}

absl::Status TrainerEngine::DownloadState(StateTensor which, const Parameter& parameter,
                                          float* dst) {
  if (tensor_ == nullptr) return state_->Download(which, parameter, dst);
  absl::Status status = tensor_->Download(*state_, which, parameter, dst);
  if (!status.ok()) tensor_->EndBroken();
  return status;
}

void TrainerEngine::UploadState(StateTensor which, const Parameter& parameter, const float* src) {
  if (tensor_ == nullptr) {
    state_->Upload(which, parameter, src);
  } else {
    tensor_->Upload(*state_, which, parameter, src);
  }
}

absl::Status TrainerEngine::FinishRestore(const TrainerCounters& counters) {
  counters_ = counters;
  broken_ = state_->RefreshWeights();
  if (broken_.ok() && adapted_ != nullptr) broken_ = adapted_->Merge(state_->flat_weights());
  return broken_;
}
}  // namespace stretto::engine
