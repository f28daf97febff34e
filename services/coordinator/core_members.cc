// Members: joining, leases, leaving, and who may be given work.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "services/coordinator/core.h"

namespace stretto::services {
const char* PoolName(PoolKind pool) {
  switch (pool) {
    case PoolKind::kGenerator:
      return "generator";
    case PoolKind::kScorer:
      return "scorer";
    case PoolKind::kTrainer:
      return "trainer";
  }
  return "?";
}

absl::StatusOr<uint64_t> Core::OnRegister(const std::string& name, PoolKind pool,
                                          const std::string& address, const Version& version,
                                          int64_t now_ns) {
  const auto known = members_.find(name);
  if (known != members_.end() && known->second.pool != pool) {
    return absl::FailedPreconditionError(
        absl::StrCat("member '", name, "' belongs to another pool already"));
  }
  if (pool == PoolKind::kTrainer) {
    const bool is_there = known != members_.end() && known->second.is_live;
    if (NumLiveTrainers() - (is_there ? 1 : 0) >= options_.num_trainers) {
      return absl::FailedPreconditionError(
          absl::StrCat("the run has its ", options_.num_trainers, " trainers (cluster.trainers)"));
    }
    // A group is asked when it has been formed.
    if (const absl::Status status = CheckTrainerVersion(version); !has_group() && !status.ok()) {
      return status;
    }
  }
  if (pool == PoolKind::kScorer) RETURN_IF_ERROR(CheckReference(version));
  DropWorkOf(name, "came anew", now_ns);
  Member& member = members_[name];
  member = Member();
  member.name = name;
  member.pool = pool;
  member.address = address;
  member.epoch = ++epochs_[name];
  member.is_live = true;
  member.state = "live";
  member.version = version;
  member.last_seen_ns = now_ns;
  if (options_.settle_ns > 0) member.not_before_ns = now_ns + options_.settle_ns;
  Emit(RecordMember{name, pool, address, member.epoch, member.state});
  if (pool == PoolKind::kTrainer && !has_group() && version_.number < 0 && version.number == 0) {
    version_ = version;
    versions_[0] = version.hash;
    Emit(RecordVersion{version});
  }
  if (pool == PoolKind::kTrainer && version.number >= 0 && version.number < checkpoints_.version) {
    Note(absl::StrCat(name, " begins with version ", version.number,
                      " though a checkpoint of version ", checkpoints_.version,
                      " was saved, which isn't there any more or can't be used: the steps between "
                      "are taken again, with the same results"));
  }
  Advance(now_ns);
  return members_[name].epoch;
}

// A scorer's version is that of the reference policy, where it has one.
absl::Status Core::CheckReference(const Version& version) const {
  const auto first = versions_.find(0);
  if (version.number != 0 || first == versions_.end() || first->second == version.hash) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the reference policy has hash ", version.hash, ", the run began with ", first->second,
      ": the files at model.path were replaced since; put the old "
      "ones there, or begin a new run"));
}

absl::Status Core::CheckTrainerVersion(const Version& version) const {
  if (version.number < 0) return absl::OkStatus();  // it will tell when it has one
  const int64_t newest = version_.number;
  const auto known = versions_.find(version.number);
  if (known != versions_.end()) {
    if (known->second == version.hash) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the trainer's version ", version.number, " has hash ", version.hash,
                     ", the run's journal has ", known->second, ": not a checkpoint of this run"));
  }
  // A step may have been taken whose result was never recorded, and the next; they are asked for
  // again.
  const int64_t last = newest + (options_.steps_ahead ? 2 : 1);
  if (newest >= 0 && version.number > newest && version.number <= last) return absl::OkStatus();
  if (newest < 0 && version.number == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the trainer holds version ", version.number, ", the run's journal ends at ", newest,
      ": restore run.sqlite, or begin a new run (`stretto export` still makes a "
      "model of the checkpoints)"));
}

bool Core::OnHeartbeat(const std::string& name, uint64_t epoch, int64_t now_ns) {
  Member* member = Current(name, epoch);
  if (member != nullptr) member->last_seen_ns = now_ns;
  return member != nullptr;
}

void Core::OnLeave(const std::string& name, uint64_t epoch, int64_t now_ns) {
  Member* member = Current(name, epoch);
  if (member == nullptr) return;
  member->is_live = false;
  member->state = "left";
  DropWorkOf(name, "left", now_ns);
  Emit(RecordMember{name, member->pool, member->address, member->epoch, member->state});
  Advance(now_ns);
}

void Core::ExpireLeases(int64_t now_ns) {
  for (auto& [name, member] : members_) {
    if (!member.is_live || now_ns - member.last_seen_ns <= options_.lease_ns) continue;
    member.is_live = false;
    member.state = "silent";
    DropWorkOf(name, "is silent", now_ns);
    Emit(RecordMember{name, member.pool, member.address, member.epoch, member.state});
    Emit(CountFault{"silent_member", name});
    Emit(RecordEvent{absl::StrCat(name, " has been silent for longer than its lease")});
  }
}

// Gives a member's work back to the queues; its answers no longer count. `why` follows its name.
void Core::DropWorkOf(const std::string& name, const std::string& why, int64_t now_ns) {
  const auto it = members_.find(name);
  if (it == members_.end()) return;
  for (auto& [id, group] : groups_) {
    if (group.member != name) continue;
    if (group.state == GroupState::kTokenizing) {
      Requeue(&group, GroupState::kNew, 0);
    } else if (group.state == GroupState::kGenerating) {
      Emit(CancelGenerate{id, group.attempt, name});
      Requeue(&group, GroupState::kReady, 0);
    } else if (group.state == GroupState::kScoring) {
      Requeue(&group, GroupState::kGenerated, 0);
    }
  }
  Member& member = it->second;
  member.num_in_flight = 0;
  member.tokenizing.clear();
  member.is_preparing = member.is_committing = false;
  ForgetRelay(name);
  if (trainers_.Has(name)) LoseTrainers(absl::StrCat(name, " ", why), now_ns);
}

// The member under this epoch, if it is live; nullptr: whoever speaks is no longer one.
Member* Core::Current(const std::string& name, uint64_t epoch) {
  const auto it = members_.find(name);
  if (it == members_.end() || it->second.epoch != epoch || !it->second.is_live) return nullptr;
  return &it->second;
}

// Each answer in a row that cannot be true doubles the time for which a member is given nothing.
void Core::Distrust(Member* member, int64_t now_ns) {
  constexpr int64_t kMaxDoublings = 7;
  const int64_t doublings = std::min(member->num_faults++, kMaxDoublings);
  member->not_before_ns = now_ns + (options_.retry_ns << doublings);
}

Member* Core::PickScorer(int64_t now_ns) {
  Member* best = nullptr;
  for (auto& [name, member] : members_) {
    if (member.pool != PoolKind::kScorer || !member.is_live || member.not_before_ns > now_ns)
      continue;
    if (member.num_in_flight >= options_.max_scores_in_flight) continue;
    if (best == nullptr || member.num_in_flight < best->num_in_flight) best = &member;
  }
  return best;
}

// The least loaded generator that has room and whose version may write for this group.
Member* Core::PickGenerator(const Group& group, int64_t now_ns) {
  const int64_t num_samples = group.kind == GroupKind::kEval ? 1 : options_.group_size;
  Member* best = nullptr;
  for (auto& [name, member] : members_) {
    if (member.pool != PoolKind::kGenerator || !member.is_live || member.not_before_ns > now_ns)
      continue;
    if (member.version.number < 0) continue;
    // A swap may wait for rollouts of an older version; whatever need not be of one certain version
    // goes on.
    if (member.is_committing && IsPinned(group)) continue;
    const auto known = versions_.find(member.version.number);
    if (known == versions_.end() || known->second != member.version.hash) continue;
    // A step starts from version round − 1; an evaluation is of exactly its version.
    const bool may_write =
        group.kind == GroupKind::kEval
            ? member.version.number == group.round
            : member.version.number < group.round &&
                  group.round - 1 - member.version.number <= options_.max_staleness;
    if (!may_write) continue;
    const bool has_room = member.num_in_flight == 0 ||
                          member.num_in_flight + num_samples <= options_.max_samples_in_flight;
    if (has_room && (best == nullptr || member.num_in_flight < best->num_in_flight)) best = &member;
  }
  return best;
}
}  // namespace stretto::services
