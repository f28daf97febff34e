// The coordinator's core among simulated members, network, disk and clock. Everything is drawn from
// a seed. What must hold always is checked as it goes; a violation is thrown as SimulationFault and
// says what and when.
//
// Troubles: members and the coordinator crash (the coordinator also between the commit of a turn
// and the acts that follow it, or before the commit, so that the turn is lost), stop for a while
// and go on, are cut off from each other; answers come late, twice, out of order, as failures or
// never; the coordinator's clock jumps by an hour, on or back; a generator lies.
//
// Checked always: each prompt of the stream enters training at most once and, as the runs end,
// those of every step exactly once; no group over the staleness bound is trained on; versions grow
// by one; a step taken again gives the same hash; no epoch of a trainers' group is used twice, and
// each has whole copies of the model where ranks share one; no checkpoint is recorded that isn't on
// the disk, and the last one is; what the core holds and has under way is bounded; the run ends.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "base/philox.h"
#include "services/coordinator/core.h"
#include "services/coordinator/run_clock.h"

namespace stretto::services {
struct SimulationFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Between how many milliseconds each kind of work takes.
struct SimTimes {
  struct Range {
    int64_t from_ms = 1, to_ms = 1;
  };
  Range tokenize{1, 20}, generate{1, 400}, score{1, 100}, prepare{1, 150}, commit{1, 20};
  Range train{1, 500}, save{1, 1200};
  bool is_batched = false;  // all groups of a step are generated, and scored, in the same time
};

struct SimOptions {
  uint64_t seed = 0;
  int64_t max_staleness = 0;
  bool disturbed = true;
  int num_generators = 2, num_scorers = 1, num_trainers = 1, min_trainers = 1;
  int ranks_per_copy = 1;  // trainers that share one copy of the model
  bool replaces_without_signal = false;
  bool is_told = false;  // what happens is printed
  SimTimes times = {};
};

// The options of a small run that checks everything: six steps of four groups, evaluations,
// prompts that are too long or unreadable.
CoreOptions SmallRun(const SimOptions& options);

struct SimMember {
  std::string name;
  PoolKind pool = PoolKind::kGenerator;
  bool is_up = false;
  int64_t stopped_until = 0;  // it does nothing
  int64_t cut_off_until = 0;  // alive, but nobody hears it
  uint64_t epoch = 0, life = 0;
  Version version;
  Version prepared;
  int64_t stalled_ns = 0;                        // in which it generated nothing, in all
  std::map<int64_t, std::string> results;        // trainers: version → hash, of this life
  std::map<int64_t, std::string> saves;          // version → what its share failed of
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
  explicit Simulation(const SimOptions& options);
  Simulation(const SimOptions& options, const CoreOptions& core_options);

  // Runs until the run has ended; the final version's hash.
  std::string Run();
  int num_troubles() const { return num_troubles_; }
  // Saves that ended when training had gone on.
  int64_t num_saved_behind() const { return num_saved_behind_; }
  // Steps that were asked for while the one before was under way.
  int64_t num_ahead() const { return num_ahead_; }
  // Groups that were given to an earlier step than they were made for.
  int64_t num_brought_forward() const { return num_brought_forward_; }
  // Groups of trainers that went on with fewer copies of the model, each shared by several ranks.
  int64_t num_copies_lost() const { return num_copies_lost_; }
  int64_t num_events() const { return static_cast<int64_t>(num_events_); }
  const std::map<std::string, int64_t>& faults() const { return faults_; }
  // When each version came to be, in milliseconds since the start.
  const std::map<int64_t, int64_t>& version_ms() const { return version_ms_; }

 private:
  struct Event {
    int64_t time;
    uint64_t order;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return std::tie(other.time, other.order) < std::tie(time, order);
    }
  };
  using Work = std::function<absl::Status(SimMember&)>;

  // simulation.cc: time, troubles, and the disk.
  void At(int64_t delay_ns, std::function<void()> action);
  int64_t Delay(SimTimes::Range range);
  int64_t Delay(int64_t max_ms) { return Delay({1, max_ms}); }
  SimTimes::Range OfGroup(SimTimes::Range range, uint64_t group);
  bool Chance(double p) { return sim_.disturbed && random_.NextDouble() < p; }
  int64_t CoreNow() { return run_clock_.Read(now_ + clock_offset_); }
  bool CoreHears() const { return core_ != nullptr && now_ >= core_stopped_until_; }
  void AddMember(const std::string& name, PoolKind pool);
  void StartMember(const std::string& name);
  void HeartbeatLoop(const std::string& name, uint64_t life);
  void TickLoop();
  void ScheduleTrouble();
  void Trouble();
  void TroubleCore();
  void TroubleMember(SimMember& member);
  void CrashCore();
  void StartCore();
  void CarryOut();
  void CheckBounds() const;
  void Tell(const std::string& text) const;
  [[noreturn]] void Fault(const std::string& what) const;
  void Require(bool holds, const char* what) const {
    if (!holds) Fault(what);
  }

  void Do(const RecordMember& c) { epochs_[c.name] = std::max(epochs_[c.name], c.epoch); }
  void Do(const RecordTrainers& c);
  void Do(const RecordGroup& c);
  void Do(const RecordBatch& c);
  void Do(const RecordVersion& c);
  void Do(const RecordCheckpoint& c);
  void Do(const RecordEval& c);
  void Do(const RecordEvent& c) { Tell(c.text); }
  void Do(const CancelGenerate&) {}
  void Do(const CountFault& c) { ++faults_[c.kind]; }
  void Do(const EndRun& c);

  // simulated_members.cc: the work.
  template <class Asked>
  void Serve(const Asked& asked, SimTimes::Range time, Work work);
  template <class Asked>
  void Deliver(const Asked& asked, const Work& work, uint64_t life, uint64_t core_life,
               int64_t stalled_ns);
  template <class Asked>
  void Hand(const Asked& asked, const absl::Status& status, const Version& version,
            uint64_t core_life);
  Version Saved() const { return checkpoint_.number < 0 ? Version{0, "zero"} : checkpoint_; }
  // Why the group's save comes to nothing, if it does.
  std::string SaveError(const SimMember& trainer, const AwaitSave& c);
  absl::Status AllTakePart(const SimMember& rank, uint64_t group_epoch);
  std::string HashOfStep(const TakeStep& c, const Version& base);
  void Do(const TokenizePrompts& c);
  void Do(const GenerateGroup& c);
  void Do(const ScoreGroup& c);
  void Do(const PrepareVersion& c);
  void Do(const CommitVersion& c);
  void Do(const PrepareRank& c);
  void Do(const JoinRank& c);
  void Do(const TakeStep& c);
  void Do(const AskTrainer& c);
  void Do(const BeginSave& c);
  void Do(const AwaitSave& c);
  // `version`: that the member held when it answered.
  void Answer(const TokenizePrompts& c, const absl::Status& status, const Version& version);
  void Answer(const GenerateGroup& c, const absl::Status& status, const Version& version);
  void Answer(const ScoreGroup& c, const absl::Status& status, const Version& version);
  void Answer(const PrepareVersion& c, const absl::Status& status, const Version& version);
  void Answer(const CommitVersion& c, const absl::Status& status, const Version& version);
  void Answer(const PrepareRank& c, const absl::Status& status, const Version& version);
  void Answer(const JoinRank& c, const absl::Status& status, const Version& version);
  void Answer(const TakeStep& c, const absl::Status& status, const Version& version);
  void Answer(const AskTrainer& c, const absl::Status& status, const Version& version);
  void Answer(const BeginSave& c, const absl::Status& status, const Version& version);
  void Answer(const AwaitSave& c, const absl::Status& status, const Version& version);

  const SimOptions sim_;
  const CoreOptions core_options_;
  PhiloxStream random_;
  std::unique_ptr<Core> core_;
  std::priority_queue<Event> queue_;
  int64_t now_ = 0;
  RunClock run_clock_;
  int64_t clock_offset_ = 0, core_stopped_until_ = 0;
  uint64_t num_events_ = 0, core_life_ = 0;
  int num_troubles_ = 0;
  bool is_over_ = false;
  std::map<std::string, SimMember> members_;
  std::string liar_;        // a generator
  std::string registered_;  // in this turn
  Version checkpoint_;      // on the trainers' disk
  std::set<int64_t> durable_;
  std::map<std::tuple<std::string, uint64_t, int64_t>, std::string> save_errors_;
  int64_t num_saved_behind_ = 0, num_copies_lost_ = 0, num_ahead_ = 0;
  int64_t num_brought_forward_ = 0;
  std::map<uint64_t, SimGroup> sim_groups_;
  std::map<std::string, int64_t> faults_;
  std::map<int64_t, int64_t> version_ms_;
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
  // Member, its epoch, group, attempt: a coordinator that restarts counts attempts as before.
  using Asking = std::tuple<std::string, uint64_t, uint64_t, uint64_t>;
  static Asking Key(const GenerateGroup& c) { return {c.member, c.epoch, c.group, c.attempt}; }
  std::map<Asking, Version> written_by_;
};
}  // namespace stretto::services
