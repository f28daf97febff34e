// Training of one model: fp32 masters and AdamW moments, weights in the dtype of computation,
// gradients added up over micro-batches in a fixed order. A step is a pure function of (state,
// batch, objective): the same bits for every number of threads, and for every number of ranks and
// every way to divide state among them (parallel.h) that the same `reduction_leaves` allows.
//
// In a group of ranks every rank makes the same calls with the same arguments, in the same order:
// each is given the whole batch and computes its part. When the group ends, the call returns its
// error; what was under way is undone by restoring a checkpoint in a new group.
//
// Not thread-safe; every call blocks.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/recycled_bytes.h"
#include "engine/model/packed_pass.h"
#include "engine/model/transformer.h"
#include "engine/training/adapted_model.h"
#include "engine/training/micro_batch.h"
#include "engine/training/objective.h"
#include "engine/training/parallel.h"
#include "engine/training/schedule.h"
#include "engine/training/tensor_parallel.h"
#include "engine/training/training_state.h"

namespace stretto::engine {
struct TrainerOptions {
  DType dtype = DType::kBF16;       // of weights and activations
  int64_t max_sequence_length = 0;  // prompt + completion; see TransformerOptions
  float temperature = 1.0f;         // the generators' sampling temperature
  int64_t micro_batch_tokens = 4096;
  Checkpointing checkpointing = Checkpointing::kNone;
  size_t logits_bytes = PackedPassOptions{}.logits_bytes;
  // PackedPassOptions::gradient_dtype; kBF16 with dtype kBF16 and one leaf of K.
  DType gradient_dtype = DType::kF32;
  LrSchedule schedule;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0;     // of matrices; norms and biases do not decay
  double max_grad_norm = 1.0;  // 0: no clipping
  ParallelOptions parallel;
  // With a rank: the policy is the model and an adapter, which alone is trained (docs/lora.md).
  // With one leaf of K.
  LoraOptions lora;
  // 8-bit moments change the bits, files don't (docs/parallel-training.md). With one leaf of K.
  OptimizerStorage storage;
};

// A step may be several updates, of mini-batches for one: they end in one version.
struct UpdateOfStep {
  int64_t index = 0, count = 1;
  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == count; }
};

struct StepResult {
  int64_t version = 0;  // after the step
  double loss = 0;
  double grad_norm = 0;  // before clipping
  double lr = 0;
  double entropy = 0;                     // mean over the trained tokens
  std::map<std::string, double> metrics;  // the objective's sums
  // Over tokens that were generated under the version the step started from.
  double logprob_mismatch_max = 0;
  double logprob_mismatch_sum = 0;
  int64_t num_compared_tokens = 0;
  int64_t num_trained_tokens = 0;   // completion tokens
  int64_t num_computed_tokens = 0;  // rows through the transformer
  // Of them, rows and trained tokens of micro-batches that had a gradient to go back with.
  int64_t num_backward_tokens = 0, num_backward_targets = 0;
  int64_t num_micro_batches = 0;
  // Set when a gradient was not finite, or larger than allowed: weights and moments are unchanged,
  // the version is raised all the same.
  bool skipped = false;
  std::string skip_reason;
  double forward_seconds = 0, objective_seconds = 0, backward_seconds = 0, optimizer_seconds = 0;
};

// Sequences to imitate: tokens from `loss_begin` (≥ 1) on are trained on.
struct SupervisedSequence {
  std::vector<int32_t> ids;
  int64_t loss_begin = 1;
};

struct BatchLogProbs {
  // [group][completion][token]
  std::vector<std::vector<std::vector<float>>> logprobs, entropy;
};

// The weights of one version on the host, in the dtype of computation. Immutable, shareable.
class HostWeights {
 public:
  HostWeights(std::shared_ptr<const ParameterLayout> layout, DType dtype, int64_t version)
      : layout_(std::move(layout)),
        dtype_(dtype),
        version_(version),
        size_(static_cast<size_t>(layout_->size()) * SizeOf(dtype)),
        flat_(TakeBytes(size_)) {}
  int64_t version() const { return version_; }
  DType dtype() const { return dtype_; }
  // In the order of ExpectedTensors.
  const std::vector<Parameter>& parameters() const { return layout_->parameters(); }
  // Row-major, little-endian elements of a parameter; valid as long as this object.
  absl::Span<const uint8_t> bytes(const Parameter& parameter) const;
  uint8_t* data() { return flat_.get(); }

 private:
  std::shared_ptr<const ParameterLayout> layout_;
  DType dtype_;
  int64_t version_;
  size_t size_;
  std::shared_ptr<uint8_t> flat_;
};

// What, beside the tensors, decides the steps to come.
struct TrainerCounters {
  int64_t version = 0;          // steps taken, skipped ones included
  int64_t optimizer_steps = 0;  // updates applied: AdamW's bias correction
};

class TrainerEngine {
 public:
  // Allocates everything. `device`, `clock` and `group` outlive the engine; without a group it is
  // alone. ResourceExhausted, or InvalidArgument naming the option.
  static absl::StatusOr<std::unique_ptr<TrainerEngine>> Create(Device& device,
                                                               const ModelConfig& config,
                                                               const TrainerOptions& options,
                                                               Clock& clock = Clock::Real(),
                                                               Communicator* group = nullptr);
  ~TrainerEngine();

  // Masters from a model file (CheckShapes first), moments zero, version 0. A NaN or infinity among
  // the weights is an error that names the tensor. With LoRA the model is the base, and `source`
  // outlives the engine; the adapter is `adapter`, or A drawn as a pure function of `seed` (Kaiming
  // uniform, as PEFT does) and B zeros.
  absl::Status LoadModel(const TensorSource& source, uint64_t seed = 1,
                         const TensorSource* adapter = nullptr);
  // The base alone, before a checkpoint is restored; it has no part in checkpoints. Without LoRA it
  // does nothing.
  absl::Status LoadBase(const TensorSource& source);
  // Masters drawn from normals of standard deviation `std` (norm weights 1, biases 0): a pure
  // function of the seed. For models trained from nothing.
  absl::Status InitRandom(uint64_t seed, double std = 0.02);

  // One optimizer step. An invalid batch is InvalidArgument and changes nothing. A gradient whose
  // norm is above `skip_above_norm` (the same on all ranks) is skipped like one that isn't finite.
  // Of a step's several updates the last raises the version, and the first alone is compared with
  // the generators' log-probs.
  absl::StatusOr<StepResult> Step(const TrainBatch& batch, const Objective& objective,
                                  double skip_above_norm = std::numeric_limits<double>::infinity(),
                                  const UpdateOfStep& update = {});
  // A step that changes nothing but the version.
  void PassStep() { ++counters_.version; }
  // Cross-entropy on sequences, with the same machinery.
  absl::StatusOr<StepResult> SupervisedStep(absl::Span<const SupervisedSequence> sequences);
  // Log-probs under the current weights, or the values of a model with a value head; nothing
  // changes.
  absl::StatusOr<BatchLogProbs> LogProbs(const TrainBatch& batch);

  // A copy of the current weights; all ranks make it at the same time under fsdp. The first form
  // is for layouts in which every rank has them all.
  std::shared_ptr<const HostWeights> GetWeights();
  absl::StatusOr<std::shared_ptr<const HostWeights>> GatherWeights();
  // Rows [row_begin, row_end) of a parameter, for export (RowReader): kF32 gives the masters, kBF16
  // the weights of computation. FailedPrecondition where this rank doesn't hold them all.
  bool HoldsAll(DType dtype) const;  // that ReadRows reads
  absl::Status ReadRows(const Parameter& parameter, int64_t row_begin, int64_t row_end, DType dtype,
                        void* dst);

  int64_t version() const { return counters_.version; }
  const ModelConfig& config() const;
  const TrainerOptions& options() const { return options_; }
  const ParameterLayout& layout() const { return *layout_; }  // the model's
  // What has masters and moments: the model's parameters, or those of its adapter.
  const ParameterLayout& trained_layout() const { return *trained_layout_; }
  int64_t num_parameters() const;
  int64_t num_trained_parameters() const;
  // HashOfBase of the base; empty without LoRA, or before it is there.
  std::string base_hash() const { return adapted_ != nullptr ? adapted_->base_hash() : ""; }
  size_t device_bytes() const;  // held by tensors
  NumericProfile profile() const;

  // The ranks that share this rank's copy of the model; null: nobody else.
  const Communicator* leaves_group() const {
    return tensor_ == nullptr ? nullptr : tensor_->leaves();
  }

  // What this rank holds, but for activations.
  MemoryLedger memory() const;

  // For checkpoints: the state is these three flat f32 tensors, of the parameters of
  // trained_layout(), and the counters. Where it is
  // divided, all ranks download at the same time and each gets everything; each uploads everything
  // and keeps its part.
  using StateTensor = engine::StateTensor;
  absl::Status DownloadState(StateTensor which, const Parameter& parameter, float* dst);
  void UploadState(StateTensor which, const Parameter& parameter, const float* src);
  const TrainerCounters& counters() const { return counters_; }
  // OK while the state is that of a finished step: an update that failed leaves one of no use.
  const absl::Status& state_status() const { return broken_; }
  // What this rank is to write of a checkpoint (TrainingState::PartsToWrite); nothing that was
  // enqueued is still under way.
  std::vector<StatePart> PartsToWrite();
  // Asked before the masters or moments change for the first time from now on.
  void AddStateReader(std::shared_ptr<StateReader> reader) { state_->AddReader(std::move(reader)); }
  // Of all ranks; null: it is alone.
  Communicator* group() const { return world_; }
  Device& device() const { return device_; }
  Stream& stream() { return *stream_; }
  // After all UploadState calls: weights follow from the masters.
  absl::Status FinishRestore(const TrainerCounters& counters);

 private:
  // A micro-batch on its way: the gradients of its targets.
  struct Targets {
    std::vector<float> d_logprobs, d_entropy;
    bool any = false, any_entropy = false;  // not all zeros
  };
  TrainerEngine(Device& device, const TrainerOptions& options, Clock& clock, Communicator* group);
  absl::Status Allocate(const ModelConfig& config);
  absl::Status AllocateAdapted(const ModelConfig& config);
  absl::Status LoadAdapter(uint64_t seed, const TensorSource* adapter);
  absl::Status ReadAdaptedRows(const Parameter& parameter, int64_t row_begin, int64_t row_end,
                               DType dtype, void* dst);
  // What passes read.
  const ModelWeights& weights() {
    return adapted_ != nullptr ? adapted_->weights() : state_->weights();
  }
  const Tensor& flat_weights() const {
    return adapted_ != nullptr ? adapted_->flat_weights() : state_->flat_weights();
  }
  MicroBatchLimits Limits() const;
  // Whether all ranks of the group are about to do the same; an error names those that aren't.
  absl::Status AgreeOn(const TrainBatch& batch);
  // The results of this rank's leaves, by leaf.
  using LeafResults = std::map<int64_t, StepResult>;
  struct StepContext {
    const TrainBatch& batch;
    const std::vector<MicroBatch>& micro_batches;
    const Objective& objective;
    const LeafPlan& plan;
  };
  absl::StatusOr<StepResult> TakeStep(const TrainBatch& batch, const Objective& objective);
  // The tokens of each rank's last pass of the step, or of its pass of a round.
  TiedEmbeddingSum::IdsOfRanks IdsOfLastPasses(const StepContext& step) const;
  TiedEmbeddingSum::IdsOfRanks IdsOfRound(const StepContext& step,
                                          const std::vector<int64_t>& leaf_of_rank) const;
  absl::Status RunLeaves(const StepContext& step, LeafResults& results);
  absl::Status RunRounds(const StepContext& step, LeafResults& results);
  absl::Status RunRound(const StepContext& step, int64_t round, LeafResults& results);
  // All leaves' results in one, the same on every rank.
  absl::StatusOr<StepResult> JoinResults(const LeafPlan& plan, LeafResults results);
  Targets ForwardMicroBatch(const TrainBatch& batch, const MicroBatch& micro_batch,
                            const Objective& objective, StepResult& result);
  void BackwardMicroBatch(const Targets& targets, StepResult& result);
  void EvaluateObjective(const TrainBatch& batch, const MicroBatch& micro_batch,
                         const Objective& objective, absl::Span<const float> logprobs,
                         absl::Span<const float> entropy, absl::Span<float> d_logprobs,
                         absl::Span<float> d_entropy, StepResult& result);
  absl::Status Update(StepResult& result);

  Device& device_;
  TrainerOptions options_;
  Clock& clock_;
  // Of the whole model; of what ranks with the same leaves hold of it (mostly the same).
  std::shared_ptr<const ParameterLayout> layout_, held_layout_;
  std::shared_ptr<const ParameterLayout> trained_layout_;  // layout_, or the adapter's
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Transformer> transformer_;
  std::unique_ptr<Communicator> own_group_;  // of one, for layouts that want a group
  Communicator* world_ = nullptr;            // all ranks; null: alone
  std::unique_ptr<TensorParallel> tensor_;   // of a model in leaves
  Communicator* group_ = nullptr;            // ranks with the same leaves; null: alone
  std::unique_ptr<AdaptedModel> adapted_;    // with LoRA
  std::unique_ptr<TrainingState> state_;
  std::unique_ptr<TrainingPass> pass_;
  TrainerCounters counters_;
  double skip_above_norm_ = 0;  // of the step under way
  UpdateOfStep update_;
  absl::Status broken_;  // why the state is not that of a finished step
};
}  // namespace stretto::engine
