// What goes into the coordinator's state machine and what comes out: options, commands and the
// state that a journal gives back. Plain values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "rl/kl.h"
#include "services/coordinator/epoch_order.h"

namespace stretto::services {
enum class PoolKind { kGenerator, kScorer, kTrainer };
const char* PoolName(PoolKind pool);  // "generator", "scorer", "trainer"

struct Version {
  int64_t number = -1;  // -1: none
  std::string hash;
  bool operator==(const Version&) const = default;
};

// CoreOptions::checkpoint_every: as often as loses the least time.
inline constexpr int64_t kAutoCheckpoints = -1;

struct CoreOptions {
  int64_t num_steps = 0;
  int64_t prompts_per_step = 1;
  int64_t group_size = 1;
  int64_t max_staleness = 0;
  int64_t max_prompt_tokens = 0;        // what the run allows; longer prompts are rejected
  int64_t max_group_replacements = 0;   // of one step
  bool replace_without_signal = false;  // groups whose rewards are all the same; within that bound
  int64_t checkpoint_every = 0;         // steps; 0: only at the end; kAutoCheckpoints
  double checkpoint_mtbf_seconds = 86400;  // for kAutoCheckpoints: between failures
  bool stop_on_failed_save = false;
  int64_t num_eval_prompts = 0;  // 0: no evaluation
  bool eval_before = false, eval_after = false;
  int64_t eval_every = 0;
  uint64_t num_train_lines = 1;
  uint64_t seed = 0;
  bool shuffle = true;
  double kl_coef = 0;  // of the first step
  rl::KlController kl_controller = {};
  int64_t num_trainers = 1;    // that train together
  int64_t min_trainers = 1;    // that go on when the others don't come within the grace
  int64_t ranks_per_copy = 1;  // of the model: a group has a multiple of these
  int64_t trainer_grace_ns = 30'000'000'000;
  int64_t relay_fanout = 1;  // generators that each sender of weights feeds
  // A trainer that is alone may be asked for a step before it has answered with the one before:
  // nothing of a step depends on what the one before has measured.
  bool steps_ahead = false;

  int64_t lease_ns = 5'000'000'000;
  int64_t settle_ns = 0;           // a new member learns its epoch before it is given work
  int64_t retry_ns = 300'000'000;  // before what failed is tried again
  int64_t max_samples_in_flight =
      1;  // at one generator; a group is always let in when there is none
  int64_t max_scores_in_flight = 4;   // groups at one scorer
  int64_t max_tokenize_batch = 64;    // prompts of one call
  int64_t max_score_attempts = 2;     // answered with a failed reward; then the group is replaced
  int64_t max_generate_failures = 4;  // faults other than a lost generator; then it is replaced
  int64_t max_lies = 16;  // answers that cannot be true before the group is held to be the reason
};

enum class GroupKind { kTrain, kEval };
enum class GroupState {
  kNew,         // wants prompt ids
  kTokenizing,  // a scorer is asked
  kReady,       // wants a generator
  kGenerating,
  kGenerated,  // wants a scorer
  kScoring,
  kScored,  // complete
  kRejected
};
const char* Name(GroupState state);

// The reason of groups that were rejected because nothing can be learnt from them.
inline constexpr char kNoSignal[] = "no signal: all its completions have the same reward";
// The epoch of evaluation prompts' ids: no pass of the training data has it.
inline constexpr uint32_t kEvalEpoch = 0xffffffff;

struct Group {
  uint64_t id = 0;
  GroupKind kind = GroupKind::kTrain;
  int64_t round = 0;      // kTrain: the step it is for; kEval: the version evaluated
  uint64_t position = 0;  // in the stream of prompts; kEval: the line
  DatasetPlace place;
  GroupState state = GroupState::kNew;
  std::string reason;  // kRejected: why

  uint64_t attempt = 0;  // of the present state's work; answers to others are refused
  std::string member;    // who works on it now
  int64_t not_before_ns = 0;
  int64_t num_failures = 0, num_score_failures = 0, num_lies = 0;
  int64_t held_version = -1;  // kGenerating: of the generator when it was asked
  int64_t min_version = -1;   // oldest version that wrote a token; from kGenerated on
  bool has_signal = true;     // kScored: its rewards differ
};

// Commands. Record* say what the journal must hold before any of the others is carried out.
struct RecordMember {
  std::string name;
  PoolKind pool;
  std::string address;
  uint64_t epoch;
  std::string state;
};
struct RecordGroup {
  Group group;
};
// An attempt to form a group of trainers; its epoch is used up.
struct RecordTrainers {
  uint64_t epoch;
  std::string names;
};
struct RecordBatch {
  int64_t step;
  double kl_coef;
  std::vector<uint64_t> groups;
};
struct RecordVersion {
  Version version;
};
struct RecordCheckpoint {
  int64_t version;
};
// An evaluation is complete: its groups (kScored or kRejected) in line order.
struct RecordEval {
  int64_t version;
  std::vector<uint64_t> scored;
  int64_t num_rejected;
};
struct RecordEvent {
  std::string text;
};

// Work at a member. Each is answered by one On… call with the same member epoch and attempt.
struct TokenizePrompts {
  std::string member;
  uint64_t epoch;
  std::vector<uint64_t> groups;
  uint64_t call;  // no other has this number
};
struct GenerateGroup {
  std::string member;
  uint64_t epoch;
  uint64_t group;
  uint64_t attempt;
  Version expected;  // number -1: whichever is current
  // Of the member when it was asked; it cannot have written with an older one.
  int64_t held_version = 0;
};
struct CancelGenerate {
  uint64_t group;
  uint64_t attempt;
  std::string member = "";  // that has lost it; empty: nobody needs it any more
};
struct ScoreGroup {
  std::string member;
  uint64_t epoch;
  uint64_t group;
  uint64_t attempt;
};
struct PrepareVersion {
  std::string member;
  uint64_t epoch;
  Version version;
  std::vector<std::string> sources;  // addresses, best first; the trainer's is the last
};
struct CommitVersion {
  std::string member;
  uint64_t epoch;
  Version version;
};
// To each rank of a group that is to be formed.
struct PrepareRank {
  std::string member;
  uint64_t epoch;
  uint64_t group_epoch;
};
struct JoinRank {
  struct Peer {
    std::string name, address;
  };
  std::string member;
  uint64_t epoch = 0;
  uint64_t group_epoch = 0;
  std::vector<Peer> ranks;
  uint32_t rank = 0;
};
// To each rank; group_epoch 0: there is one trainer, without a group. So of saves. A base without a
// hash is still being computed.
struct TakeStep {
  std::string member;
  uint64_t epoch;
  uint64_t group_epoch;
  int64_t step;
  Version base;
  double kl_coef;
  bool is_replay;
};
struct AskTrainer {
  std::string member;
  uint64_t epoch;
};
// A checkpoint is begun on all ranks, which then train on; each says when it is over.
struct BeginSave {
  std::string member;
  uint64_t epoch;
  uint64_t group_epoch;
  int64_t version;
};
struct AwaitSave {
  std::string member;
  uint64_t epoch;
  uint64_t group_epoch;
  int64_t version;
};
// Something went wrong that the run has dealt with; docs/faults.md lists the kinds.
struct CountFault {
  std::string kind;
  std::string member;
};
// The last command of a run.
struct EndRun {
  absl::Status status;  // OK: done or stopped
  std::string detail;
};

using Command =
    std::variant<RecordMember, RecordGroup, RecordTrainers, RecordBatch, RecordVersion,
                 RecordCheckpoint, RecordEval, RecordEvent, TokenizePrompts, GenerateGroup,
                 CancelGenerate, ScoreGroup, PrepareVersion, CommitVersion, PrepareRank, JoinRank,
                 TakeStep, AskTrainer, BeginSave, AwaitSave, CountFault, EndRun>;

inline constexpr size_t kNumRecords = 8;  // the first of them are the records

// What a journal knows of an earlier life of the run.
struct RestoredRun {
  std::map<int64_t, std::string> versions;  // number → hash; the largest is the run's version
  std::map<int64_t, double> kl_coefs;       // step → coefficient, of recorded batches
  double next_kl_coef = -1;                 // of the step after the newest; -1: as at the start
  std::vector<Group> groups;                // of rounds that are not over
  std::map<std::string, uint64_t> member_epochs;
  uint64_t trainer_epoch = 0;      // of the newest group of trainers, or attempt at one
  std::vector<int64_t> evaluated;  // versions
  bool paused = false;             // on request, which nobody has taken back
  int64_t checkpoint_version = -1;
  uint64_t next_group = 1;
  uint64_t next_position = 0;
};
}  // namespace stretto::services
