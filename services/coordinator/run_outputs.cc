#include "services/coordinator/run_outputs.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
namespace {
using nlohmann::json;

std::string Dump(const json& value, int indent = -1) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

std::string MetricsLine(const StepRecord& step) {
  json line = json::object();
  line["step"] = step.step;
  for (const auto& [name, value] : step.metrics) {
    if (std::isfinite(value)) line[name] = value;
  }
  if (!step.skip_reason.empty()) line["skip_reason"] = step.skip_reason;
  return Dump(line) + "\n";
}
}  // namespace

absl::StatusOr<std::unique_ptr<RunOutputs>> RunOutputs::Open(Files& files, Clock& clock,
                                                             const std::string& run_dir,
                                                             const std::vector<StepRecord>& steps) {
  std::unique_ptr<RunOutputs> outputs(new RunOutputs(files, run_dir));
  ASSIGN_OR_RETURN(outputs->metrics_, files.Create(JoinPath(run_dir, "metrics.jsonl")));
  for (const StepRecord& step : steps) {
    RETURN_IF_ERROR(outputs->metrics_->Append(AsBytes(MetricsLine(step))));
  }
  ASSIGN_OR_RETURN(outputs->events_,
                   EventFile::Create(files, clock, JoinPath(run_dir, "tensorboard"), "stretto"));
  return outputs;
}

absl::Status RunOutputs::AddStep(const StepRecord& step) {
  RETURN_IF_ERROR(metrics_->Append(AsBytes(MetricsLine(step))));
  std::map<std::string, double> scalars;
  for (const auto& [name, value] : step.metrics) scalars[absl::StrCat("step/", name)] = value;
  return events_->AddScalars(step.step, scalars);
}

absl::Status RunOutputs::AddEval(int64_t version, double score, std::optional<double> reward) {
  json line = {{"step", version}, {"eval", score}};
  if (reward.has_value()) line["eval_reward"] = *reward;
  RETURN_IF_ERROR(metrics_->Append(AsBytes(Dump(line) + "\n")));
  if (score < 0) return absl::OkStatus();  // no question could be judged
  if (!reward.has_value()) return events_->AddScalars(version, {{"eval/score", score}});
  return events_->AddScalars(version, {{"eval/score", score}, {"eval/reward", *reward}});
}

absl::Status RunOutputs::WriteSummary(const RunSummary& s) {
  json summary = {{"run_id", s.run_id},
                  {"state", s.state},
                  {"detail", s.detail},
                  {"eval_before", s.eval_before},
                  {"eval_after", s.eval_after},
                  {"steps", s.num_steps},
                  {"seconds", s.totals.seconds},
                  {"rollouts", s.totals.num_rollouts},
                  {"tokens_generated", s.totals.num_tokens},
                  {"logprob_mismatch_max", s.totals.logprob_mismatch_max},
                  {"peak_rss_bytes", s.totals.peak_rss_bytes},
                  {"checkpoint_hash", s.checkpoint_hash},
                  {"checkpoint_path", s.checkpoint_path},
                  {"version", {{"number", s.version.number}, {"hash", s.version.hash}}},
                  {"rejected_groups", s.totals.num_rejected_groups},
                  {"sessions", s.totals.num_sessions}};
  json evals = json::object();
  for (const auto& [version, score] : s.evals) evals[absl::StrCat(version)] = score;
  summary["evals"] = evals;
  json last = json::object();
  for (const auto& [name, value] : s.last_metrics) {
    if (std::isfinite(value)) last[name] = value;
  }
  summary["last_step"] = last;
  return files_.WriteAtomically(JoinPath(run_dir_, "summary.json"), Dump(summary, 2) + "\n");
}
}  // namespace stretto::services
