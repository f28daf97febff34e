// The coordinator's core under simulated members, network, disk and crashes. Everything is drawn
// from a seed; a failing seed replays (STRETTO_SIM_SEED=n runs that one alone).
//
// Checked always: each prompt of the stream enters training at most once and, as the runs end,
// those of every step exactly once; no group over the staleness bound is trained on; versions grow
// by one; a step taken again gives the same hash; no epoch of a trainers' group is used twice. With
// max_staleness 0 the last hash is that of an undisturbed run with one trainer.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <map>
#include <queue>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "services/coordinator/core.h"

namespace stretto::services {
namespace {
constexpr int64_t kMs = 1'000'000;

struct SimOptions {
  uint64_t seed = 0;
  int64_t max_staleness = 0;
  bool disturbed = true;
  int num_generators = 2, num_scorers = 1, num_trainers = 1, min_trainers = 1;
};

uint64_t Mix(uint64_t a, uint64_t b) { return PhiloxStream(a, b).NextU64(); }

struct SimMember {
  std::string name;
  PoolKind pool = PoolKind::kGenerator;
  bool is_up = false;
  bool is_cut_off = false;  // alive, but nobody hears it
  uint64_t epoch = 0, life = 0;
  Version version;
  Version prepared;
  std::map<int64_t, std::string> results;        // trainers: version → hash, of this life
  uint64_t prepared_epoch = 0, group_epoch = 0;  // ranks
};

// What the ranks of one epoch's group hold together.
struct SimGroup {
  std::vector<std::string> ranks;
  bool is_begun = false;
  Version version;
  std::map<int64_t, std::string> results;
};

class Simulation {
 public:
  explicit Simulation(const SimOptions& options) : sim_(options), random_(options.seed, 77) {
    core_options_ = {.num_steps = 6,
                     .prompts_per_step = 4,
                     .group_size = 2,
                     .max_staleness = options.max_staleness,
                     .max_prompt_tokens = 100,
                     .max_group_replacements = 30,
                     .checkpoint_every = 2,
                     .num_eval_prompts = 3,
                     .eval_before = true,
                     .eval_after = true,
                     .eval_every = 4,
                     .num_train_lines = 17,
                     .seed = 5,
                     .num_trainers = options.num_trainers,
                     .min_trainers = options.min_trainers,
                     .trainer_grace_ns = 3000 * kMs,
                     .lease_ns = 2000 * kMs,
                     .settle_ns = 10 * kMs,
                     .retry_ns = 100 * kMs,
                     .max_samples_in_flight = 6,
                     .max_scores_in_flight = 2};
    for (int i = 0; i < options.num_trainers; ++i) {
      AddMember(absl::StrCat("trainer-", i), PoolKind::kTrainer);
    }
    for (int i = 0; i < options.num_generators; ++i) {
      AddMember(absl::StrCat("generator-", i), PoolKind::kGenerator);
    }
    for (int i = 0; i < options.num_scorers; ++i) {
      AddMember(absl::StrCat("scorer-", i), PoolKind::kScorer);
    }
    StartCore();
    for (auto& [name, member] : members_) StartMember(name);
    At(100 * kMs, [this] { TickLoop(); });
    if (sim_.disturbed) ScheduleTrouble();
  }

  // Runs until the run has ended; the final version's hash.
  std::string Run() {
    while (!is_over_) {
      REQUIRE_FALSE(queue_.empty());
      Event event = queue_.top();
      queue_.pop();
      now_ = event.time;
      REQUIRE(now_ < 3600 * 1000 * kMs);
      event.action();
      CarryOut();
    }
    return versions_.at(core_options_.num_steps);
  }
  int num_crashes() const { return num_crashes_; }

 private:
  struct Event {
    int64_t time;
    uint64_t order;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return std::tie(other.time, other.order) < std::tie(time, order);
    }
  };

  void At(int64_t delay, std::function<void()> action) {
    queue_.push({now_ + delay, num_events_++, std::move(action)});
  }
  int64_t Delay(int64_t max_ms) { return kMs * static_cast<int64_t>(1 + random_.Below(max_ms)); }
  bool Chance(double p) { return sim_.disturbed && random_.NextDouble() < p; }

  void AddMember(const std::string& name, PoolKind pool) {
    members_[name].name = name;
    members_[name].pool = pool;
  }

  void StartMember(const std::string& name) {
    SimMember& member = members_[name];
    member.is_up = true;
    member.is_cut_off = false;
    ++member.life;
    member.version = member.prepared = Version();
    member.results.clear();
    member.prepared_epoch = member.group_epoch = 0;
    if (member.pool == PoolKind::kTrainer && sim_.num_trainers == 1) {
      member.version = Saved();
    }
    member.epoch = 0;
    HeartbeatLoop(name, member.life);
  }

  Version Saved() const { return checkpoint_.number < 0 ? Version{0, "zero"} : checkpoint_; }

  void HeartbeatLoop(const std::string& name, uint64_t life) {
    SimMember& member = members_[name];
    if (!member.is_up || member.life != life) return;
    if (core_ != nullptr && !member.is_cut_off) {
      if (member.epoch == 0 || !core_->OnHeartbeat(name, member.epoch, now_)) {
        const auto epoch = core_->OnRegister(name, member.pool, name, member.version, now_);
        member.epoch = epoch.ok() ? *epoch : 0;
        INFO(epoch.status().ToString());
        REQUIRE((epoch.ok() || member.pool == PoolKind::kTrainer));
      }
    }
    At(200 * kMs, [this, name, life] { HeartbeatLoop(name, life); });
  }

  void TickLoop() {
    if (core_ != nullptr) core_->OnTick(now_);
    At(50 * kMs, [this] { TickLoop(); });
  }

  void ScheduleTrouble() {
    At(Delay(1500), [this] {
      if (num_crashes_ < 25) Trouble();
      ScheduleTrouble();
    });
  }

  void Trouble() {
    ++num_crashes_;
    if (random_.Below(5) == 0) {
      core_ = nullptr;
      At(Delay(3000), [this] { StartCore(); });
      return;
    }
    auto it = members_.begin();
    std::advance(it, random_.Below(members_.size()));
    SimMember& member = it->second;
    const std::string name = it->first;
    if (!member.is_up) return;
    if (random_.Below(3) == 0) {
      member.is_cut_off = true;
      const uint64_t life = member.life;
      At(Delay(6000), [this, name, life] {
        if (members_[name].life == life) members_[name].is_cut_off = false;
      });
      return;
    }
    member.is_up = false;
    At(Delay(4000), [this, name] { StartMember(name); });
  }

  // From what was recorded, as the shell does from the journal.
  void StartCore() {
    if (core_ != nullptr) return;
    RestoredRun restored;
    restored.versions = versions_;
    restored.kl_coefs = kl_coefs_;
    const int64_t newest = versions_.empty() ? -1 : versions_.rbegin()->first;
    for (const auto& [id, group] : groups_) {
      restored.next_group = std::max(restored.next_group, id + 1);
      if (group.kind == GroupKind::kTrain) {
        restored.next_position = std::max(restored.next_position, group.position + 1);
      }
      const bool is_open = group.kind == GroupKind::kTrain
                               ? group.round > newest
                               : group.round == newest && evaluated_.count(newest) == 0;
      if (!is_open) continue;
      Group copy = group;
      copy.member.clear();
      copy.attempt += 1000;
      if (copy.state == GroupState::kTokenizing) copy.state = GroupState::kNew;
      if (copy.state == GroupState::kGenerating) copy.state = GroupState::kReady;
      if (copy.state == GroupState::kScoring) copy.state = GroupState::kGenerated;
      restored.groups.push_back(copy);
    }
    restored.member_epochs = epochs_;
    restored.trainer_epoch = trainer_epoch_;
    restored.evaluated = {evaluated_.begin(), evaluated_.end()};
    restored.checkpoint_version = recorded_checkpoint_;
    ++core_life_;
    core_ = std::make_unique<Core>(core_options_, restored);
  }

  // Delivers an answer of `member` to the core that asked: late, twice, or as a failure.
  template <class Asked, class Work>
  void Serve(const Asked& asked, int64_t max_ms, Work work) {
    const uint64_t life = members_[asked.member].life, core_life = core_life_;
    const int copies = Chance(0.1) ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      At(Delay(max_ms), [=, this] {
        SimMember& member = members_[asked.member];
        absl::Status status;
        if (!member.is_up || member.life != life || Chance(0.03)) {
          if (Chance(0.5) && member.life != life) return;  // lost without a word
          status = absl::UnavailableError("gone");
        } else if (member.epoch != asked.epoch) {
          status = absl::FailedPreconditionError("old epoch");
        }
        if (status.ok()) status = work(member);
        // Done, perhaps, but nobody hears of it.
        if (core_ == nullptr || core_life_ != core_life) return;
        Answer(asked, status);
      });
    }
  }

  void CarryOut() {
    if (core_ == nullptr) return;
    for (Command& command : core_->TakeCommands()) {
      std::visit([this](auto& c) { Do(c); }, command);
    }
  }

  void Do(const RecordMember& c) { epochs_[c.name] = std::max(epochs_[c.name], c.epoch); }
  void Do(const RecordTrainers& c) {
    REQUIRE(c.epoch > trainer_epoch_);
    trainer_epoch_ = c.epoch;
  }
  void Do(const RecordGroup& c) { groups_[c.group.id] = c.group; }
  void Do(const RecordBatch& c) {
    INFO("step " << c.step);
    REQUIRE(batches_.count(c.step) == 0);
    REQUIRE(static_cast<int64_t>(c.groups.size()) == core_options_.prompts_per_step);
    uint64_t last = 0;
    for (const uint64_t id : c.groups) {
      const Group& group = groups_.at(id);
      REQUIRE(group.state == GroupState::kScored);
      REQUIRE(group.kind == GroupKind::kTrain);
      REQUIRE(trained_.insert(group.position).second);
      REQUIRE((id == c.groups.front() || group.position > last));
      REQUIRE(group.min_version >= c.step - 1 - core_options_.max_staleness);
      REQUIRE(contents_.count(id) == 1);
      last = group.position;
    }
    batches_[c.step] = c.groups;
    kl_coefs_[c.step] = c.kl_coef;
  }
  void Do(const RecordVersion& c) {
    REQUIRE(c.version.number == (versions_.empty() ? 0 : versions_.rbegin()->first + 1));
    versions_[c.version.number] = c.version.hash;
  }
  void Do(const RecordCheckpoint& c) { recorded_checkpoint_ = c.version; }
  void Do(const RecordEval& c) {
    REQUIRE(evaluated_.insert(c.version).second);
    REQUIRE(static_cast<int64_t>(c.scored.size()) + c.num_rejected ==
            core_options_.num_eval_prompts);
  }
  void Do(const RecordEvent&) {}
  void Do(const CancelGenerate&) {}
  void Do(const EndRun& c) {
    INFO(c.status.ToString());
    REQUIRE(c.status.ok());
    REQUIRE(static_cast<int64_t>(trained_.size()) ==
            core_options_.num_steps * core_options_.prompts_per_step);
    REQUIRE(evaluated_ == std::set<int64_t>{0, 4, 6});
    is_over_ = true;
  }

  void Do(const TokenizePrompts& c) {
    Serve(c, 20, [](SimMember&) { return absl::OkStatus(); });
  }
  void Answer(const TokenizePrompts& c, const absl::Status& status) {
    std::vector<Core::TokenizedPrompt> prompts;
    for (const uint64_t id : c.groups) {
      // Line 3 is longer than allowed, line 11 cannot be read.
      const uint64_t line = groups_.at(id).place.index;
      const bool is_train = groups_.at(id).kind == GroupKind::kTrain;
      prompts.push_back({.length = is_train && line == 3 ? 101 : 10,
                         .error = is_train && line == 11 ? "unreadable" : ""});
    }
    core_->OnTokenized(c, status, prompts, now_);
  }

  void Do(const GenerateGroup& c) {
    Serve(c, 400, [this, c](SimMember& member) -> absl::Status {
      if (member.version.number < 0) return absl::FailedPreconditionError("no weights");
      if (c.expected.number >= 0 && !(member.version == c.expected)) {
        return absl::FailedPreconditionError("other version");
      }
      if (Chance(0.02)) return absl::InternalError("garbage");
      written_by_[{c.group, c.attempt}] = member.version;
      return absl::OkStatus();
    });
  }
  void Answer(const GenerateGroup& c, const absl::Status& status) {
    const Version version = status.ok() ? written_by_.at({c.group, c.attempt}) : Version();
    if (core_->OnGenerated(c, status, version.number, now_)) {
      const Group& group = groups_.at(c.group);
      // Some tokens of a long completion are of its first version, whatever came after.
      contents_[c.group] =
          Mix(std::hash<std::string>()(version.hash), group.place.index * 1000 + group.place.epoch);
    }
  }

  void Do(const ScoreGroup& c) {
    Serve(c, 100, [this](SimMember&) -> absl::Status {
      return sim_.max_staleness > 0 && Chance(0.02) ? absl::AbortedError("reward service is down")
                                                    : absl::OkStatus();
    });
  }
  void Answer(const ScoreGroup& c, const absl::Status& status) { core_->OnScored(c, status, now_); }

  void Do(const PrepareVersion& c) {
    Serve(c, 150, [this, c](SimMember& member) -> absl::Status {
      const SimMember& trainer = members_.at(c.source);
      if (!trainer.is_up || !(trainer.version == c.version)) return absl::NotFoundError("not held");
      member.prepared = c.version;
      return absl::OkStatus();
    });
  }
  void Answer(const PrepareVersion& c, const absl::Status& status) {
    core_->OnPrepared(c, status, now_);
  }
  void Do(const CommitVersion& c) {
    Serve(c, 20, [c](SimMember& member) -> absl::Status {
      if (member.version == c.version) return absl::OkStatus();
      if (!(member.prepared == c.version)) return absl::FailedPreconditionError("not prepared");
      member.version = c.version;
      return absl::OkStatus();
    });
  }
  void Answer(const CommitVersion& c, const absl::Status& status) {
    core_->OnCommitted(c, status, now_);
  }

  void Do(const PrepareRank& c) {
    Serve(c, 30, [c](SimMember& rank) -> absl::Status {
      if (c.group_epoch < rank.prepared_epoch) return absl::FailedPreconditionError("older group");
      rank.prepared_epoch = c.group_epoch;
      rank.group_epoch = 0;
      rank.version = Version();
      rank.results.clear();
      return absl::OkStatus();
    });
  }
  void Answer(const PrepareRank& c, const absl::Status& status) {
    core_->OnRankPrepared(c, status, c.member, now_);
  }
  void Do(const JoinRank& c) {
    Serve(c, 200, [this, c](SimMember& rank) -> absl::Status {
      if (rank.prepared_epoch != c.group_epoch) return absl::FailedPreconditionError("not it");
      SimGroup& group = sim_groups_[c.group_epoch];
      if (!group.is_begun) {
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
  void Answer(const JoinRank& c, const absl::Status& status) {
    core_->OnRankJoined(c, status, members_.at(c.member).version, now_);
  }

  // Whether all take part in what the group of `rank` exchanges.
  absl::Status AllTakePart(const SimMember& rank, uint64_t group_epoch) {
    if (rank.group_epoch != group_epoch) return absl::FailedPreconditionError("another group");
    for (const std::string& name : sim_groups_[group_epoch].ranks) {
      const SimMember& peer = members_.at(name);
      if (!peer.is_up || peer.group_epoch != group_epoch) {
        return absl::UnavailableError(name + " left the group");
      }
      if (peer.is_cut_off) return absl::DeadlineExceededError(name + " didn't take part");
    }
    return absl::OkStatus();
  }

  std::string HashOfStep(const TakeStep& c, const Version& base) {
    uint64_t hash = std::hash<std::string>()(base.hash);
    for (const uint64_t id : batches_.at(c.step)) hash = Mix(hash, contents_.at(id));
    return absl::StrCat(absl::Hex(hash));
  }

  void Do(const TakeStep& c) {
    REQUIRE(kl_coefs_.count(c.step) == 1);
    Serve(c, 500, [this, c](SimMember& trainer) -> absl::Status {
      if (trainer.results.count(c.step) > 0) return absl::OkStatus();
      if (!(trainer.version == c.base)) return absl::FailedPreconditionError("other version");
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
  void Answer(const TakeStep& c, const absl::Status& status) {
    Version version;
    if (status.ok()) version = {c.step, members_.at(c.member).results.at(c.step)};
    core_->OnStepTaken(c, status, version, 0, now_);
  }
  void Do(const AskTrainer& c) {
    Serve(c, 20, [](SimMember&) { return absl::OkStatus(); });
  }
  void Answer(const AskTrainer& c, const absl::Status& status) {
    core_->OnTrainerStatus(c, status, members_.at(c.member).version, now_);
  }
  void Do(const SaveCheckpointNow& c) {
    Serve(c, 100, [this, c](SimMember& trainer) -> absl::Status {
      if (trainer.version.number != c.version) return absl::UnavailableError("other version");
      if (checkpoint_ == trainer.version) return absl::OkStatus();
      const absl::Status all = AllTakePart(trainer, c.group_epoch);
      if (!all.ok()) return all;
      checkpoint_ = trainer.version;
      return absl::OkStatus();
    });
  }
  void Answer(const SaveCheckpointNow& c, const absl::Status& status) {
    core_->OnCheckpoint(c, status, now_);
  }

  const SimOptions sim_;
  PhiloxStream random_;
  CoreOptions core_options_;
  std::unique_ptr<Core> core_;
  std::priority_queue<Event> queue_;
  int64_t now_ = 0;
  uint64_t num_events_ = 0, core_life_ = 0;
  int num_crashes_ = 0;
  bool is_over_ = false;
  std::map<std::string, SimMember> members_;
  Version checkpoint_;  // on the trainers' disk
  std::map<uint64_t, SimGroup> sim_groups_;
  // The journal.
  std::map<std::string, uint64_t> epochs_;
  uint64_t trainer_epoch_ = 0;
  std::map<uint64_t, Group> groups_;
  std::map<int64_t, std::vector<uint64_t>> batches_;
  std::map<int64_t, double> kl_coefs_;
  std::map<int64_t, std::string> versions_;
  std::set<int64_t> evaluated_;
  std::set<uint64_t> trained_;
  int64_t recorded_checkpoint_ = -1;
  std::map<uint64_t, uint64_t> contents_;  // group → what was generated
  std::map<std::pair<uint64_t, uint64_t>, Version> written_by_;
};

TEST_CASE("whatever crashes, every prompt is trained on exactly once") {
  const char* one = std::getenv("STRETTO_SIM_SEED");
  const char* count_text = std::getenv("STRETTO_SIM_COUNT");
  const uint64_t first = one != nullptr ? std::strtoull(one, nullptr, 10) : 1;
  const uint64_t count = one != nullptr          ? 1
                         : count_text != nullptr ? std::strtoull(count_text, nullptr, 10)
                                                 : 1000;
  const std::string control = Simulation({.seed = 1, .disturbed = false}).Run();
  int num_crashes = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    INFO("replay with STRETTO_SIM_SEED=" << seed);
    const int64_t max_staleness = static_cast<int64_t>(seed % 3);
    const int num_trainers = 1 + static_cast<int>(seed / 3 % 4);
    Simulation simulation({.seed = seed,
                           .max_staleness = max_staleness,
                           .num_generators = 1 + static_cast<int>(seed % 4),
                           .num_scorers = 1 + static_cast<int>(seed % 2),
                           .num_trainers = num_trainers,
                           .min_trainers = seed % 7 < 3 ? num_trainers : 1});
    const std::string end = simulation.Run();
    if (max_staleness == 0) REQUIRE(end == control);
    num_crashes += simulation.num_crashes();
  }
  if (one == nullptr) CHECK(num_crashes > static_cast<int>(count));
}
}  // namespace
}  // namespace stretto::services
