// The policy in training as one rank of a group: joining, and what ranks agree on.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/collectives/agree.h"
#include "services/common/log.h"
#include "services/trainer/policy_trainer.h"
#include "services/trainer/rank_messages.h"

namespace stretto::services {
absl::StatusOr<TrainerState> PolicyTrainer::JoinGroup(const GroupRequest& request) {
  if (run_.cluster.trainers <= 1) {
    return absl::FailedPreconditionError("this trainer is alone (cluster.trainers: 1)");
  }
  absl::MutexLock lock(&engine_mutex_);
  const auto epoch = static_cast<uint64_t>(request.table.epoch);
  if (engine_ != nullptr && group_->status().ok() && CheckGroup(epoch).ok()) return State();
  // What this rank writes is finished or given up: no new group begins from a folder in which an
  // older one still writes.
  writer_ = nullptr;
  engine_ = nullptr;
  critic_ = nullptr;
  group_ = nullptr;
  {
    absl::MutexLock state(&state_mutex_);
    state_ = TrainerState();
    last_outcome_.reset();
    outcome_before_.reset();
    save_ = SaveState();
  }
  ASSIGN_OR_RETURN(group_, seat_->Join(request.table, request.rank, request.timeout));
  LogInfo("rank ", request.rank, " of ", group_->size(), " in group epoch ", epoch, ", ",
          request.layout,
          request.tensor_parallel == 1
              ? ""
              : absl::StrCat(", tensor_parallel ", request.tensor_parallel));
  {
    absl::MutexLock state(&state_mutex_);
    state_.rank = request.rank;
    state_.num_ranks = group_->size();
    state_.group_epoch = epoch;
  }
  absl::Status status = OpenEngine(request.layout, request.tensor_parallel);
  if (status.ok()) status = Publish().status();
  host_->files.tensors->LetPagesGo();
  if (!status.ok()) {
    // The others are told, in case they wait for this rank.
    group_->Abort(status.message());
    writer_ = nullptr;
    engine_ = nullptr;
    critic_ = nullptr;
    absl::MutexLock state(&state_mutex_);
    state_ = TrainerState();
    return status;
  }
  ReportGroup();
  return State();
}

absl::Status PolicyTrainer::CheckGroup(uint64_t group_epoch) const {
  absl::MutexLock lock(&state_mutex_);
  if (group_epoch == state_.group_epoch && (group_epoch > 0 || run_.cluster.trainers <= 1)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("group epoch ", group_epoch,
                                                    " is not this trainer's; its group epoch is ",
                                                    state_.group_epoch));
}

absl::Status PolicyTrainer::Agreed(const absl::Status& mine) const {
  return group_ == nullptr ? mine : engine::AgreeOnStatus(*group_, mine);
}

// The objective saw this rank's sequences; metrics are of all, in the order in which one trainer
// alone would have added them up.
absl::StatusOr<StepSums> PolicyTrainer::SumsOfAll(const engine::TrainBatch& batch,
                                                  const StepSums& mine) {
  if (group_ == nullptr) return mine;
  const engine::TrainerOptions& options = engine_->options();
  ASSIGN_OR_RETURN(
      const std::vector<engine::MicroBatch> micro_batches,
      engine::CutMicroBatches(batch, {options.micro_batch_tokens, options.max_sequence_length,
                                      engine_->config().vocab_size}));
  std::vector<engine::CompletionRef> order;
  for (const engine::MicroBatch& m : micro_batches) {
    order.insert(order.end(), m.completions.begin(), m.completions.end());
  }
  return GatherSums(*group_, mine, order);
}

void PolicyTrainer::ReportGroup() {
  if (group_ == nullptr) return;
  metrics_->gauge("stretto_trainer_group_epoch", "Of the group this rank is in.")
      .Set(static_cast<double>(group_->group().epoch));
  metrics_->gauge("stretto_trainer_group_size", "Ranks of the group.")
      .Set(static_cast<double>(group_->size()));
  metrics_->gauge("stretto_trainer_rank", "Of this process in the group.")
      .Set(static_cast<double>(group_->rank()));
  for (int kind = 0; kind < engine::kNumCollectiveKinds; ++kind) {
    const auto k = static_cast<engine::CollectiveKind>(kind);
    const engine::CollectiveTraffic traffic = group_->traffic(k);
    if (traffic.calls == 0) continue;
    const Labels labels = {{"kind", std::string(engine::Name(k))}};
    metrics_->gauge("stretto_trainer_group_sent_bytes", "Payload sent in this group.", labels)
        .Set(static_cast<double>(traffic.bytes_sent));
    metrics_
        ->gauge("stretto_trainer_group_exchange_seconds",
                "Exchanges under way in this group, waiting for other ranks included.", labels)
        .Set(traffic.seconds);
  }
}
}  // namespace stretto::services
