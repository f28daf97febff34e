// The policy in training and its checkpoints: begun between two steps, written while training goes
// on, restored when a trainer starts or a group begins.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "services/common/log.h"
#include "services/trainer/outcome_json.h"
#include "services/trainer/policy_trainer.h"

namespace stretto::services {
namespace {
// How often somebody who waits looks whether it is still wanted.
constexpr absl::Duration kLookAround = absl::Milliseconds(200);
}  // namespace

std::string PolicyTrainer::CheckpointRoot() const { return JoinPath(run_.run.dir, "checkpoints"); }

void PolicyTrainer::OpenWriter() {
  engine::CheckpointWriterOptions options;
  options.root = CheckpointRoot();
  options.keep = std::max<int64_t>(1, run_.train.keep_checkpoints);
  if (run_.train.checkpoint_kind == "incremental") options.max_chain = run_.train.checkpoint_chain;
  options.on_done = [this](const engine::SaveReport& report) { SaveIsOver(report); };
  writer_ = std::make_unique<engine::CheckpointWriter>(files_, std::move(options));
}

absl::Status PolicyTrainer::RestoreOrBegin() {
  std::string notice;
  const absl::StatusOr<engine::CheckpointInfo> info = engine::LoadNewestCheckpoint(
      files_, CheckpointRoot(), *engine_,
      [&notice](const std::string& folder, const absl::Status& why) {
        LogWarning("checkpoint ", folder, " cannot be used: ", why.ToString());
        absl::StrAppend(&notice, notice.empty() ? "" : "; ", "checkpoint ", folder,
                        " is damaged and was passed over: ", why.message());
      },
      critic_.get());
  if (absl::IsNotFound(info.status())) {
    RETURN_IF_ERROR(engine_->LoadModel(*host_->files.tensors, run_.run.seed, start_adapter_.get()));
    return has_critic() ? LoadCritic() : absl::OkStatus();
  }
  RETURN_IF_ERROR(info.status());
  ASSIGN_OR_RETURN(const CheckpointExtra extra, ParseExtra(info->extra_json));
  LogInfo("resuming from ", info->path);
  absl::MutexLock lock(&state_mutex_);
  if (!notice.empty()) {
    state_.notice = absl::StrCat(notice, "; resumed from the older ", info->path);
  }
  state_.restored_extra_json = extra.caller_json;
  state_.checkpoint_version = info->counters.version;
  state_.checkpoint_hash = info->checkpoint_hash;
  last_outcome_ = extra.last_outcome;
  outcome_before_.reset();
  // Asked for again, it is there.
  save_ = SaveState();
  save_.version = info->counters.version;
  save_.extra_json = extra.caller_json;
  save_.is_over = true;
  save_.report.info = *info;
  return absl::OkStatus();
}

void PolicyTrainer::GiveUpState(const absl::Status& why) {
  if (group_ != nullptr) {
    group_->Abort(why.message());
    return;
  }
  LogWarning("the update ended half done: ", why.message());
  absl::Status status = RestoreOrBegin();
  if (status.ok()) status = Publish().status();
  if (status.ok()) {
    LogInfo("back at version ", engine_->version());
  } else {
    LogWarning("nothing can be restored: ", status.message());
  }
}

bool PolicyTrainer::HasSave(int64_t version, uint64_t group_epoch) const {
  absl::MutexLock lock(&state_mutex_);
  return save_.version == version && state_.group_epoch == group_epoch;
}

absl::Status PolicyTrainer::BeginSave(const SaveRequest& request) {
  absl::MutexLock lock(&engine_mutex_);
  RETURN_IF_ERROR(CheckGroup(request.group_epoch));
  if (engine_ == nullptr) return absl::FailedPreconditionError("this trainer is in no group yet");
  const int64_t version = engine_->version();
  if (request.version.value_or(version) != version) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", *request.version, " cannot be saved: this trainer is at version ", version));
  }
  CheckpointExtra extra{.caller_json = request.extra_json, .last_outcome = {}};
  bool is_repeat = false;
  {
    absl::MutexLock state(&state_mutex_);
    is_repeat = save_.version == version && save_.extra_json == request.extra_json &&
                (!save_.is_over || save_.report.status.ok());
    extra.last_outcome = last_outcome_;
  }
  // Ranks begin a save together or not at all.
  const absl::Status all = Agreed(is_repeat ? absl::OkStatus() : absl::NotFoundError("not begun"));
  if (all.ok()) return absl::OkStatus();
  if (group_ != nullptr) RETURN_IF_ERROR(group_->status());
  writer_->Wait();  // so that whatever it reports from now on is of this save
  {
    absl::MutexLock state(&state_mutex_);
    save_ = SaveState();
    save_.version = version;
    save_.extra_json = request.extra_json;
  }
  const absl::Status status = writer_->Start(*engine_, ToJson(extra), critic_.get());
  if (!status.ok()) {
    absl::MutexLock state(&state_mutex_);
    save_.is_over = true;
    save_.report.status = status;
  }
  return status;
}

absl::StatusOr<engine::SaveReport> PolicyTrainer::AwaitSave(
    int64_t version, uint64_t group_epoch, const std::function<bool()>& is_cancelled) const {
  for (;;) {
    RETURN_IF_ERROR(CheckGroup(group_epoch));
    absl::MutexLock lock(&state_mutex_);
    if (save_.version != version) {
      return absl::FailedPreconditionError(
          absl::StrCat("no save of version ", version, " has been begun here"));
    }
    if (save_.is_over) return save_.report;
    if (is_cancelled()) return absl::CancelledError("nobody waits any longer");
    state_mutex_.AwaitWithTimeout(absl::Condition(&save_.is_over), kLookAround);
  }
}

// On the writer's thread.
void PolicyTrainer::SaveIsOver(const engine::SaveReport& report) {
  const int64_t version = report.info.counters.version;
  if (report.status.ok()) {
    LogInfo("checkpoint of version ", version, " (", report.info.checkpoint_hash, ") at ",
            report.info.path, " in ", report.seconds, " s",
            report.is_incremental ? ", incremental" : "", ": ", report.bytes_written,
            " bytes, training waited ", report.blocked_seconds, " s");
  } else {
    LogWarning(report.status.message());
  }
  metrics_->counter("stretto_trainer_checkpoints_total", "Saves that ended durable.")
      .Add(report.status.ok() ? 1 : 0);
  metrics_->counter("stretto_trainer_checkpoint_failures_total", "Saves that failed.")
      .Add(report.status.ok() ? 0 : 1);
  metrics_
      ->gauge("stretto_trainer_checkpoint_seconds",
              "Of the last save, from its beginning until it was durable or failed.")
      .Set(report.seconds);
  metrics_
      ->gauge("stretto_trainer_checkpoint_blocked_seconds",
              "Of the last save, those in which training waited.")
      .Set(report.blocked_seconds);
  metrics_->gauge("stretto_trainer_checkpoint_bytes", "Written by this rank in the last save.")
      .Set(static_cast<double>(report.bytes_written));
  if (report.status.ok()) {
    metrics_->gauge("stretto_trainer_checkpoint_version", "Of the newest durable checkpoint.")
        .Set(static_cast<double>(version));
  }
  absl::MutexLock lock(&state_mutex_);
  if (save_.version != version) return;
  save_.is_over = true;
  save_.report = report;
  if (!report.status.ok()) return;
  state_.checkpoint_version = version;
  state_.checkpoint_hash = report.info.checkpoint_hash;
}
}  // namespace stretto::services
