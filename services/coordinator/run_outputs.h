// The files of a run's folder that people and tools read: metrics.jsonl (a line a step, and one
// with eval an evaluation), TensorBoard events (tensorboard/), summary.json.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/event_file.h"
#include "base/files.h"
#include "services/coordinator/journal.h"

namespace stretto::services {
struct RunSummary {
  std::string run_id, state, detail;
  int64_t num_steps = 0;  // taken
  double eval_before = -1, eval_after = -1;
  std::map<int64_t, double> evals;  // version → score
  RunTotals totals;
  std::string checkpoint_hash, checkpoint_path;
  Version version;
  std::map<std::string, double> last_metrics;
};

// Not thread-safe.
class RunOutputs {
 public:
  // Writes metrics.jsonl anew with the steps that the journal has.
  static absl::StatusOr<std::unique_ptr<RunOutputs>> Open(Files& files, Clock& clock,
                                                          const std::string& run_dir,
                                                          const std::vector<StepRecord>& steps);
  absl::Status AddStep(const StepRecord& step);
  // `score` -1: no question could be judged. `reward`: the mean of the questions' rewards.
  absl::Status AddEval(int64_t version, double score, std::optional<double> reward);
  absl::Status WriteSummary(const RunSummary& summary);

 private:
  RunOutputs(Files& files, std::string run_dir) : files_(files), run_dir_(std::move(run_dir)) {}
  Files& files_;
  const std::string run_dir_;
  std::unique_ptr<WritableFile> metrics_;
  std::unique_ptr<EventFile> events_;
};
}  // namespace stretto::services
