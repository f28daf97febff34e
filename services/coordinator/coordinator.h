// The shell around the core: one loop thread owns core and journal; gRPC's threads only post to it.
//
//   gRPC server ──post──┐                       ┌──> journal (one transaction a turn)
//   answers of calls ───┼──> loop: core, events ┼──> calls to members
//   ticks ──────────────┘                       └──> status, metrics, files
//
// A turn: take what has been posted, tell the core, write what must be recorded, commit, and only
// then answer members and carry out commands. A new version is synced to the disk as well before
// anybody but the trainers, which take the next step, hears of it. A journal that can't be written
// ends the run.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "config/run_config.h"
#include "services/common/metrics.h"
#include "services/common/stop_signal.h"
#include "services/coordinator/balance.h"
#include "services/coordinator/calls.h"
#include "services/coordinator/core.h"
#include "services/coordinator/dataset.h"
#include "services/coordinator/journal.h"
#include "services/coordinator/rank_health.h"
#include "services/coordinator/run_clock.h"
#include "services/coordinator/run_outputs.h"
#include "stretto/v1/coordinator.pb.h"

namespace stretto::services {
struct CoordinatorParts {
  Metrics* metrics = nullptr;
  StopSignal* stop = nullptr;  // requested at the run's end, with its fault if it has one
  Clock* clock = nullptr;
};

// The settings that must stay as they are when a run goes on, as text.
std::string RunEssence(RunConfig config);

// Public functions are thread-safe.
class Coordinator {
 public:
  // Reads the data, opens the journal, restores the run and starts the loop. Blocks for as long as
  // reading takes.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Start(const RunConfig& config,
                                                            const CoordinatorParts& parts);
  ~Coordinator();

  absl::StatusOr<v1::RegisterResponse> Register(const v1::RegisterRequest& request);
  absl::StatusOr<v1::HeartbeatResponse> Heartbeat(const v1::HeartbeatRequest& request);
  absl::Status Leave(const v1::LeaveRequest& request);
  absl::Status Control(v1::ControlRunRequest::Action action);
  // The status, and a number that grows with each change of it.
  std::pair<v1::RunStatus, uint64_t> Status() const;
  // Waits for a change after `seen`, at most `timeout_ms`.
  std::pair<v1::RunStatus, uint64_t> AwaitChange(uint64_t seen, int64_t timeout_ms) const;

  // Checkpoints and ends the run (if it has not ended) and waits for that, at most `timeout_ms`.
  void StopAndWait(int64_t timeout_ms);

 private:
  Coordinator(const RunConfig& config, const CoordinatorParts& parts);
  absl::Status Open();

  // The loop.
  void Post(std::function<void()> event);
  void Loop();
  void Turn(const std::deque<std::function<void()>>& events);
  // Begins steps on the way; whether all that was recorded is safe.
  bool CommitTurn(const std::vector<Command>& commands);
  void FailOnJournal();
  int64_t NowNs() const { return parts_.clock->NowNs(); }
  // For the core, on the loop.
  int64_t RunNowNs();
  template <class T>
  absl::StatusOr<T> Ask(std::function<absl::StatusOr<T>()> question);

  // Members, on the loop.
  absl::StatusOr<v1::RegisterResponse> DoRegister(const v1::RegisterRequest& request);
  absl::StatusOr<v1::HeartbeatResponse> DoHeartbeat(const v1::HeartbeatRequest& request);
  absl::Status CheckMember(const v1::RegisterRequest& request);
  std::string EssenceWithData() const;
  absl::Status ForgetLostCheckpoint(RestoredRun& restored);

  // Records, on the loop: into the journal, before anything is carried out.
  template <class T>
  void Record(const T&) {}
  void Record(const RecordMember& record) { journal_->Write(record); }
  void Record(const RecordGroup& record);
  void Record(const RecordTrainers& record) { journal_->Write(record); }
  void Record(const RecordBatch& record) { journal_->Write(record); }
  void Record(const RecordVersion& record);
  void Record(const RecordCheckpoint& record);
  void Record(const RecordEval& record);
  void Record(const RecordEvent& record);
  // For people: the log, and the status that others watch.
  void Tell(const std::string& text);
  // News of a member about itself; said once.
  void TakeNotice(const std::string& member, std::string notice);

  // Commands, on the loop.
  template <class T>
  void Do(const T&) {}
  void Do(const TokenizePrompts& command);
  void Do(const GenerateGroup& command);
  void Do(const CancelGenerate& command);
  void Do(const ScoreGroup& command);
  void Do(const PrepareVersion& command);
  void Do(const CommitVersion& command);
  void Do(const PrepareRank& command);
  void Do(const JoinRank& command);
  void Do(const TakeStep& command);
  void Do(const AskTrainer& command);
  void Do(const BeginSave& command);
  void Do(const AwaitSave& command);
  void Do(const CountFault& command);
  void Do(const EndRun& command);

  void NoteSpread(const Version& version);
  void Tokenized(const TokenizePrompts& asked, const absl::StatusOr<v1::TokenizeResponse>& answer);
  void Generated(const GenerateGroup& asked,
                 const absl::StatusOr<std::vector<RolloutRecord>>& answer);
  void Scored(const ScoreGroup& asked, GroupRecord group,
              const absl::StatusOr<v1::ScoreResponse>& answer);
  absl::StatusOr<Calls::Batch> ReadExperience(int64_t step);
  void StepTaken(const TakeStep& asked, const absl::StatusOr<v1::TrainStepResponse>& answer);
  void RecordStep(const TakeStep& asked, const v1::TrainStepResponse& answer);

  double SpikeThreshold(int64_t step) const;
  void RememberNorm(const StepRecord& step);
  void JudgeStep(const StepRecord& step);

  template <class Command>
  Calls::Target TargetOf(const Command& command) const;
  template <class Command>
  v1::Caller CallerOf(const Command& command) const;
  template <class Command>
  v1::SaveCheckpointRequest SaveRequestOf(const Command& command) const;
  const std::string& PromptJson(const DatasetPlace& place) const;
  std::string PlaceOf(const DatasetPlace& place) const;  // "train.jsonl:12"
  // A group that its generator has lost, and that has its first token elsewhere.
  void Lose(uint64_t group, const std::string& member);
  void TellLosses();
  void Recovered(const GenerateGroup& command);
  double SessionSeconds() const;
  void PublishStatus();
  void PublishMetrics();
  void PublishRankMetrics();
  void PublishBalance();
  void CountBusy();
  void PublishCheckpointMetrics();
  void WriteSummary();

  const RunConfig config_;
  const CoordinatorParts parts_;
  Dataset train_, eval_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<RunOutputs> outputs_;
  std::unique_ptr<Core> core_;
  RunClock run_clock_;
  Balance balance_;
  int64_t busy_since_ns_ = 0;
  int64_t num_gaps_ = 0;
  struct Lost {
    int64_t at_ns = 0;
    std::string member;
  };
  std::map<uint64_t, Lost> lost_groups_;     // that have no token yet since
  std::map<std::string, int64_t> num_lost_;  // by member, in this turn
  bool has_token_ = false;                   // since the coordinator started
  int64_t start_ns_ = 0, mark_ns_ = 0;
  double earlier_seconds_ = 0;
  int64_t first_step_ = 0;
  std::deque<std::string> events_;  // the newest
  uint64_t num_events_ = 0;
  std::map<std::string, std::string> notices_;  // by member
  int64_t place_checked_ns_ = 0;                // of the journal
  int64_t status_ns_ = 0;                       // of its last publication
  std::string profile_;                         // of the first member; in exact runs of all
  std::map<std::string, uint64_t> peak_rss_;
  std::map<std::string, v1::PolicyVersion> reported_versions_;
  v1::SaveCheckpointResponse last_checkpoint_;
  int64_t version_born_ns_ = 0, spread_version_ = -1;
  // Of the step under way: what its ranks are sent, and what they have measured.
  int64_t batch_step_ = -1;
  Calls::Batch batch_;
  std::map<std::string, std::map<std::string, double>> rank_metrics_;
  RankHealth rank_health_;
  std::map<int64_t, double> grad_norms_;  // of recorded steps that were not skipped
  int64_t num_skipped_ = 0;
  double useful_seconds_ = 0;  // in steps that were recorded, since the start
  std::map<int64_t, double> evals_;
  std::map<std::string, double> last_metrics_;
  uint64_t num_rollouts_ = 0;
  bool sync_journal_ = false;
  int64_t ended_ns_ = -1;
  absl::Status end_status_;

  std::unique_ptr<Calls> calls_;
  std::vector<std::function<void()>> replies_;  // of this turn, given after its commit
  mutable absl::Mutex mutex_;
  std::deque<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool run_is_over_ ABSL_GUARDED_BY(mutex_) = false;
  v1::RunStatus status_ ABSL_GUARDED_BY(mutex_);
  uint64_t status_number_ ABSL_GUARDED_BY(mutex_) = 1;
  std::thread loop_;
};
}  // namespace stretto::services
