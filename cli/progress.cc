#include "cli/progress.h"

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

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

std::string StepLine(const v1::RunStatus& status) {
  std::string line = absl::StrFormat("step %d/%d", status.step(), status.num_steps());
  for (const Column& column : kColumns) {
    const auto it = status.metrics().find(column.metric);
    if (it == status.metrics().end()) continue;
    if (it->second == 0 && column.digits > 3) {
      absl::StrAppend(&line, "  ", column.label, " 0");
    } else {
      absl::StrAppend(&line, absl::StrFormat("  %s %.*f", column.label, column.digits, it->second));
    }
  }
  absl::StrAppend(&line, "  version ", status.version().number());
  return line;
}

std::string LiveLine(const v1::RunStatus& status) {
  std::string line = absl::StrCat(StateName(status.state()));
  if (!status.phase().empty()) absl::StrAppend(&line, ", ", status.phase());
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
  if (live_) std::fputs("\r\x1b[K", stdout);
  live_ = false;
}

void Progress::Note(const std::string& text) {
  ClearLive();
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void Progress::Show(const v1::RunStatus& status) {
  if (!began_) {
    began_ = true;
    last_step_ = status.first_step();
    if (last_step_ > 0) Note(absl::StrCat("Resuming after step ", last_step_));
  }
  if (status.last_event() != last_event_) {
    last_event_ = status.last_event();
    if (!last_event_.empty()) Note(last_event_);
  }
  if (status.step() > last_step_) {
    last_step_ = status.step();
    Note(StepLine(status));
  }
  if (is_terminal_) {
    ClearLive();
    std::string line = LiveLine(status);
    line.resize(std::min<size_t>(line.size(), 118));
    std::fputs(line.c_str(), stdout);
    std::fflush(stdout);
    live_ = true;
  } else if (status.phase() != last_phase_ || status.detail() != last_detail_) {
    // Without a terminal only what lasts is worth a line.
    const bool worth = status.state() != v1::RUN_STATE_RUNNING || status.phase() == "evaluating";
    if (worth) Note(LiveLine(status));
  }
  last_phase_ = status.phase();
  last_detail_ = status.detail();
}

void Progress::End() {
  ClearLive();
  std::fflush(stdout);
}
}  // namespace stretto::cli
