// Time, troubles and the disk.
#include "services/coordinator/simulation.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace stretto::services {
namespace {
constexpr int64_t kMs = 1'000'000;
constexpr int64_t kHour = 3'600'000 * kMs;
constexpr int kMaxTroubles = 25;
}  // namespace

CoreOptions SmallRun(const SimOptions& options) {
  return {.num_steps = 6,
          .prompts_per_step = 4,
          .group_size = 2,
          .max_staleness = options.max_staleness,
          .max_prompt_tokens = 100,
          .max_group_replacements = 30,
          .replace_without_signal = options.replaces_without_signal,
          .checkpoint_every = 2,
          .num_eval_prompts = 3,
          .eval_before = true,
          .eval_after = true,
          .eval_every = 4,
          .num_train_lines = 17,
          .seed = 5,
          .num_trainers = options.num_trainers,
          .min_trainers = options.min_trainers,
          .ranks_per_copy = options.ranks_per_copy,
          .trainer_grace_ns = 3000 * kMs,
          .steps_ahead = options.max_staleness > 0 && options.num_trainers == 1,
          .lease_ns = 2000 * kMs,
          .settle_ns = 10 * kMs,
          .retry_ns = 100 * kMs,
          .max_samples_in_flight = 6,
          .max_scores_in_flight = 2};
}

Simulation::Simulation(const SimOptions& options) : Simulation(options, SmallRun(options)) {}

Simulation::Simulation(const SimOptions& options, const CoreOptions& core_options)
    : sim_(options),
      core_options_(core_options),
      random_(options.seed, 77),
      run_clock_(/*max_gap_ns=*/250 * kMs) {
  for (int i = 0; i < options.num_trainers; ++i) {
    AddMember(absl::StrCat("trainer-", i), PoolKind::kTrainer);
  }
  for (int i = 0; i < options.num_generators; ++i) {
    AddMember(absl::StrCat("generator-", i), PoolKind::kGenerator);
  }
  for (int i = 0; i < options.num_scorers; ++i) {
    AddMember(absl::StrCat("scorer-", i), PoolKind::kScorer);
  }
  // Where another can be asked, one generator in some runs says what cannot be.
  if (options.num_generators > 1 && Chance(0.25)) liar_ = "generator-1";
  StartCore();
  for (auto& [name, member] : members_) StartMember(name);
  At(100 * kMs, [this] { TickLoop(); });
  if (sim_.disturbed) ScheduleTrouble();
}

std::string Simulation::Run() {
  while (!is_over_) {
    Require(!queue_.empty(), "nothing will ever happen again");
    Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    Require(now_ < kHour, "the run does not end");
    event.action();
    CarryOut();
  }
  return versions_.at(core_options_.num_steps);
}

void Simulation::Tell(const std::string& text) const {
  if (!sim_.is_told) return;
  std::printf("%8lld ms  %s\n", static_cast<long long>(now_ / kMs), text.c_str());
}

void Simulation::Fault(const std::string& what) const {
  throw SimulationFault(absl::StrCat("seed ", sim_.seed, ", at ", now_ / kMs, " ms: ", what));
}

void Simulation::At(int64_t delay_ns, std::function<void()> action) {
  queue_.push({now_ + delay_ns, num_events_++, std::move(action)});
}

int64_t Simulation::Delay(SimTimes::Range range) {
  const auto width = static_cast<uint64_t>(range.to_ms - range.from_ms + 1);
  return kMs * (range.from_ms + static_cast<int64_t>(random_.Below(width)));
}

void Simulation::AddMember(const std::string& name, PoolKind pool) {
  members_[name].name = name;
  members_[name].pool = pool;
}

void Simulation::StartMember(const std::string& name) {
  SimMember& member = members_[name];
  const uint64_t life = member.life + 1;
  const PoolKind pool = member.pool;
  member = SimMember();
  member.name = name;
  member.pool = pool;
  member.life = life;
  member.is_up = true;
  if (pool == PoolKind::kTrainer && sim_.num_trainers == 1) member.version = Saved();
  HeartbeatLoop(name, life);
}

void Simulation::HeartbeatLoop(const std::string& name, uint64_t life) {
  SimMember& member = members_[name];
  if (!member.is_up || member.life != life) return;
  if (CoreHears() && now_ >= member.cut_off_until && now_ >= member.stopped_until) {
    if (member.epoch == 0 || !core_->OnHeartbeat(name, member.epoch, CoreNow())) {
      const auto epoch = core_->OnRegister(name, member.pool, name, member.version, CoreNow());
      member.epoch = epoch.ok() ? *epoch : 0;
      registered_ = name;
      if (!epoch.ok() && member.pool != PoolKind::kTrainer) Fault(epoch.status().ToString());
    }
  }
  At(200 * kMs, [this, name, life] { HeartbeatLoop(name, life); });
}

void Simulation::TickLoop() {
  if (CoreHears()) core_->OnTick(CoreNow());
  At(50 * kMs, [this] { TickLoop(); });
}

void Simulation::ScheduleTrouble() {
  At(Delay(1500), [this] {
    if (num_troubles_ < kMaxTroubles) Trouble();
    ScheduleTrouble();
  });
}

void Simulation::Trouble() {
  ++num_troubles_;
  if (random_.Below(4) == 0) {
    TroubleCore();
    return;
  }
  auto it = members_.begin();
  std::advance(it, random_.Below(members_.size()));
  if (it->second.is_up) TroubleMember(it->second);
}

void Simulation::TroubleCore() {
  switch (random_.Below(4)) {
    case 0:
      core_stopped_until_ = now_ + Delay(5000);
      Tell("the coordinator is stopped");
      break;
    case 1:
      Tell("the coordinator's clock jumps");
      clock_offset_ += random_.Below(2) == 0 ? kHour : -kHour;
      break;
    default:
      CrashCore();
  }
}

void Simulation::TroubleMember(SimMember& member) {
  switch (random_.Below(4)) {
    case 0:
      member.cut_off_until = now_ + Delay(6000);
      Tell(member.name + " is cut off");
      break;
    case 1:
      member.stopped_until = now_ + Delay(6000);
      Tell(member.name + " is stopped");
      break;
    default:
      member.is_up = false;
      Tell(member.name + " dies");
      At(Delay(4000), [this, name = member.name] { StartMember(name); });
  }
}

void Simulation::CrashCore() {
  Tell("the coordinator dies");
  core_ = nullptr;
  At(Delay(3000), [this] { StartCore(); });
}

// From what was recorded, as the shell does from the journal.
void Simulation::StartCore() {
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
  core_stopped_until_ = 0;
  clock_offset_ = 0;
  run_clock_ = RunClock(/*max_gap_ns=*/250 * kMs);
  core_ = std::make_unique<Core>(core_options_, restored);
}

// A turn: what must be recorded is, as a whole or not at all; then the rest is done, or the
// coordinator dies before it.
void Simulation::CarryOut() {
  if (!CoreHears()) return;
  const std::vector<Command> commands = core_->TakeCommands();
  if (commands.empty()) return;
  CheckBounds();
  const bool crashes = num_troubles_ < kMaxTroubles && Chance(0.003);
  const bool is_lost = crashes && Chance(0.5);
  if (crashes) ++num_troubles_;
  for (const Command& command : commands) {
    const bool is_record = command.index() < kNumRecords;
    if (is_record ? is_lost : crashes) continue;
    std::visit([this](const auto& c) { Do(c); }, command);
  }
  // The answer to whoever registered comes after the commit, and did not come.
  if (crashes && !registered_.empty()) members_[registered_].epoch = 0;
  registered_.clear();
  if (crashes) CrashCore();
}

void Simulation::CheckBounds() const {
  const CoreOptions& o = core_options_;
  const int64_t bound =
      (1 + o.max_staleness) * (o.prompts_per_step + 2 * o.max_group_replacements) +
      o.num_eval_prompts;
  Require(static_cast<int64_t>(core_->groups().size()) <= bound, "too many groups are held");
  for (const auto& [name, member] : core_->members()) {
    const int64_t room = member.pool == PoolKind::kGenerator
                             ? std::max(o.max_samples_in_flight, o.group_size)
                             : o.max_scores_in_flight;
    Require(member.num_in_flight >= 0 && member.num_in_flight <= room,
            "a member has more under way than it has room for");
  }
}

void Simulation::Do(const RecordTrainers& c) {
  Require(c.epoch > trainer_epoch_, "an epoch of trainers comes twice");
  trainer_epoch_ = c.epoch;
}

void Simulation::Do(const RecordGroup& c) {
  Group& known = groups_[c.group.id];
  const bool is_moved = known.id != 0 && known.round != c.group.round;
  Require(!is_moved || core_options_.max_staleness > 0, "a group changes its step");
  num_brought_forward_ += is_moved && c.group.round < known.round ? 1 : 0;
  known = c.group;
}

void Simulation::Do(const RecordBatch& c) {
  Require(batches_.count(c.step) == 0, "a step has two batches");
  Require(static_cast<int64_t>(c.groups.size()) == core_options_.prompts_per_step,
          "a batch is not complete");
  uint64_t last = 0;
  for (const uint64_t id : c.groups) {
    const Group& group = groups_.at(id);
    Require(group.state == GroupState::kScored, "a group without scores is trained on");
    Require(group.kind == GroupKind::kTrain, "an evaluation's group is trained on");
    Require(group.round == c.step, "a group of another step is trained on");
    Require(trained_.insert(group.position).second, "a prompt is trained on twice");
    Require(id == c.groups.front() || group.position > last, "a batch is out of order");
    Require(group.min_version >= c.step - 1 - core_options_.max_staleness, "a group is too old");
    Require(contents_.count(id) == 1, "nothing was generated");
    last = group.position;
  }
  batches_[c.step] = c.groups;
  kl_coefs_[c.step] = c.kl_coef;
}

void Simulation::Do(const RecordVersion& c) {
  Require(c.version.number == (versions_.empty() ? 0 : versions_.rbegin()->first + 1),
          "versions do not grow by one");
  versions_[c.version.number] = c.version.hash;
  version_ms_[c.version.number] = now_ / kMs;
}

void Simulation::Do(const RecordEval& c) {
  Require(evaluated_.insert(c.version).second, "a version is evaluated twice");
  Require(static_cast<int64_t>(c.scored.size()) + c.num_rejected == core_options_.num_eval_prompts,
          "an evaluation is not complete");
}

void Simulation::Do(const RecordCheckpoint& c) {
  Require(durable_.count(c.version) == 1, "a checkpoint is recorded that isn't there");
  Require(c.version > recorded_checkpoint_, "checkpoints are recorded out of order");
  recorded_checkpoint_ = c.version;
}

void Simulation::Do(const EndRun& c) {
  if (!c.status.ok()) Fault(c.status.ToString());
  Require(static_cast<int64_t>(trained_.size()) ==
              core_options_.num_steps * core_options_.prompts_per_step,
          "other than all prompts were trained on");
  std::set<int64_t> due;
  if (core_options_.num_eval_prompts > 0) due = {0, 4, core_options_.num_steps};
  Require(evaluated_ == due, "an evaluation is missing");
  Require(recorded_checkpoint_ == core_options_.num_steps, "the last checkpoint is missing");
  is_over_ = true;
}
}  // namespace stretto::services
