// Checkpoints: when one is due, the save that goes on while the trainers train, and what follows
// when it fails. A checkpoint is recorded when all ranks have said that it is durable.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "services/coordinator/core.h"

namespace stretto::services {
namespace {
// Between attempts that fail, one after the other.
constexpr int64_t kMaxRetryNs = 60'000'000'000;
}  // namespace

// Daly's estimate ("A higher order estimate of the optimum checkpoint interval for restart dumps",
// 2006); its first term is Young's.
double CheckpointIntervalSeconds(double save_seconds, double mtbf_seconds) {
  if (save_seconds >= 2 * mtbf_seconds) return mtbf_seconds;
  const double x = save_seconds / (2 * mtbf_seconds);
  const double interval =
      std::sqrt(2 * save_seconds * mtbf_seconds) * (1 + std::sqrt(x) / 3 + x / 9) - save_seconds;
  return std::max(interval, save_seconds);
}

bool Core::TrainersWait() const {
  return WholeCopies(NumLiveTrainers()) > static_cast<int64_t>(trainers_.ranks.size()) &&
         version_.number > 0;
}

bool Core::CheckpointIsDue(int64_t v, int64_t now_ns) const {
  const CheckpointLog& log = checkpoints_;
  if (v <= log.version || now_ns < log.not_before_ns) return false;
  if (v == options_.num_steps || stopping_ || TrainersWait()) return true;
  if (log.requested_version > log.version) return true;
  if (v <= 0) return false;
  if (options_.checkpoint_every == kAutoCheckpoints) {
    return log.save_seconds < 0 || log.begun_ns < 0 ||
           static_cast<double>(now_ns - log.begun_ns) * 1e-9 >= log.interval_seconds;
  }
  const int64_t every = options_.checkpoint_every;
  return every > 0 && v / every > std::max<int64_t>(0, log.begun_version) / every;
}

void Core::BeginCheckpoint(int64_t now_ns) {
  save_ = CheckpointSave();
  save_.version = version_.number;
  for (const TrainerRank& rank : trainers_.ranks) {
    save_.awaited.insert(rank.name);
    Emit(BeginSave{rank.name, rank.epoch, trainers_.epoch, save_.version});
  }
  checkpoints_.begun_version = version_.number;
  checkpoints_.begun_ns = now_ns;
}

// Whether the answer is of the save under way, and the first of this member.
bool Core::IsAwaited(const std::string& member, uint64_t epoch, uint64_t group_epoch,
                     int64_t version) {
  return !IsOver() && Current(member, epoch) != nullptr && group_epoch == trainers_.epoch &&
         version == save_.version && save_.awaited.erase(member) > 0;
}

// What is begun is not recorded: whether it ends up on the disk nobody hears any more.
void Core::DropSave() {
  save_ = CheckpointSave();
  checkpoints_.begun_version = checkpoints_.version;
  checkpoints_.begun_ns = checkpoints_.saved_ns;
}

void Core::OnSaveBegun(const BeginSave& asked, const absl::Status& status, int64_t now_ns) {
  if (save_.is_begun || !IsAwaited(asked.member, asked.epoch, asked.group_epoch, asked.version)) {
    return;
  }
  if (!status.ok()) {
    DropSave();
    members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
    TrainersFailed(status, absl::StrCat("the checkpoint of version ", asked.version), now_ns);
    return;
  }
  if (!save_.awaited.empty()) return;
  save_.is_begun = true;
  for (const TrainerRank& rank : trainers_.ranks) {
    save_.awaited.insert(rank.name);
    Emit(AwaitSave{rank.name, rank.epoch, trainers_.epoch, asked.version});
  }
  Advance(now_ns);
}

bool Core::OnSaveOver(const AwaitSave& asked, const absl::Status& status, const SaveResult& result,
                      int64_t now_ns) {
  if (!save_.is_begun || !IsAwaited(asked.member, asked.epoch, asked.group_epoch, asked.version)) {
    return false;
  }
  if (!status.ok()) {
    const std::string what = absl::StrCat("the checkpoint of version ", asked.version);
    DropSave();
    members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
    if (has_group()) {
      TrainersFailed(status, what, now_ns);
    } else {  // a step may be under way, which says by itself whether the trainer is there
      Note(absl::StrCat(what, ": ", status.message()));
      Advance(now_ns);
    }
    return false;
  }
  if (save_.error.empty() && !result.error.empty()) {
    save_.error = has_group() ? absl::StrCat(asked.member, ": ", result.error) : result.error;
  }
  save_.seconds = std::max(save_.seconds, result.seconds);
  const bool is_saved = result.error.empty();
  if (save_.awaited.empty()) EndSave(now_ns);
  Advance(now_ns);
  return is_saved;
}

void Core::EndSave(int64_t now_ns) {
  const CheckpointSave save = save_;
  CheckpointLog& log = checkpoints_;
  if (save.error.empty()) {
    log.version = save.version;
    log.saved_ns = log.begun_ns;
    log.save_seconds = save.seconds;
    log.interval_seconds =
        CheckpointIntervalSeconds(save.seconds, options_.checkpoint_mtbf_seconds);
    log.num_failures_in_row = 0;
    log.error.clear();
    save_ = CheckpointSave();
    Emit(RecordCheckpoint{save.version});
    return;
  }
  DropSave();
  ++log.num_failures;
  const int64_t backoff = options_.retry_ns << std::min<int64_t>(20, log.num_failures_in_row++);
  log.not_before_ns = now_ns + std::min(kMaxRetryNs, backoff);
  const std::string newest = log.version < 0
                                 ? "there is none yet"
                                 : absl::StrCat("the newest is of version ", log.version);
  log.error = absl::StrCat("the checkpoint of version ", save.version, " could not be saved (",
                           newest, "): ", save.error);
  if (options_.stop_on_failed_save) {
    Fail(absl::UnavailableError(absl::StrCat(log.error, " (train.checkpoint_failure: stop)")));
  } else {
    Note(log.error);
  }
}
}  // namespace stretto::services
