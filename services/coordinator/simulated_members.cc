// What members do, and how their answers reach the core.
#include "absl/strings/str_cat.h"
#include "services/coordinator/simulation.h"

namespace stretto::services {
namespace {
uint64_t Mix(uint64_t a, uint64_t b) { return PhiloxStream(a, b).NextU64(); }
}  // namespace

// Has `asked` done by its member and answered to the core that asked: late, twice, or as a failure.
template <class Asked>
void Simulation::Serve(const Asked& asked, SimTimes::Range time, Work work) {
  const SimMember& member = members_[asked.member];
  const int copies = Chance(0.1) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    At(Delay(time),
       [=, this, life = member.life, core_life = core_life_, stalled_ns = member.stalled_ns] {
         Deliver(asked, work, life, core_life, stalled_ns);
       });
  }
}

template <class Asked>
void Simulation::Deliver(const Asked& asked, const Work& work, uint64_t life, uint64_t core_life,
                         int64_t stalled_ns) {
  SimMember& member = members_[asked.member];
  const bool is_same = member.is_up && member.life == life;
  int64_t wait_ns = is_same ? std::max<int64_t>(0, member.stopped_until - now_) : 0;
  if (is_same && std::is_same_v<Asked, GenerateGroup>) wait_ns += member.stalled_ns - stalled_ns;
  if (wait_ns > 0) {
    At(wait_ns, [=, this, now_stalled = member.stalled_ns] {
      Deliver(asked, work, life, core_life, now_stalled);
    });
    return;
  }
  absl::Status status;
  if (!is_same || Chance(0.03)) {
    if (Chance(0.5) && member.life != life) return;  // lost without a word
    status = absl::UnavailableError("gone");
  } else if (member.epoch != asked.epoch) {
    status = absl::FailedPreconditionError("old epoch");
  }
  if (status.ok()) status = work(member);
  if (absl::IsAborted(status) && std::is_same_v<Asked, TakeStep>) {  // its base is not there yet
    At(5'000'000, [=, this, now_stalled = member.stalled_ns] {
      Deliver(asked, work, life, core_life, now_stalled);
    });
    return;
  }
  Version version = member.version;
  if constexpr (std::is_same_v<Asked, TakeStep>) {
    if (status.ok()) version = {asked.step, member.results.at(asked.step)};
  }
  Hand(asked, status, version, core_life);
}

// The way back: it waits while the member is cut off or the coordinator is stopped; a coordinator
// that has died meanwhile never hears of it.
template <class Asked>
void Simulation::Hand(const Asked& asked, const absl::Status& status, const Version& version,
                      uint64_t core_life) {
  if (core_ == nullptr || core_life_ != core_life) return;
  const int64_t until = std::max(core_stopped_until_, members_[asked.member].cut_off_until);
  if (until > now_) {
    At(until - now_ + Delay(50), [=, this] { Hand(asked, status, version, core_life); });
    return;
  }
  Answer(asked, status, version);
}

void Simulation::Do(const TokenizePrompts& c) {
  Serve(c, sim_.times.tokenize, [](SimMember&) { return absl::OkStatus(); });
}
void Simulation::Answer(const TokenizePrompts& c, const absl::Status& status, const Version&) {
  std::vector<Core::TokenizedPrompt> prompts;
  for (const uint64_t id : c.groups) {
    // Line 3 is longer than allowed, line 11 cannot be read.
    const uint64_t line = groups_.at(id).place.index;
    const bool is_train = groups_.at(id).kind == GroupKind::kTrain;
    const bool is_long = is_train && line == 3, is_bad = is_train && line == 11;
    prompts.push_back({.length = is_long ? core_options_.max_prompt_tokens + 1 : 10,
                       .error = is_bad ? "unreadable" : ""});
  }
  core_->OnTokenized(c, status, prompts, CoreNow());
}

SimTimes::Range Simulation::OfGroup(SimTimes::Range range, uint64_t group) {
  if (!sim_.times.is_batched) return range;
  const auto round = static_cast<uint64_t>(groups_.at(group).round);
  const auto width = static_cast<uint64_t>(range.to_ms - range.from_ms + 1);
  const uint64_t drawn = Mix(sim_.seed, round * 1'000'000 + static_cast<uint64_t>(range.from_ms));
  const int64_t ms = range.from_ms + static_cast<int64_t>(drawn % width);
  return {ms, ms};
}

void Simulation::Do(const GenerateGroup& c) {
  Serve(c, OfGroup(sim_.times.generate, c.group), [this, c](SimMember& member) -> absl::Status {
    if (member.version.number < 0) return absl::FailedPreconditionError("no weights");
    if (c.expected.number >= 0 && !(member.version == c.expected)) {
      return absl::FailedPreconditionError("other version");
    }
    if (Chance(0.02)) return absl::InternalError("out of blocks");
    written_by_[Key(c)] = member.version;
    return absl::OkStatus();
  });
}
void Simulation::Answer(const GenerateGroup& c, const absl::Status& status, const Version&) {
  const Version version = status.ok() ? written_by_.at(Key(c)) : Version();
  const absl::Status lie = absl::DataLossError("tokens are said to be of version 99");
  const bool is_lie = status.ok() && c.member == liar_;
  if (!core_->OnGenerated(c, is_lie ? lie : status, version.number, CoreNow())) return;
  Require(version.number >= c.held_version, "a group is older than its generator was");
  const Group& group = groups_.at(c.group);
  // Some tokens of a long completion are of its first version, whatever came after.
  contents_[c.group] =
      Mix(std::hash<std::string>()(version.hash), group.place.index * 1000 + group.place.epoch);
}

void Simulation::Do(const ScoreGroup& c) {
  Serve(c, OfGroup(sim_.times.score, c.group), [this](SimMember&) -> absl::Status {
    return sim_.max_staleness > 0 && Chance(0.02) ? absl::AbortedError("reward service is down")
                                                  : absl::OkStatus();
  });
}
void Simulation::Answer(const ScoreGroup& c, const absl::Status& status, const Version&) {
  // What was generated decides the rewards; of every third group they are all the same.
  const bool has_signal = contents_.count(c.group) == 0 || contents_.at(c.group) % 3 != 0;
  core_->OnScored(c, status, CoreNow(), has_signal);
}

void Simulation::Do(const PrepareVersion& c) {
  Serve(c, sim_.times.prepare, [this, c](SimMember& member) -> absl::Status {
    for (const std::string& source : c.sources) {
      const SimMember& from = members_.at(source);
      if (!from.is_up || now_ < from.stopped_until || now_ < from.cut_off_until) continue;
      if (!(from.version == c.version) && !(from.prepared == c.version)) continue;
      member.prepared = c.version;
      return absl::OkStatus();
    }
    return absl::NotFoundError("not held");
  });
}
void Simulation::Answer(const PrepareVersion& c, const absl::Status& status, const Version&) {
  core_->OnPrepared(c, status, CoreNow());
}

// The swap itself takes the time of the commit, in which nothing is generated.
void Simulation::Do(const CommitVersion& c) {
  const int64_t pause_ns = Delay(sim_.times.commit);
  const int64_t pause_ms = pause_ns / 1'000'000;
  Serve(c, {pause_ms, pause_ms}, [c, pause_ns](SimMember& member) -> absl::Status {
    if (member.version == c.version) return absl::OkStatus();
    if (!(member.prepared == c.version)) return absl::FailedPreconditionError("not prepared");
    member.version = c.version;
    member.stalled_ns += pause_ns;
    return absl::OkStatus();
  });
}
void Simulation::Answer(const CommitVersion& c, const absl::Status& status, const Version&) {
  core_->OnCommitted(c, status, CoreNow());
}

void Simulation::Do(const PrepareRank& c) {
  Serve(c, {1, 30}, [c](SimMember& rank) -> absl::Status {
    if (c.group_epoch < rank.prepared_epoch) return absl::FailedPreconditionError("older group");
    rank.prepared_epoch = c.group_epoch;
    rank.group_epoch = 0;
    rank.version = Version();
    rank.results.clear();
    rank.saves.clear();
    return absl::OkStatus();
  });
}
void Simulation::Answer(const PrepareRank& c, const absl::Status& status, const Version&) {
  core_->OnRankPrepared(c, status, c.member, CoreNow());
}
void Simulation::Do(const JoinRank& c) {
  Serve(c, {1, 200}, [this, c](SimMember& rank) -> absl::Status {
    if (rank.prepared_epoch != c.group_epoch) return absl::FailedPreconditionError("not it");
    SimGroup& group = sim_groups_[c.group_epoch];
    if (!group.is_begun) {
      const auto num_ranks = static_cast<int64_t>(c.ranks.size());
      const int64_t per_copy = core_options_.ranks_per_copy;
      Require(num_ranks > 0 && num_ranks % per_copy == 0, "a copy of the model is incomplete");
      if (per_copy > 1 && num_ranks < core_options_.num_trainers) ++num_copies_lost_;
      group.ranks.clear();
      for (const JoinRank::Peer& peer : c.ranks) group.ranks.push_back(peer.name);
      for (const std::string& name : group.ranks) {
        if (!members_[name].is_up || members_[name].prepared_epoch != c.group_epoch) {
          return absl::UnavailableError(name + " can't be reached");
        }
      }
      group.is_begun = true;
      group.version = Saved();
    }
    rank.group_epoch = c.group_epoch;
    rank.version = group.version;
    return absl::OkStatus();
  });
}
void Simulation::Answer(const JoinRank& c, const absl::Status& status, const Version& version) {
  core_->OnRankJoined(c, status, version, CoreNow());
}

// Whether all take part in what the group of `rank` exchanges.
absl::Status Simulation::AllTakePart(const SimMember& rank, uint64_t group_epoch) {
  if (rank.group_epoch != group_epoch) return absl::FailedPreconditionError("another group");
  for (const std::string& name : sim_groups_[group_epoch].ranks) {
    const SimMember& peer = members_.at(name);
    if (!peer.is_up || peer.group_epoch != group_epoch) {
      return absl::UnavailableError(name + " left the group");
    }
    if (now_ < peer.cut_off_until || now_ < peer.stopped_until) {
      return absl::DeadlineExceededError(name + " didn't take part");
    }
  }
  return absl::OkStatus();
}

std::string Simulation::HashOfStep(const TakeStep& c, const Version& base) {
  uint64_t hash = std::hash<std::string>()(base.hash);
  for (const uint64_t id : batches_.at(c.step)) hash = Mix(hash, contents_.at(id));
  return absl::StrCat(absl::Hex(hash));
}

void Simulation::Do(const TakeStep& c) {
  Require(kl_coefs_.count(c.step) == 1, "a step is taken without its batch");
  num_ahead_ += c.base.hash.empty() ? 1 : 0;
  Serve(c, sim_.times.train, [this, c](SimMember& trainer) -> absl::Status {
    // The two steps that were taken last are remembered.
    const bool is_known = c.step > trainer.version.number - 2;
    if (is_known && trainer.results.count(c.step) > 0) return absl::OkStatus();
    const bool is_ahead = c.base.hash.empty();
    if (is_ahead && trainer.version.number < c.base.number) return absl::AbortedError("not yet");
    if (is_ahead ? trainer.version.number != c.base.number : !(trainer.version == c.base))
      return absl::FailedPreconditionError("other version");
    std::string hash;
    SimGroup& group = sim_groups_[c.group_epoch];
    if (c.group_epoch > 0 && group.results.count(c.step) > 0) {
      hash = group.results.at(c.step);  // whoever went away did so after its part
    } else {
      const absl::Status all = AllTakePart(trainer, c.group_epoch);
      if (!all.ok()) return all;
      hash = HashOfStep(c, trainer.version);
    }
    trainer.version = group.version = {c.step, hash};
    trainer.results[c.step] = group.results[c.step] = hash;
    return absl::OkStatus();
  });
}
void Simulation::Answer(const TakeStep& c, const absl::Status& status, const Version& version) {
  core_->OnStepTaken(c, status, version, 0, CoreNow());
}

void Simulation::Do(const AskTrainer& c) {
  Serve(c, {1, 20}, [](SimMember&) { return absl::OkStatus(); });
}
void Simulation::Answer(const AskTrainer& c, const absl::Status& status, const Version& version) {
  core_->OnTrainerStatus(c, status, version, CoreNow());
}

void Simulation::Do(const BeginSave& c) {
  Serve(c, {1, 30}, [this, c](SimMember& trainer) -> absl::Status {
    if (trainer.version.number != c.version) return absl::FailedPreconditionError("other version");
    const auto known = trainer.saves.find(c.version);
    if (known != trainer.saves.end() && known->second.empty()) return absl::OkStatus();
    const absl::Status all = AllTakePart(trainer, c.group_epoch);
    if (!all.ok()) return all;
    trainer.saves[c.version] = Chance(0.1) ? "no space left" : "";
    return absl::OkStatus();
  });
}
void Simulation::Answer(const BeginSave& c, const absl::Status& status, const Version&) {
  core_->OnSaveBegun(c, status, CoreNow());
}

std::string Simulation::SaveError(const SimMember& trainer, const AwaitSave& c) {
  if (durable_.count(c.version) > 0) return "";
  std::vector<std::string> ranks = {trainer.name};
  if (c.group_epoch > 0) ranks = sim_groups_[c.group_epoch].ranks;
  for (const std::string& name : ranks) {
    const SimMember& rank = members_.at(name);
    const auto save = rank.saves.find(c.version);
    // Whoever died may have written its share before.
    if (save == rank.saves.end() && Chance(0.5)) return name + " has left";
    if (save != rank.saves.end() && !save->second.empty()) return name + ": " + save->second;
  }
  return "";
}

void Simulation::Do(const AwaitSave& c) {
  Serve(c, sim_.times.save, [this, c](SimMember& trainer) -> absl::Status {
    if (trainer.saves.count(c.version) == 0) return absl::FailedPreconditionError("not begun");
    const std::string error = SaveError(trainer, c);
    save_errors_[{c.member, c.epoch, c.version}] = error;
    if (!error.empty()) return absl::OkStatus();
    if (durable_.insert(c.version).second) checkpoint_ = {c.version, versions_.at(c.version)};
    num_saved_behind_ += trainer.version.number > c.version ? 1 : 0;
    return absl::OkStatus();
  });
}
void Simulation::Answer(const AwaitSave& c, const absl::Status& status, const Version&) {
  core_->OnSaveOver(c, status, {save_errors_[{c.member, c.epoch, c.version}], 0.5}, CoreNow());
}
}  // namespace stretto::services
