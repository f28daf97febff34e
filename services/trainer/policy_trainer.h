// The policy in training: the engine with its masters and optimizer, the versions that others may
// fetch, and the checkpoints. A step is taken once: asking again for one of the two that were taken
// last gives its first result. Thread-safe; calls that need the engine run one at a time. Knows no
// gRPC.
//
// A run with several trainers (cluster.trainers) has a group of ranks, of which this is one: it has
// no engine until it has joined a group, every rank is given the same calls, and rank 0 alone holds
// versions for generators.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/files.h"
#include "config/run_config.h"
#include "engine/formats/export_hf.h"
#include "engine/training/checkpoint_writer.h"
#include "engine/training/trainer_engine.h"
#include "engine/weights/store.h"
#include "services/common/metrics.h"
#include "services/common/model_host.h"
#include "services/trainer/delta_encoder.h"
#include "services/trainer/group_seat.h"
#include "services/trainer/ppo_batch.h"
#include "services/trainer/step_objective.h"

namespace stretto::services {
struct StepRequest {
  int64_t step = 0;              // produces version `step`
  int64_t base_version = 0;      // step − 1
  std::string base_hash;         // empty: not checked; it may be under way still
  uint64_t group_epoch = 0;      // 0: a trainer that is alone
  bool generators_wait = false;  // nothing is being generated meanwhile
  absl::optional<double> kl_coef;
  // A gradient with a larger norm changes nothing.
  double skip_above_norm = std::numeric_limits<double>::infinity();
  engine::TrainBatch batch;
  std::vector<std::vector<double>> rewards;  // by group and completion
  double reward_mean = 0, reward_std = 0;    // of them, for the metrics
};

struct StepOutcome {
  int64_t version = 0;
  std::string hash;
  std::map<std::string, double> metrics;
  bool skipped = false;
  std::string skip_reason;
  double seconds = 0;
  int64_t num_tokens = 0;
};

// A group that this trainer is to join, as rank `rank`.
struct GroupRequest {
  engine::GroupTable table;
  int rank = 0;
  std::string layout;  // "ddp", "zero1", "zero2", "fsdp"
  int64_t tensor_parallel = 1;
  absl::Duration timeout = absl::Seconds(60);
};

struct SaveRequest {
  std::string extra_json;  // comes back in TrainerState::restored_extra_json
  uint64_t group_epoch = 0;
  absl::optional<int64_t> version;  // that the trainer must be at; nullopt: any
};

struct TrainerState {
  int64_t version = -1;  // -1: in no group yet
  std::string hash;
  uint64_t group_epoch = 0;  // 0: alone
  int rank = 0, num_ranks = 1;
  std::string restored_extra_json;  // of the checkpoint loaded at start; empty: fresh
  int64_t checkpoint_version = -1;  // newest durable one
  std::string checkpoint_hash;
  std::string notice;  // what was passed over at the start: damaged checkpoints; empty: nothing
  int64_t num_parameters = 0;
  double busy_seconds = 0;
};

class PolicyTrainer {
 public:
  // Restores the newest checkpoint under <run dir>/checkpoints that is whole (damaged ones are
  // named in the log and passed over; if all are damaged that is the error), or begins with the
  // model; in a run of several trainers that is left to JoinGroup. Blocks; but where the policy
  // begins as the model's files have it, version 0 is there at once and the engine is made
  // meanwhile, in a thread of its own: calls that need it wait, and an error is told to
  // `on_failed`.
  struct Parts {
    const ModelHost* host = nullptr;  // all of them outlive the trainer
    Metrics* metrics = nullptr;
    GroupSeat* seat = nullptr;
    Files* files = nullptr;
    std::function<void(const absl::Status&)> on_failed;
  };
  static absl::StatusOr<std::unique_ptr<PolicyTrainer>> Open(const RunConfig& run, Parts parts);
  ~PolicyTrainer();
  // Multiply-adds (two operations each) a second that this machine's products reach, for the
  // utilization of it that steps are reported with. 0: unknown. Before the first step.
  void SetMatrixCeiling(double flops) { matrix_ceiling_ = flops; }
  // The device's threads that compute while generators of the same machine do; 0: all. Before the
  // first step.
  void SetThreadsBesideGenerators(int num_threads) { threads_beside_generators_ = num_threads; }

  // Joins a group for which the seat has been prepared, once the step under way has ended: what was
  // done in an earlier group is given up, and the newest checkpoint restored, the same on all
  // ranks. Repeating it gives the state. Blocks until all ranks are there; an error names who
  // isn't.
  absl::StatusOr<TrainerState> JoinGroup(const GroupRequest& request);

  // The outcome of the request's step if it is one of the two taken last. FAILED_PRECONDITION:
  // neither this one nor the next is asked for, or the base or the group is another. nullopt: it
  // can be taken now.
  absl::StatusOr<absl::optional<StepOutcome>> Look(const StepRequest& request) const;
  // Blocks while the version that a step starts from is still being computed.
  absl::Status AwaitVersion(int64_t version, const std::function<bool()>& is_cancelled) const;
  // Blocks for the computation, which is not interrupted.
  absl::StatusOr<StepOutcome> TakeStep(const StepRequest& request);

  // Begins a checkpoint, which is written while training goes on. Of a group's ranks all are asked;
  // each writes its share. Repeating it for a save that is under way, or done, changes nothing.
  absl::Status BeginSave(const SaveRequest& request);
  // Whether a save of this version is the last that was begun, or the one that was restored.
  bool HasSave(int64_t version, uint64_t group_epoch) const;
  // Blocks until that save is over; how it went. FAILED_PRECONDITION: it was never begun.
  absl::StatusOr<engine::SaveReport> AwaitSave(int64_t version, uint64_t group_epoch,
                                               const std::function<bool()>& is_cancelled) const;
  // A Hugging Face folder. "bf16": the weights of computation, "f32": the masters.
  absl::StatusOr<int64_t> Export(const std::string& path, const std::string& dtype);

  TrainerState State() const;
  const engine::WeightsStore& store() const { return store_; }
  DeltaEncoder& delta_encoder() { return encoder_; }

 private:
  PolicyTrainer(const RunConfig& run, const Parts& parts);
  // Whether the policy begins with the tensors of the model's files.
  bool BeginsWithFiles() const;
  // Version 0 from them, and a thread that makes the engine.
  absl::Status OpenMeanwhile(std::function<void(const absl::Status&)> on_failed);
  // Layout and tensor_parallel of a group, or of a trainer that is alone.
  absl::Status OpenEngine(const std::string& layout, int64_t tensor_parallel)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  absl::Status CreateEngine(const std::string& layout, int64_t tensor_parallel)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  void OpenWriter() ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  absl::Status RestoreOrBegin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  // After an update that ended half done (a disk's error): a rank's peers are told, so that they
  // needn't wait, and the next group begins at a checkpoint; alone that is done at once.
  void GiveUpState(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  std::string CheckpointRoot() const;
  void SaveIsOver(const engine::SaveReport& report);
  // In a group: what all ranks have come to, the same on each.
  absl::Status Agreed(const absl::Status& mine) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  bool IsFirstRank() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_) {
    return group_ == nullptr || group_->rank() == 0;
  }
  absl::Status CheckGroup(uint64_t group_epoch) const;
  // Gives rows of the policy as they are now; while engine_mutex_ is held.
  absl::StatusOr<engine::RowReader> ReadPolicy(DType type)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  // Makes the engine's weights the newest version of the store; its hash.
  absl::StatusOr<std::string> Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  // While it lives, the step leaves generators that share the machine their processors.
  std::vector<std::shared_ptr<void>> LeaveThreads(const StepRequest& request) const;
  absl::StatusOr<StepOutcome> Compute(const StepRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  // What a step's updates, one or many, came to.
  struct Computed {
    engine::StepResult result;
    std::map<std::string, double> metrics;  // of the objective
    absl::Status refused;                   // what it refused first
    absl::optional<Mismatch> mismatch;
    double rank_gradient = 0;
  };
  absl::StatusOr<Computed> Update(const StepRequest& request, const rl::ObjectiveOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  void AddMetrics(const StepRequest& request, const engine::StepResult& result,
                  StepOutcome& outcome) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  absl::StatusOr<StepSums> SumsOfAll(const engine::TrainBatch& batch, const StepSums& mine)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);

  // PPO, in policy_trainer_ppo.cc: a critic beside the policy, and several updates a step.
  bool has_critic() const { return run_.algorithm.name == "ppo"; }
  absl::Status CreateCritic(engine::TrainerOptions options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  absl::Status LoadCritic() ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  struct PpoUpdates;
  absl::StatusOr<Computed> UpdateByPpo(const StepRequest& request,
                                       const rl::ObjectiveOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  absl::StatusOr<PpoBatch> CollectPpoBatch(const StepRequest& request, double kl_coef)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  absl::Status UpdatePolicy(const StepRequest& request, const rl::Objective& objective,
                            const MiniBatch& batch, const engine::UpdateOfStep& update,
                            PpoUpdates& updates) ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  Computed ComputedOf(PpoUpdates& updates, const PpoBatch& batch, int64_t num_updates) const;
  absl::Status UpdateCritic(const rl::ObjectiveOptions& options, const MiniBatch& batch,
                            const engine::UpdateOfStep& update, PpoUpdates& updates)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  double Utilization(const engine::StepResult& result, double seconds) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  void Report(const StepOutcome& outcome);
  void ReportGroup() ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine_mutex_);
  void ReportQuantizationGap(const StepOutcome& outcome);

  const RunConfig run_;
  std::shared_ptr<const engine::TensorSource> start_adapter_ ABSL_GUARDED_BY(engine_mutex_);
  const ModelHost* host_;
  Metrics* metrics_;
  GroupSeat* seat_;
  Files& files_;
  double matrix_ceiling_ = 0;
  int threads_beside_generators_ = 0;
  engine::WeightsStore store_;
  DeltaEncoder encoder_;

  mutable absl::Mutex engine_mutex_;  // before state_mutex_
  // Outlives the engine; null: alone.
  std::shared_ptr<engine::Communicator> group_ ABSL_GUARDED_BY(engine_mutex_);
  std::unique_ptr<engine::TrainerEngine> engine_ ABSL_GUARDED_BY(engine_mutex_);
  // Trained beside it, at the same version; null: the algorithm has none.
  std::unique_ptr<engine::TrainerEngine> critic_ ABSL_GUARDED_BY(engine_mutex_);

  absl::Status open_status_ ABSL_GUARDED_BY(engine_mutex_);  // why there is no engine
  std::thread opener_;                                       // holds engine_mutex_

  mutable absl::Mutex state_mutex_;
  TrainerState state_ ABSL_GUARDED_BY(state_mutex_);
  absl::optional<StepOutcome> last_outcome_ ABSL_GUARDED_BY(state_mutex_);
  absl::optional<StepOutcome> outcome_before_ ABSL_GUARDED_BY(state_mutex_);  // of this life
  // The save that was begun last, or the checkpoint that was restored.
  struct SaveState {
    int64_t version = -1;
    std::string extra_json;
    bool is_over = false;
    engine::SaveReport report;
  };
  SaveState save_ ABSL_GUARDED_BY(state_mutex_);
  // Its thread reports to this object, so it ends first. Null: there is no engine.
  std::unique_ptr<engine::CheckpointWriter> writer_ ABSL_GUARDED_BY(engine_mutex_);
};
}  // namespace stretto::services
