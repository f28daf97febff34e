// Versions, steps, evaluations and the end of a run.
#include "services/coordinator/core.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "rl/staleness.h"

namespace stretto::services {
namespace {
// That fail, one after the other, before a stop goes without.
constexpr int64_t kMaxSavesOfStop = 3;
}  // namespace

Core::Core(CoreOptions options, RestoredRun restored)
    : options_(std::move(options)),
      order_(options_.num_train_lines, options_.seed, options_.shuffle),
      epochs_(std::move(restored.member_epochs)),
      versions_(std::move(restored.versions)),
      kl_coefs_(std::move(restored.kl_coefs)),
      evaluated_(restored.evaluated.begin(), restored.evaluated.end()),
      kl_coef_(restored.next_kl_coef >= 0 ? restored.next_kl_coef : options_.kl_coef),
      next_group_(restored.next_group),
      next_position_(restored.next_position) {
  checkpoints_.version = checkpoints_.begun_version = restored.checkpoint_version;
  STRETTO_CHECK(options_.prompts_per_step > 0 && options_.group_size > 0);
  STRETTO_CHECK(options_.min_trainers > 0 && options_.min_trainers <= options_.num_trainers);
  STRETTO_CHECK(options_.num_trainers % options_.ranks_per_copy == 0);
  // A trainer that is alone is in no group, whatever groups the run has had before.
  if (has_group()) trainers_.epoch = restored.trainer_epoch;
  if (!versions_.empty()) version_ = {versions_.rbegin()->first, versions_.rbegin()->second};
  for (Group& group : restored.groups) {
    const bool is_replaced = group.kind == GroupKind::kTrain &&
                             group.state == GroupState::kRejected && group.reason != kNoSignal;
    if (is_replaced) ++num_replaced_[group.round];
    groups_.emplace(group.id, std::move(group));
  }
  // A run that was over is over again as soon as it is looked at.
  TryEnd();
  if (!restored.paused || IsOver()) return;
  paused_ = true;
  Emit(
      RecordEvent{"paused still, as before the coordinator was started again: "
                  "`stretto status RUN_DIR --resume` goes on"});
}

std::vector<Command> Core::TakeCommands() { return std::exchange(commands_, {}); }

void Core::OnTick(int64_t now_ns) { Advance(now_ns); }

void Core::OnPause(bool pause, int64_t now_ns) {
  if (paused_ != pause) Emit(RecordEvent{pause ? "paused" : "resumed"});
  paused_ = pause;
  Advance(now_ns);
}

void Core::OnCheckpointRequest(int64_t now_ns) {
  checkpoints_.requested_version = version_number();
  Advance(now_ns);
}

void Core::OnStop(int64_t now_ns) {
  if (IsOver() || stopping_) return;
  stopping_ = true;
  // Whoever asks to stop waits for a save that may be given up: it is tried anew, and at once.
  checkpoints_.num_failures_in_row = 0;
  checkpoints_.not_before_ns = 0;
  Emit(RecordEvent{"stop requested"});
  for (auto& [id, group] : groups_) {
    if (group.state == GroupState::kGenerating) Emit(CancelGenerate{id, group.attempt});
  }
  Advance(now_ns);
}

// For people; what repeats itself is said once.
void Core::Note(const std::string& text) {
  if (text == last_note_) return;
  last_note_ = text;
  Emit(RecordEvent{text});
}

void Core::OnFault(const absl::Status& status, int64_t) { Fail(status); }

void Core::Fail(const absl::Status& status) { End(status, std::string(status.message())); }

void Core::End(const absl::Status& status, const std::string& detail) {
  if (ended_) return;
  ended_ = true;
  end_status_ = status;
  end_detail_ = detail;
  Emit(RecordEvent{status.ok() ? absl::StrCat("run ended: ", detail)
                               : absl::StrCat("run failed: ", detail)});
  Emit(EndRun{status, detail});
}

// Does all that can be done now. Every event ends here.
void Core::Advance(int64_t now_ns) {
  if (IsOver()) return;
  ExpireLeases(now_ns);
  if (!stopping_ && !paused_ && version_.number >= 0) {
    FinishEval();
    MakeEvalGroups();
    MakeGroups();
    Tokenize(now_ns);
    Dispatch(now_ns);
    Score(now_ns);
  }
  if (!stopping_) SyncWeights(now_ns);
  if (!IsOver()) DriveTrainer(now_ns);
  if (!IsOver()) TryEnd();
}

void Core::StepRecorded(const TakeStep& asked, const Version& version, double measured_kl) {
  version_ = version;
  versions_[version.number] = version.hash;
  const double num_rollouts = static_cast<double>(options_.prompts_per_step * options_.group_size);
  kl_coef_ = options_.kl_controller.Next(kl_coef_, measured_kl, num_rollouts);
  Emit(RecordVersion{version});
  for (auto it = groups_.begin(); it != groups_.end();) {
    const bool is_over = it->second.kind == GroupKind::kTrain && it->second.round <= asked.step;
    it = is_over ? groups_.erase(it) : std::next(it);
  }
}

// An evaluation is complete when each of its prompts is scored or rejected.
void Core::FinishEval() {
  if (!EvalIsDue()) return;
  const auto groups = GroupsOf(GroupKind::kEval, version_.number);
  if (groups.empty()) return;
  RecordEval record{version_.number, {}, 0};
  for (const Group* group : groups) {
    if (group->state == GroupState::kScored) {
      record.scored.push_back(group->id);
    } else if (group->state == GroupState::kRejected) {
      ++record.num_rejected;
    } else {
      return;
    }
  }
  evaluated_.insert(version_.number);
  for (const Group* group : groups) groups_.erase(group->id);
  Emit(std::move(record));
}

void Core::TryEnd() {
  if (IsOver() || (trainers_.phase == TrainerGroup::Phase::kReady && trainers_.is_busy())) return;
  const bool is_saved = version_.number >= 0 && checkpoints_.version >= version_.number;
  if (stopping_) {
    const bool gives_up = checkpoints_.num_failures_in_row >= kMaxSavesOfStop;
    if (is_saved || gives_up || !TrainerHasVersion() || version_.number <= 0) {
      End(absl::OkStatus(),
          absl::StrCat("stopped at step ", version_number(), " of ", options_.num_steps,
                       "; the same command resumes",
                       is_saved || !gives_up
                           ? ""
                           : absl::StrCat(" from the newest checkpoint: ", checkpoints_.error)));
    }
    return;
  }
  if (version_.number < options_.num_steps || !is_saved || EvalIsDue()) return;
  End(absl::OkStatus(), "done");
}

RunPhase Core::phase() const {
  if (ended_) return end_status_.ok() ? RunPhase::kDone : RunPhase::kFailed;
  if (stopping_) return RunPhase::kStopping;
  if (paused_) return RunPhase::kPaused;
  return detail().empty() ? RunPhase::kRunning : RunPhase::kWaiting;
}

std::string Core::activity() const {
  if (trainers_.phase == TrainerGroup::Phase::kPreparing ||
      trainers_.phase == TrainerGroup::Phase::kJoining) {
    return "forming the trainers' group";
  }
  if (trainers_.is_busy() && trainer_activity_ != "waiting") return trainer_activity_;
  const bool waits_for_save = stopping_ || version_.number >= options_.num_steps || TrainersWait();
  if (save_.version >= 0 && (waits_for_save || !save_.is_begun)) return "saving a checkpoint";
  if (EvalIsDue()) return "evaluating";
  return "generating";
}

std::string Core::detail() const {
  if (ended_) return end_detail_;
  std::string missing;
  for (const auto& pool :
       {std::pair(PoolKind::kTrainer, "a trainer"), std::pair(PoolKind::kGenerator, "a generator"),
        std::pair(PoolKind::kScorer, "a scorer")}) {
    const bool has_one = std::any_of(members_.begin(), members_.end(), [&](const auto& entry) {
      return entry.second.pool == pool.first && entry.second.is_live;
    });
    if (!has_one) absl::StrAppend(&missing, missing.empty() ? "waiting for " : ", ", pool.second);
  }
  if (!missing.empty()) return missing;
  if (trainers_.phase == TrainerGroup::Phase::kNone && NumLiveTrainers() < options_.num_trainers) {
    return absl::StrCat("waiting for trainers: ", NumLiveTrainers(), " of ", options_.num_trainers,
                        " are there (at least ", options_.min_trainers, " must be)");
  }
  if (!checkpoints_.error.empty() && version_.number >= options_.num_steps) {
    return absl::StrCat("waiting to save: ", checkpoints_.error);
  }
  return no_reward_;
}
}  // namespace stretto::services
