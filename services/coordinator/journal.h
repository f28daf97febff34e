// The run's journal: <run dir>/run.sqlite. What is done is written here before it is done; a run's
// whole story can be told again from it, with plain SQL (the views at the end of journal_schema.cc
// have names to guess: progress, rewards, buffer, rollout_lives, …). One coordinator at a time.
//
// Not thread-safe. Writes gather in a transaction that Commit ends. A failed write stays: every
// later call returns it, so that a full disk stops the run instead of holing its story.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/coordinator/core_types.h"
#include "services/coordinator/sqlite.h"

namespace stretto::services {
// One completion with what is known of it.
struct RolloutRecord {
  uint32_t sample_index = 0;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<int64_t> versions;
  std::vector<float> sampling_logprobs;  // empty where there was no truncation
  std::string finish_reason;             // "stop", "length"
  // From the scorer.
  double reward = 0;
  std::map<std::string, double> components;
  std::vector<float> reference_logprobs;
};

struct GroupRecord {
  uint64_t id = 0;
  DatasetPlace place;
  std::vector<int32_t> prompt_ids;
  std::vector<RolloutRecord> rollouts;  // in sample order
};

struct StepRecord {
  int64_t step = 0;
  std::map<std::string, double> metrics = {};
  double seconds = 0;
  std::string skip_reason = {};  // empty: taken
};

struct RunTotals {
  uint64_t num_rollouts = 0;  // of training groups, complete
  uint64_t num_tokens = 0;    // completion tokens of training and evaluation
  uint64_t num_rejected_groups = 0;
  double seconds = 0;               // of all sessions
  double logprob_mismatch_max = 0;  // over the steps
  uint64_t peak_rss_bytes = 0;      // sum over the members
  int64_t num_sessions = 0;
};

class Journal {
 public:
  // Creates or opens `path`; waits so long for a process that has it to end, as members of a run
  // that was killed do. FAILED_PRECONDITION: another process has it still, or its run's essence (a
  // text that says what must not change, see RunEssence) is another.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const std::string& path,
                                                       const std::string& run_id,
                                                       const std::string& essence,
                                                       absl::Duration wait = absl::ZeroDuration());
  ~Journal();

  const std::string& run_id() const { return run_id_; }  // as it was at first
  absl::StatusOr<RestoredRun> Restore();

  void Write(const RecordMember& record);
  void Write(const RecordGroup& record);
  void Write(const RecordTrainers& record);
  void Write(const RecordBatch& record);
  void Write(const RecordVersion& record);
  void Write(const RecordEvent& record);
  void WriteCheckpoint(int64_t version, const std::string& hash, const std::string& path);
  void WriteEval(int64_t version, double score, int64_t num_prompts, int64_t num_rejected);
  void WriteStep(const StepRecord& step, double next_kl_coef);
  void WritePromptIds(uint64_t group, absl::Span<const int32_t> ids);
  void WriteRollouts(uint64_t group, const std::vector<RolloutRecord>& rollouts);
  // Rewards and reference log-probs of rollouts that are there.
  void WriteScores(uint64_t group, const std::vector<RolloutRecord>& rollouts,
                   const std::string& scorer_tag);
  // FAILED_PRECONDITION: what gives the scores is not what gave the run's first ones.
  absl::Status CheckScorerTag(const std::string& tag);
  void WritePeakRss(const std::string& member, uint64_t bytes);
  void WriteSessionSeconds(double seconds);
  // Makes all writes durable: against the end of the process always, with `sync` against the
  // machine's as well.
  absl::Status Commit(bool sync);
  // What has been committed, against the machine's end.
  absl::Status Sync();
  const absl::Status& status() const { return status_; }
  // Fails the journal if its file is not where it was: somebody has removed or replaced it, and
  // what is written goes nowhere.
  void CheckPlace();

  // How often the run has been opened, this time included.
  int64_t session() const { return session_; }
  absl::StatusOr<GroupRecord> ReadGroup(uint64_t id);
  absl::StatusOr<std::vector<uint64_t>> ReadBatch(int64_t step);
  absl::StatusOr<std::vector<StepRecord>> ReadSteps();
  absl::StatusOr<std::map<int64_t, double>> ReadEvals();
  absl::StatusOr<std::map<int64_t, double>> ReadEvalRewards();  // means
  absl::StatusOr<RunTotals> ReadTotals();
  // Hash and path of the newest checkpoint; empty: none.
  absl::StatusOr<std::pair<std::string, std::string>> ReadCheckpoint();

 private:
  Journal(std::unique_ptr<Sqlite> db, int lock_fd, std::string path)
      : db_(std::move(db)), lock_fd_(lock_fd), path_(std::move(path)) {}
  absl::Status Prepare(const std::string& run_id, const std::string& essence);
  absl::Status BeginAgain(const std::string& run_id, const std::string& essence);
  absl::StatusOr<std::string> ReadMeta(const std::string& key);
  absl::Status RestoreVersions(RestoredRun* run);
  absl::Status RestoreGroups(RestoredRun* run);
  absl::Status RestorePause(RestoredRun* run);
  void Run(Sqlite::Query& query);
  bool Writable();

  std::unique_ptr<Sqlite> db_;
  int lock_fd_;
  std::string scorer_tag_;  // as recorded; empty: not read yet
  const std::string path_;
  uint64_t inode_ = 0;  // of the file at path_
  std::string run_id_;
  int64_t session_ = 0;
  bool in_transaction_ = false;
  absl::Status status_;
};

extern const char kJournalSchema[];
inline constexpr int kJournalSchemaVersion = 2;
// The key of `meta` that holds the epoch of the newest group of trainers, if there was one.
inline constexpr char kTrainerEpoch[] = "trainer_epoch";
}  // namespace stretto::services
