#include "cli/progress.h"

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/printable.h"

namespace stretto::cli {
namespace {
struct Column {
  const char* metric;
  const char* label;
  int digits;
};
// In order of appearance; a metric that a step doesn't have is left out.
constexpr Column kColumns[] = {{"reward_mean", "reward", 3},
                               {"kl", "kl", 5},
                               {"entropy", "entropy", 3},
                               {"completion_length", "length", 1},
                               {"tokens_per_second", "tokens/s", 0},
                               {"step_seconds", "s", 1},
                               {"logprob_mismatch_max", "mismatch", 6}};
}  // namespace

std::string StateName(v1::RunState state) {
  switch (state) {
    case v1::RUN_STATE_WAITING:
      return "waiting";
    case v1::RUN_STATE_RUNNING:
      return "running";
    case v1::RUN_STATE_PAUSED:
      return "paused";
    case v1::RUN_STATE_STOPPING:
      return "stopping";
    case v1::RUN_STATE_DONE:
      return "done";
    case v1::RUN_STATE_FAILED:
      return "failed";
    default:
      return "unknown";
  }
}

namespace {
// `version`: after the step.
std::string LineOf(int64_t step, int64_t num_steps, const std::map<std::string, double>& metrics,
                   bool was_skipped, int64_t version) {
  std::string line = absl::StrFormat("step %d/%d", step, num_steps);
  for (const Column& column : kColumns) {
    const auto it = metrics.find(column.metric);
    if (it == metrics.end()) continue;
    if (it->second == 0 && column.digits > 3) {
      absl::StrAppend(&line, "  ", column.label, " 0");
    } else {
      absl::StrAppend(&line, absl::StrFormat("  %s %.*f", column.label, column.digits, it->second));
    }
  }
  if (was_skipped) absl::StrAppend(&line, "  SKIPPED");
  absl::StrAppend(&line, "  version ", version);
  return line;
}
}  // namespace

std::string StepLine(const v1::RunStatus& status) {
  return LineOf(status.step(), status.num_steps(),
                {status.metrics().begin(), status.metrics().end()},
                status.metrics().count("skipped") > 0, status.version().number());
}

std::string CheckpointLine(const v1::RunStatus& status) {
  std::string line = "no checkpoint yet";
  if (status.checkpoint_version() >= 0) {
    line = absl::StrCat("newest checkpoint: version ", status.checkpoint_version());
  }
  if (status.saving_version() >= 0) {
    absl::StrAppend(&line, "; version ", status.saving_version(), " is being saved");
  }
  if (!status.checkpoint_error().empty()) {
    absl::StrAppend(&line, "; ", Printable(status.checkpoint_error(), 500));
  }
  return line;
}

std::string LiveLine(const v1::RunStatus& status) {
  std::string line = absl::StrCat(StateName(status.state()));
  if (!status.phase().empty()) absl::StrAppend(&line, ", ", status.phase());
  if (status.step() < status.num_steps() && status.phase() != "evaluating") {
    absl::StrAppend(&line, ", step ", status.step() + 1, "/", status.num_steps());
  }
  if (status.round_rollouts() > 0) {
    absl::StrAppend(&line, ", ", status.round_generated(), " of ", status.round_rollouts(),
                    " rollouts", status.phase() == "training" ? " of the next" : "", ", ",
                    status.round_scored(), " judged");
  }
  if (!status.detail().empty()) absl::StrAppend(&line, " (", status.detail(), ")");
  absl::StrAppend(&line, absl::StrFormat(" | %.0f s | rollouts %d", status.elapsed_seconds(),
                                         status.num_rollouts()));
  for (const auto& member : status.members()) {
    if (member.state() != "live") {
      absl::StrAppend(&line, " | ", member.name(), " ", member.state());
    } else if (member.pool() == v1::POOL_GENERATOR) {
      absl::StrAppend(&line, " | ", member.name(), " v", member.version().number());
    }
  }
  return line;
}

void Progress::ClearLive() {
  if (live_) std::fputs("\r\x1b[K", out_);
  live_ = false;
}

void Progress::Note(const std::string& text) {
  ClearLive();
  std::fprintf(out_, "%s\n", PrintableLines(text).c_str());
  std::fflush(out_);
  last_line_ns_ = clock_.NowNs();
}

void Progress::ShowLive(const std::string& line) {
  if (!is_terminal_) {
    if (clock_.NowNs() - last_line_ns_ >= kMaxSilenceNs) Note(line);
    return;
  }
  ClearLive();
  std::fputs(Printable(line, 118).c_str(), out_);
  std::fflush(out_);
  live_ = true;
}

void Progress::Wait(const std::string& text) { ShowLive(text); }

// What is worth a line of its own, once.
void Progress::ShowNews(const v1::RunStatus& status) {
  // A coordinator that was started again counts anew.
  if (status.session() != session_) num_events_ = 0;
  session_ = status.session();
  const auto num_new = static_cast<int64_t>(status.num_events() - num_events_);
  num_events_ = status.num_events();
  for (int i = 0; i < status.events_size(); ++i) {
    if (status.events_size() - i <= num_new) Note(status.events(i));
  }
  num_steps_ = status.num_steps();
  if (ShowNewsOfFile()) return;
  if (status.step() > last_step_) {
    last_step_ = status.step();
    Note(StepLine(status));
  }
  if (status.eval_last() >= 0) {
    ShowEvaluation(status.eval_last_step(), status.eval_last(), std::nullopt);
  }
}

void Progress::ShowEvaluation(int64_t step, double accuracy, std::optional<double> reward) {
  if (step <= last_eval_step_) return;
  last_eval_step_ = step;
  const std::string when = step == 0 ? "before training" : absl::StrCat("after step ", step);
  if (accuracy < 0) {
    Note(absl::StrCat("no held-out question could be judged ", when));
    return;
  }
  Note(absl::StrFormat("held-out accuracy %.1f %%%s %s", 100 * accuracy,
                       reward.has_value() ? absl::StrFormat(", reward %.3f,", *reward) : "", when));
}

bool Progress::ShowNewsOfFile() {
  if (!metrics_.has_value() || !began_) return false;
  bool is_there = false;
  for (const StepNews& news : metrics_->Read(&is_there)) {
    if (news.is_evaluation) {
      ShowEvaluation(news.step, news.accuracy, news.reward);
    } else if (news.step > last_step_) {
      last_step_ = news.step;
      Note(LineOf(news.step, num_steps_, news.metrics, news.was_skipped, news.step));
    }
  }
  return is_there;
}

void Progress::Show(const v1::RunStatus& status) {
  if (!began_) {
    began_ = true;
    last_step_ = status.first_step();
    if (last_step_ > 0) Note(absl::StrCat("Resuming after step ", last_step_));
    // What an earlier session has told isn't told again.
    if (status.eval_last() >= 0 && status.eval_last_step() < last_step_) {
      last_eval_step_ = status.eval_last_step();
    }
  }
  ShowNews(status);
  const bool changed = status.phase() != last_phase_ || status.detail() != last_detail_;
  // Without a terminal only what lasts is worth a line at once.
  const bool worth = status.state() != v1::RUN_STATE_RUNNING || status.phase() == "evaluating";
  if (!is_terminal_ && changed && worth) {
    Note(LiveLine(status));
  } else {
    ShowLive(LiveLine(status));
  }
  last_phase_ = status.phase();
  last_detail_ = status.detail();
}

void Progress::End() {
  ShowNewsOfFile();
  ClearLive();
  std::fflush(out_);
}
}  // namespace stretto::cli
