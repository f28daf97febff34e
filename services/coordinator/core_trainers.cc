// The trainers: how their group is formed, lost and formed again, and how it is driven.
//
//            all there, or enough and the grace is over
//   none ──────────────────────────────────────────────> preparing ──> joining ──> ready
//    ^                                                       │            │          │
//    └──── a rank fails, is silent, leaves or comes anew; a rank more comes (checkpoint first) ──┘
//
// Each attempt has an epoch of its own, higher than all before it in any life of the coordinator.
// A group begins at the newest checkpoint, is sent the recorded batches up to the run's version
// again, and goes on: the same bits as if nothing had happened. A run that is to have one trainer
// has no group: whoever registers is the trainer, at the version it holds.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "rl/staleness.h"
#include "services/coordinator/core.h"

namespace stretto::services {
namespace {
using Phase = TrainerGroup::Phase;
// Attempts in a row that end with ranks that disagree, or with faults nobody can explain.
constexpr int64_t kMaxTrainerFailures = 10;

// Whether asking again, of the same trainers or of those that are there then, may help.
bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsResourceExhausted(status) || absl::IsCancelled(status);
}
}  // namespace

TrainerRank* TrainerGroup::Asked(const std::string& member, uint64_t member_epoch,
                                 uint64_t group_epoch) {
  if (group_epoch != epoch) return nullptr;
  for (TrainerRank& rank : ranks) {
    if (rank.name == member && rank.epoch == member_epoch) return rank.is_asked ? &rank : nullptr;
  }
  return nullptr;
}

bool TrainerGroup::is_busy() const {
  return std::any_of(ranks.begin(), ranks.end(), [](const TrainerRank& r) { return r.is_asked; });
}

bool TrainerGroup::Has(const std::string& member) const {
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](const TrainerRank& r) { return r.name == member; });
}

std::string TrainerGroup::Names() const {
  return absl::StrJoin(ranks, ", ", [](std::string* out, const TrainerRank& rank) {
    absl::StrAppend(out, rank.name);
  });
}

bool TrainerGroup::HoldOneVersion() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [this](const TrainerRank& r) { return r.version == ranks[0].version; });
}

int64_t Core::NumLiveTrainers() const {
  return std::count_if(members_.begin(), members_.end(), [](const auto& entry) {
    return entry.second.pool == PoolKind::kTrainer && entry.second.is_live;
  });
}

// How many ranks a new group has to have now: all, less those that have left in good order; after
// the grace the least that the run allows.
int64_t Core::NumRanksWanted(int64_t now_ns) const {
  int64_t num_left = 0;
  for (const auto& [name, member] : members_) {
    num_left += member.pool == PoolKind::kTrainer && member.state == "left" ? 1 : 0;
  }
  const bool is_late = trainers_.missing_since_ns >= 0 &&
                       now_ns - trainers_.missing_since_ns >= options_.trainer_grace_ns;
  const int64_t least = WholeCopies(options_.min_trainers + options_.ranks_per_copy - 1);
  return is_late ? least : std::max(least, WholeCopies(options_.num_trainers - num_left));
}

// Of so many ranks, those that make up whole copies of the model.
int64_t Core::WholeCopies(int64_t num_ranks) const {
  return num_ranks / options_.ranks_per_copy * options_.ranks_per_copy;
}

// Whoever was asked and has not answered is not waited for.
void Core::LoseTrainers(const std::string& why, int64_t now_ns) {
  if (trainers_.phase == Phase::kNone) return;
  if (trainers_.phase == Phase::kReady) trainers_.missing_since_ns = now_ns;
  if (has_group() && !why.empty()) {
    Note(absl::StrCat("trainers' group ", trainers_.epoch, " ends: ", why));
  }
  trainers_.phase = Phase::kNone;
  trainers_.ranks.clear();
  trainers_.step = trainers_.ahead = -1;
  DropSave();
  trainers_.version = Version();
}

void Core::FormTrainers(int64_t now_ns) {
  if (trainers_.phase == Phase::kPreparing || trainers_.phase == Phase::kJoining) return;
  std::vector<const Member*> there;
  for (const auto& [name, member] : members_) {
    if (member.pool == PoolKind::kTrainer && member.is_live && member.not_before_ns <= now_ns &&
        static_cast<int64_t>(there.size()) < options_.num_trainers) {
      there.push_back(&member);
    }
  }
  there.resize(static_cast<size_t>(WholeCopies(static_cast<int64_t>(there.size()))));
  if (trainers_.phase == Phase::kReady) {
    const bool is_saved = version_.number <= 0 || checkpoints_.version >= version_.number;
    if (there.size() <= trainers_.ranks.size() || trainers_.is_busy() || !is_saved ||
        !(trainers_.version == version_)) {
      return;
    }
    LoseTrainers("a trainer has come and joins", now_ns);
  }
  if (there.empty()) return;
  if (trainers_.missing_since_ns < 0) trainers_.missing_since_ns = now_ns;
  if (static_cast<int64_t>(there.size()) < NumRanksWanted(now_ns)) return;
  for (const Member* member : there) {
    TrainerRank& rank = trainers_.ranks.emplace_back();
    rank.name = member->name;
    rank.epoch = member->epoch;
  }
  if (!has_group()) {
    trainers_.phase = Phase::kReady;
    trainers_.version = there[0]->version;
    return;
  }
  ++trainers_.epoch;
  trainers_.phase = Phase::kPreparing;
  Emit(RecordTrainers{trainers_.epoch, trainers_.Names()});
  for (TrainerRank& rank : trainers_.ranks) {
    rank.is_asked = true;
    Emit(PrepareRank{rank.name, rank.epoch, trainers_.epoch});
  }
}

void Core::OnRankPrepared(const PrepareRank& asked, const absl::Status& status,
                          const std::string& peer_address, int64_t now_ns) {
  TrainerRank* rank = trainers_.Asked(asked.member, asked.epoch, asked.group_epoch);
  if (IsOver() || rank == nullptr || trainers_.phase != Phase::kPreparing) return;
  if (!status.ok()) {
    members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
    Note(absl::StrCat(asked.member, " does not prepare to train: ", status.message()));
    LoseTrainers("", now_ns);
    Advance(now_ns);
    return;
  }
  rank->is_asked = false;
  rank->peer_address = peer_address;
  if (trainers_.is_busy()) return;
  trainers_.phase = Phase::kJoining;
  JoinRank join;
  join.group_epoch = trainers_.epoch;
  for (const TrainerRank& r : trainers_.ranks) join.ranks.push_back({r.name, r.peer_address});
  for (TrainerRank& r : trainers_.ranks) {
    r.is_asked = true;
    join.member = r.name;
    join.epoch = r.epoch;
    Emit(join);
    ++join.rank;
  }
  Advance(now_ns);
}

void Core::OnRankJoined(const JoinRank& asked, const absl::Status& status, const Version& version,
                        int64_t now_ns) {
  TrainerRank* rank = trainers_.Asked(asked.member, asked.epoch, asked.group_epoch);
  if (IsOver() || rank == nullptr || trainers_.phase != Phase::kJoining) return;
  if (!status.ok()) {
    members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
    TrainersFailed(status, absl::StrCat(asked.member, " cannot join"), now_ns);
    return;
  }
  rank->is_asked = false;
  rank->version = version;
  if (trainers_.is_busy()) return;
  if (!trainers_.HoldOneVersion()) {
    TrainersFailed(RanksDisagree(), "joining", now_ns);
    return;
  }
  if (const absl::Status check = CheckTrainerVersion(version); !check.ok()) {
    Fail(check);
    return;
  }
  trainers_.phase = Phase::kReady;
  trainers_.missing_since_ns = -1;
  SetTrainersVersion(version);
  Note(absl::StrCat("trainers' group ", trainers_.epoch, " of ", trainers_.ranks.size(), " (",
                    trainers_.Names(), ") is at version ", version.number));
  if (version_.number < 0) {
    version_ = version;
    versions_[version.number] = version.hash;
    Emit(RecordVersion{version});
  }
  Advance(now_ns);
}

absl::Status Core::RanksDisagree() const {
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks hold different weights: ",
      absl::StrJoin(trainers_.ranks, ", ", [](std::string* out, const auto& rank) {
        absl::StrAppend(out, rank.name, ": version ", rank.version.number, " ", rank.version.hash);
      })));
}

void Core::SetTrainersVersion(const Version& version) {
  trainers_.version = version;
  for (TrainerRank& rank : trainers_.ranks) {
    rank.version = version;
    members_[rank.name].version = version;
  }
}

// A call to a trainer has failed: what can pass is tried again, by a new group where there are
// groups; anything else is the run's failure.
void Core::TrainersFailed(const absl::Status& status, const std::string& what, int64_t now_ns) {
  const bool may_differ =
      absl::IsFailedPrecondition(status) && trainer_failures_ < kMaxTrainerFailures;
  Emit(CountFault{may_differ ? "trainers_disagree" : "trainer_failed", ""});
  if (may_differ) ++trainer_failures_;
  if (!may_differ && !MayPass(status)) {
    Fail(Annotate(status, what));
    return;
  }
  if (has_group()) {
    LoseTrainers(absl::StrCat(what, ": ", status.message()), now_ns);
  } else {
    for (TrainerRank& rank : trainers_.ranks) rank.is_asked = false;
    trainers_.step = trainers_.ahead = -1;
    if (may_differ) trainers_.version = Version();  // ask it where it stands
    Note(absl::StrCat(what, ": ", status.message()));
  }
  Advance(now_ns);
}

// The member that speaks for the trainers (rank 0), if they can be asked for something; or nullptr.
const Member* Core::Trainer(int64_t now_ns) const {
  if (trainers_.phase != Phase::kReady) return nullptr;
  for (const TrainerRank& rank : trainers_.ranks) {
    if (members_.at(rank.name).not_before_ns > now_ns) return nullptr;
  }
  return &members_.at(trainers_.ranks[0].name);
}

// Generators do not find at the trainers what those said they hold. After some times they are not
// believed: their group is formed anew, or the one trainer is asked where it stands.
void Core::TrainersLackVersion(int64_t now_ns) {
  constexpr int64_t kMaxNotHeld = 8;
  if (++num_not_held_ < kMaxNotHeld || !TrainerHasVersion() || trainers_.is_busy()) return;
  num_not_held_ = 0;
  Emit(CountFault{"trainer_lacks_version", trainers_.ranks[0].name});
  if (has_group()) {
    LoseTrainers(absl::StrCat("they do not hold version ", version_.number), now_ns);
  } else {
    trainers_.version = Version();
  }
}

bool Core::TrainerHasVersion() const {
  return trainers_.phase == Phase::kReady && version_.number >= 0 && trainers_.version == version_;
}

// One thing at a time: catch up, begin a save, or take the next step.
void Core::DriveTrainer(int64_t now_ns) {
  if (!stopping_) FormTrainers(now_ns);
  if (Trainer(now_ns) == nullptr) return;
  if (trainers_.is_busy()) {
    TrainStepAhead(now_ns);
    return;
  }
  if (trainers_.version.number < 0 || version_.number < 0) {
    trainer_activity_ = "waiting";
    TrainerRank& rank = trainers_.ranks[0];
    rank.is_asked = true;
    Emit(AskTrainer{rank.name, rank.epoch});
    return;
  }
  // Trainers that are ahead hold results that were never recorded: asked again, they repeat them.
  if (!(trainers_.version == version_)) {
    if (!stopping_) TrainNextStep();
    return;
  }
  if (save_.version < 0 && CheckpointIsDue(version_.number, now_ns)) {
    BeginCheckpoint(now_ns);
    return;
  }
  if (save_.version >= 0 && !save_.is_begun) return;
  // A group ends at a checkpoint: nothing is repeated when a trainer joins.
  if (stopping_ || paused_ || version_.number >= options_.num_steps || EvalIsDue()) return;
  if (TrainersWait() && save_.version >= 0) return;
  TrainNextStep();
}

void Core::TrainNextStep() {
  const bool is_replay = trainers_.version.number < version_.number;
  const int64_t step = is_replay ? trainers_.version.number + 1 : version_.number + 1;
  if (!is_replay && !RecordNextBatch(step)) return;
  if (kl_coefs_.count(step) == 0) {
    Fail(absl::DataLossError(absl::StrCat("the journal has no batch of step ", step)));
    return;
  }
  trainer_activity_ = is_replay ? "repeating a step" : "training";
  trainers_.step = step;
  trainers_.ahead = -1;
  AskForStep(step, {step - 1, versions_[step - 1]}, is_replay);
}

void Core::AskForStep(int64_t step, const Version& base, bool is_replay) {
  for (TrainerRank& rank : trainers_.ranks) {
    rank.is_asked = true;
    Emit(TakeStep{rank.name, rank.epoch, trainers_.epoch, step, base, kl_coefs_[step], is_replay});
  }
}

// The step after the one under way, where nothing comes between: what the trainer would wait for,
// once it has answered, are messages and the journal.
void Core::TrainStepAhead(int64_t now_ns) {
  const int64_t base = trainers_.step, step = base + 1;
  if (!options_.steps_ahead || has_group() || base != version_.number + 1) return;
  if (trainers_.ahead >= 0 || stopping_ || paused_ || step > options_.num_steps) return;
  if (EvalIsDue(base) || CheckpointIsDue(base, now_ns) || !RecordNextBatch(step)) return;
  trainers_.ahead = step;
  AskForStep(step, {base, ""}, /*is_replay=*/false);
}

bool Core::OnStepTaken(const TakeStep& asked, const absl::Status& status, const Version& version,
                       double measured_kl, int64_t now_ns) {
  TrainerRank* rank = trainers_.Asked(asked.member, asked.epoch, asked.group_epoch);
  if (IsOver() || rank == nullptr || trainers_.phase != Phase::kReady) return false;
  if (asked.step != trainers_.step) {
    // The one ahead has failed, or its answer has overtaken the other's: it is asked for again.
    if (asked.step == trainers_.ahead) {
      trainers_.ahead = -1;
      if (!status.ok()) members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
    }
    return false;
  }
  const std::string what = absl::StrCat("step ", asked.step);
  if (!status.ok()) {
    members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
    TrainersFailed(status, absl::StrCat(what, " on ", asked.member), now_ns);
    return false;
  }
  if (version.number != asked.step) {
    Fail(absl::InternalError(
        absl::StrCat(what, ": ", asked.member, " answered with version ", version.number)));
    return false;
  }
  rank->is_asked = false;
  rank->version = version;
  if (trainers_.is_busy()) return false;  // until all have answered
  if (!trainers_.HoldOneVersion()) {
    TrainersFailed(RanksDisagree(), what, now_ns);
    return false;
  }
  trainer_failures_ = 0;
  const auto known = versions_.find(asked.step);
  if (known != versions_.end() && known->second != version.hash) {
    Fail(absl::DataLossError(absl::StrCat(what, " taken again gave version hash ", version.hash,
                                          ", at first it was ", known->second)));
    return false;
  }
  SetTrainersVersion(version);
  const bool is_new = known == versions_.end();
  if (is_new) StepRecorded(asked, version, measured_kl);
  trainers_.step = std::exchange(trainers_.ahead, -1);
  if (trainers_.step >= 0) trainers_.ranks[0].is_asked = true;
  Advance(now_ns);
  return is_new;
}

void Core::OnTrainerStatus(const AskTrainer& asked, const absl::Status& status,
                           const Version& version, int64_t now_ns) {
  TrainerRank* rank = trainers_.Asked(asked.member, asked.epoch, trainers_.epoch);
  if (IsOver() || rank == nullptr || trainers_.phase != Phase::kReady) return;
  if (trainers_.step >= 0) return;  // of an earlier question
  rank->is_asked = false;
  if (!status.ok() || version.number < 0) {
    members_[asked.member].not_before_ns = now_ns + options_.retry_ns;
  } else if (const absl::Status check = CheckTrainerVersion(version); !check.ok()) {
    Fail(check);
    return;
  } else {
    SetTrainersVersion(version);
    if (version_.number < 0) {
      version_ = version;
      versions_[version.number] = version.hash;
      Emit(RecordVersion{version});
    }
  }
  Advance(now_ns);
}

}  // namespace stretto::services
