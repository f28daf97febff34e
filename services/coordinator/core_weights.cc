// How new versions reach the generators: along trees whose root is the trainer.
//
// A generator that is to prepare a version is given its place in a tree when it is asked: below the
// trainer, or below a generator that has been asked before and comes from the same version, whoever
// is nearest to the root and feeds fewer than `relay_fanout` others. So the trainer sends a version
// at most relay_fanout times for each version that receivers come from, however many they are. What
// is sent with the question is the way back to the root: a receiver that loses its relay goes on at
// the next one up, by itself. Places last as long as the version is the newest; whoever has gone
// leaves its receivers to the one above it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/coordinator/core.h"

namespace stretto::services {
namespace {
// Relays on the way up that a receiver is told; the trainer comes after them.
constexpr size_t kMaxRelaysTold = 3;
}  // namespace

// Nobody is fed by `name` any more.
void Core::ForgetRelay(const std::string& name) {
  const auto gone = relays_.find(name);
  if (gone == relays_.end()) return;
  const std::string above = gone->second.above;
  relays_.erase(gone);
  for (auto& [receiver, place] : relays_) {
    if (place.above == name) place.above = above;
  }
}

int64_t Core::DepthOf(const RelayPlace& place) const {
  int64_t depth = 1;
  for (std::string above = place.above; !above.empty(); above = relays_.at(above).above) ++depth;
  return depth;
}

// Gives the member its place and returns the addresses that it may fetch from, the best first.
std::vector<std::string> Core::PlanSources(const Member& member, const Member& trainer) {
  if (!(relayed_version_ == version_)) relays_.clear();
  relayed_version_ = version_;
  ForgetRelay(member.name);
  std::map<std::string, int64_t> num_fed;  // "": by the trainer
  for (const auto& [name, place] : relays_) {
    if (place.from == member.version) ++num_fed[place.above];
  }
  RelayPlace mine{.above = "", .from = member.version};
  int64_t best = num_fed[""] < options_.relay_fanout ? 0 : INT64_MAX;
  for (const auto& [name, place] : relays_) {
    const int64_t depth = DepthOf(place);
    if (!(place.from == member.version) || num_fed[name] >= options_.relay_fanout ||
        depth >= best) {
      continue;
    }
    best = depth;
    mine.above = name;
  }
  relays_[member.name] = mine;
  std::vector<std::string> sources;
  for (std::string above = mine.above; !above.empty() && sources.size() < kMaxRelaysTold;
       above = relays_.at(above).above) {
    sources.push_back(members_.at(above).address);
  }
  sources.push_back(trainer.address);
  return sources;
}

// Brings each generator to the run's version: prepare, then commit, one at a time each.
void Core::SyncWeights(int64_t now_ns) {
  if (!TrainerHasVersion()) return;
  const Member* trainer = Trainer(now_ns);
  for (auto& [name, member] : members_) {
    if (member.pool != PoolKind::kGenerator || !member.is_live || member.not_before_ns > now_ns)
      continue;
    if (member.version == version_ || member.is_preparing || member.is_committing) continue;
    // What has been prepared is used, even if a newer version was born meanwhile: where versions
    // are born faster than they are prepared, a generator would never get any.
    const auto known = versions_.find(member.prepared.number);
    const bool is_newer = member.prepared.number > member.version.number &&
                          known != versions_.end() && known->second == member.prepared.hash;
    if (member.prepared == version_ || is_newer) {
      member.is_committing = true;
      Emit(CommitVersion{name, member.epoch, member.prepared});
    } else if (trainer != nullptr) {
      member.is_preparing = true;
      Emit(PrepareVersion{name, member.epoch, version_, PlanSources(member, *trainer)});
    }
  }
}

void Core::OnPrepared(const PrepareVersion& asked, const absl::Status& status, int64_t now_ns) {
  Member* member = Current(asked.member, asked.epoch);
  if (member == nullptr || !member->is_preparing || IsOver()) return;
  member->is_preparing = false;
  if (status.ok()) {
    member->prepared = asked.version;
    num_not_held_ = 0;
  } else {
    ForgetRelay(asked.member);
    member->not_before_ns = now_ns + options_.retry_ns;
    Emit(CountFault{"weights_not_prepared", asked.member});
    Note(absl::StrCat(asked.member, " could not prepare version ", asked.version.number, ": ",
                      status.message()));
    if (absl::IsNotFound(status) && asked.version == version_) TrainersLackVersion(now_ns);
  }
  Advance(now_ns);
}

void Core::OnCommitted(const CommitVersion& asked, const absl::Status& status, int64_t now_ns) {
  Member* member = Current(asked.member, asked.epoch);
  if (member == nullptr || !member->is_committing || IsOver()) return;
  member->is_committing = false;
  member->prepared = Version();
  if (status.ok()) {
    member->version = asked.version;
  } else {
    member->not_before_ns = now_ns + options_.retry_ns;
    Emit(CountFault{"weights_not_committed", asked.member});
    Note(absl::StrCat(asked.member, " could not commit version ", asked.version.number, ": ",
                      status.message()));
  }
  Advance(now_ns);
}
}  // namespace stretto::services
