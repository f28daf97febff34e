// The coordinator's brain: a deterministic state machine. Events come in as calls, commands go out
// through TakeCommands(); there is no clock (time comes with each call), no socket, no thread and
// no randomness in here. The shell around it (coordinator.h) writes the Record* commands to the
// journal before it carries out the others.
//
//   prompts ──(1)──> groups ──(2)──> generators ──(3)──> scorers ──(4)──> batch ──(5)──> trainer
//      ^                                 ^                                                  │
//      └──────────── window ────────(8)──┴───────── new version <───────────(6)─────────────┘
//
// The loops, and what unblocks each:
//  1. A step's groups are made from the next positions of the prompt stream, for steps up to
//     version + 1 + max_staleness. Unblocked by a new version; by a rejected group (replaced).
//  2. A group goes to a generator that has room and a version no older than the step allows.
//     Unblocked by a finished group (room), a committed version, a member that joins.
//  3. A generated group goes to a scorer with room. Unblocked by a scored group.
//  4. A step's batch is its groups in stream order. Complete when all are scored; with
//     max_staleness, complete groups of later steps take the places of those that are not
//     (core_batches.cc).
//  5. The trainer takes one step at a time, the one after its version; of several, each takes its
//     part, and the step is taken when all have given the same hash. Unblocked by a complete batch,
//     the end of an evaluation, the end of the step before, a group of trainers that is formed. One
//     that is alone is told of the next step meanwhile, so that it need not wait for it: where its
//     batch is complete and neither an evaluation nor a checkpoint comes between (steps_ahead).
//  6. A new version is recorded with its hash; only then does it exist.
//  7. A checkpoint is begun between two steps and written while the next ones are taken; it exists
//     when all ranks have said so. Unblocked by the end of the save before.
//  8. Generators prepare and commit it, one operation at a time each; bytes go along trees of them
//     (core_weights.cc). Unblocked by the trainer having it.
// An evaluation at version v (kEval groups, greedy) stands between step v and step v + 1.
//
// Whatever a member does not answer, or answers under an old epoch or attempt, is given to another:
// results are pure functions of what was asked, so nothing is lost by asking twice. A trainer that
// restarts at an older version is sent the recorded batches again and must arrive at the same
// hashes. Several trainers do so as one: their group is formed anew (core_trainers.cc).
#pragma once

#include <deque>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/coordinator/core_types.h"

namespace stretto::services {
enum class RunPhase { kWaiting, kRunning, kPaused, kStopping, kDone, kFailed };

struct Member {
  std::string name;
  PoolKind pool = PoolKind::kGenerator;
  std::string address;
  uint64_t epoch = 0;
  bool is_live = false;
  std::string state;  // "live", "silent", "left"
  Version version;
  int64_t last_seen_ns = 0;
  int64_t not_before_ns = 0;      // after a fault of its own
  int64_t num_in_flight = 0;      // samples (generators), groups and calls (scorers)
  std::set<uint64_t> tokenizing;  // scorers: calls that are to be answered
  int64_t num_faults = 0;         // answers in a row that cannot be true
  bool is_preparing = false, is_committing = false;  // generators
  Version prepared;
};

// One trainer of those that train together, in order of rank.
struct TrainerRank {
  std::string name;
  uint64_t epoch = 0;        // of the member
  std::string peer_address;  // of collectives; kJoining and kReady
  bool is_asked = false;     // something, and has not answered
  Version version;           // as it said last
};
// The trainers of the run, or the one it is to have: a group of one at epoch 0.
struct TrainerGroup {
  enum class Phase { kNone, kPreparing, kJoining, kReady };
  Phase phase = Phase::kNone;
  uint64_t epoch = 0;
  std::vector<TrainerRank> ranks;
  Version version;                // that all hold; number -1: unknown
  int64_t missing_since_ns = -1;  // how long there has been no complete group; -1: there is one
  int64_t step = -1;              // that is under way; -1: none
  int64_t ahead = -1;             // that has been asked for beside it, to follow it; -1: none

  // The rank that is to answer this; nullptr: nobody waits for it any more.
  TrainerRank* Asked(const std::string& member, uint64_t member_epoch, uint64_t group_epoch);
  bool is_busy() const;
  bool Has(const std::string& member) const;
  bool HoldOneVersion() const;
  std::string Names() const;  // "trainer-0, trainer-1"
};

// A save under way, of all ranks of the group that began it.
struct CheckpointSave {
  int64_t version = -1;           // -1: there is none
  bool is_begun = false;          // by all
  std::set<std::string> awaited;  // ranks that have not said that it began, or how it went
  std::string error;              // the first that was told
  double seconds = 0;             // the longest
};
// What has become of the saves.
struct CheckpointLog {
  int64_t version = -1;                       // of the newest checkpoint
  int64_t begun_version = -1, begun_ns = -1;  // of the newest save that was not lost
  int64_t saved_ns = -1;                      // when the newest checkpoint's was begun
  int64_t requested_version = -1;             // the least that somebody has asked for
  int64_t not_before_ns = 0;                  // after one that failed
  int64_t num_failures = 0, num_failures_in_row = 0;
  double save_seconds = -1, interval_seconds = 0;  // kAutoCheckpoints
  std::string error;                               // of the last one; empty: it went well
};
// How long to train between checkpoints that take `save_seconds` so that saving them and repeating
// what a failure loses cost least.
double CheckpointIntervalSeconds(double save_seconds, double mtbf_seconds);

// Not thread-safe. `now_ns` never goes back from call to call.
class Core {
 public:
  Core(CoreOptions options, RestoredRun restored);

  // Members. Register returns the new epoch. A trainer whose version contradicts the run's is
  // FAILED_PRECONDITION. Heartbeat: whether the epoch is the member's present one.
  absl::StatusOr<uint64_t> OnRegister(const std::string& name, PoolKind pool,
                                      const std::string& address, const Version& version,
                                      int64_t now_ns);
  bool OnHeartbeat(const std::string& name, uint64_t epoch, int64_t now_ns);
  void OnLeave(const std::string& name, uint64_t epoch, int64_t now_ns);

  // Answers. Those that return bool say whether the answer counts: the shell drops the data of one
  // that does not. A status that is not OK is the call's failure.
  // One length or error per group asked, in order.
  struct TokenizedPrompt {
    int64_t length = 0;
    std::string error = {};
    std::string place = {};  // where its line stands, for messages
  };
  bool OnTokenized(const TokenizePrompts& asked, const absl::Status& status,
                   const std::vector<TokenizedPrompt>& prompts, int64_t now_ns);
  // min_version: the oldest version that wrote one of the group's tokens. DATA_LOSS: what came
  // cannot be true (lengths, versions). The group is asked for again; whoever answered so is given
  // less and less.
  bool OnGenerated(const GenerateGroup& asked, const absl::Status& status, int64_t min_version,
                   int64_t now_ns);
  // A reward that failed is not OK with code ABORTED: a failure of the group, which is replaced
  // when it fails again. Any other code says that the scorer or whoever it asks is out of reach:
  // the group waits for as long as that lasts.
  bool OnScored(const ScoreGroup& asked, const absl::Status& status, int64_t now_ns,
                bool has_signal = true);
  void OnPrepared(const PrepareVersion& asked, const absl::Status& status, int64_t now_ns);
  void OnCommitted(const CommitVersion& asked, const absl::Status& status, int64_t now_ns);
  void OnRankPrepared(const PrepareRank& asked, const absl::Status& status,
                      const std::string& peer_address, int64_t now_ns);
  void OnRankJoined(const JoinRank& asked, const absl::Status& status, const Version& version,
                    int64_t now_ns);
  // measured_kl: NaN where there is none. Of several ranks the last to answer decides what is
  // returned.
  bool OnStepTaken(const TakeStep& asked, const absl::Status& status, const Version& version,
                   double measured_kl, int64_t now_ns);
  void OnTrainerStatus(const AskTrainer& asked, const absl::Status& status, const Version& version,
                       int64_t now_ns);
  void OnSaveBegun(const BeginSave& asked, const absl::Status& status, int64_t now_ns);
  // status: of the call; that the save has failed is in the result. Whether this rank's answer
  // counts and says that the checkpoint is there.
  struct SaveResult {
    std::string error;
    double seconds = 0;
  };
  bool OnSaveOver(const AwaitSave& asked, const absl::Status& status, const SaveResult& result,
                  int64_t now_ns);

  void OnTick(int64_t now_ns);
  void OnPause(bool pause, int64_t now_ns);
  void OnCheckpointRequest(int64_t now_ns);
  void OnStop(int64_t now_ns);
  void OnFault(const absl::Status& status, int64_t now_ns);  // of the shell; the run fails

  std::vector<Command> TakeCommands();

  RunPhase phase() const;
  // What the run is doing ("evaluating", "generating", "training", "saving a checkpoint") and what
  // it waits for or died of.
  std::string activity() const;
  std::string detail() const;
  const Version& version() const { return version_; }
  int64_t version_number() const { return version_.number < 0 ? 0 : version_.number; }
  double kl_coef() const { return kl_coef_; }
  const std::map<std::string, Member>& members() const { return members_; }
  const std::map<uint64_t, Group>& groups() const { return groups_; }
  const TrainerGroup& trainers() const { return trainers_; }
  const CheckpointSave& save() const { return save_; }
  const CheckpointLog& checkpoints() const { return checkpoints_; }
  int64_t num_rejected() const { return num_rejected_; }
  int64_t num_stale_dropped() const { return num_stale_dropped_; }
  int64_t num_without_signal() const { return num_without_signal_; }  // replaced
  // Complete groups that an earlier step was given in place of others.
  int64_t num_brought_forward() const { return num_brought_forward_; }
  // Complete groups that wait for their batch.
  int64_t num_buffered() const;
  bool IsGenerating() const;
  // Rollouts of the step, or of the evaluation, that is being put together.
  struct Round {
    int64_t num_wanted = 0, num_generated = 0, num_scored = 0;
  };
  Round round() const;

 private:
  void Advance(int64_t now_ns);
  void ExpireLeases(int64_t now_ns);
  void DropWorkOf(const std::string& member, const std::string& why, int64_t now_ns);
  Member* Current(const std::string& name, uint64_t epoch);
  void Distrust(Member* member, int64_t now_ns);
  Group* Awaited(uint64_t id, uint64_t attempt, GroupState state);
  Member* PickScorer(int64_t now_ns);
  // Whether all of its tokens are to be of the version that the generator has when it is asked.
  bool IsPinned(const Group& group) const;
  Member* PickGenerator(const Group& group, int64_t now_ns);

  // Whether several trainers make up a group.
  bool has_group() const { return options_.num_trainers > 1; }
  int64_t NumLiveTrainers() const;
  int64_t NumRanksWanted(int64_t now_ns) const;
  int64_t WholeCopies(int64_t num_ranks) const;
  void FormTrainers(int64_t now_ns);
  void LoseTrainers(const std::string& why, int64_t now_ns);
  void TrainersFailed(const absl::Status& status, const std::string& what, int64_t now_ns);
  absl::Status RanksDisagree() const;
  void SetTrainersVersion(const Version& version);
  const Member* Trainer(int64_t now_ns) const;
  bool TrainerHasVersion() const;
  void TrainersLackVersion(int64_t now_ns);

  bool TrainersWait() const;
  bool CheckpointIsDue(int64_t version, int64_t now_ns) const;
  void BeginCheckpoint(int64_t now_ns);
  bool IsAwaited(const std::string& member, uint64_t epoch, uint64_t group_epoch, int64_t version);
  void DropSave();
  void EndSave(int64_t now_ns);

  void MakeGroups();
  void RejectWithoutSignal(int64_t step);
  void MakeEvalGroups();
  Group& NewGroup(GroupKind kind, int64_t round, uint64_t position, DatasetPlace place);
  void Tokenize(int64_t now_ns);
  void Dispatch(int64_t now_ns);
  void Score(int64_t now_ns);
  void SyncWeights(int64_t now_ns);
  // Of a generator in the tree along which the newest version spreads.
  struct RelayPlace {
    std::string above;  // whom it fetches from; empty: the trainer
    Version from;       // that it had before
  };
  std::vector<std::string> PlanSources(const Member& member, const Member& trainer);
  int64_t DepthOf(const RelayPlace& place) const;
  void ForgetRelay(const std::string& name);
  void DriveTrainer(int64_t now_ns);
  void FinishEval();
  void TryEnd();
  void Note(const std::string& text);

  void SetState(Group* group, GroupState state);
  void Requeue(Group* group, GroupState state, int64_t not_before_ns);
  void Reject(Group* group, const std::string& reason);
  void Fail(const absl::Status& status);
  void End(const absl::Status& status, const std::string& detail);
  bool MayWaitUntil(int64_t step, const Group& group) const;
  void BringForward(int64_t step);
  bool GatherBatch(int64_t step, std::vector<uint64_t>* batch);
  bool RecordNextBatch(int64_t step);
  void TrainNextStep();
  void TrainStepAhead(int64_t now_ns);
  void AskForStep(int64_t step, const Version& base, bool is_replay);
  void StepRecorded(const TakeStep& asked, const Version& version, double measured_kl);
  absl::Status CheckReference(const Version& version) const;
  absl::Status CheckTrainerVersion(const Version& version) const;

  bool IsOver() const { return ended_; }
  bool EvalIsDue() const { return EvalIsDue(version_.number); }
  bool EvalIsDue(int64_t version) const;
  std::vector<Group*> GroupsOf(GroupKind kind, int64_t round);
  template <class T>
  void Emit(T command) {
    commands_.push_back(std::move(command));
  }

  const CoreOptions options_;
  EpochOrder order_;
  std::vector<Command> commands_;

  std::map<std::string, Member> members_;
  std::map<std::string, uint64_t> epochs_;
  std::map<uint64_t, Group> groups_;         // of rounds that are not over
  std::map<int64_t, int64_t> num_replaced_;  // by step
  std::map<int64_t, std::string> versions_;
  std::map<int64_t, double> kl_coefs_;
  std::set<int64_t> evaluated_;

  Version version_;  // the run's; number -1 until the first trainer came
  double kl_coef_;
  uint64_t next_group_, next_position_, next_call_ = 1;
  int64_t num_rejected_ = 0, num_stale_dropped_ = 0, num_without_signal_ = 0;
  int64_t num_brought_forward_ = 0;

  Version relayed_version_;
  std::map<std::string, RelayPlace> relays_;  // of relayed_version_

  TrainerGroup trainers_;
  int64_t trainer_failures_ = 0;  // in a row
  int64_t num_not_held_ = 0;      // times in a row that generators did not find the run's version
  std::string trainer_activity_;
  CheckpointSave save_;
  CheckpointLog checkpoints_;
  bool paused_ = false, stopping_ = false, ended_ = false;
  absl::Status end_status_;
  std::string end_detail_, last_note_;
  std::string no_reward_;  // why the newest score could not be had; empty after one that could
};
}  // namespace stretto::services
