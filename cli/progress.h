// Shows a run's progress to a person: a permanent line for each step and evaluation, and on a
// terminal one live line below them that is redrawn. Elsewhere (a pipe, a log) nothing is redrawn:
// after some seconds of silence a line says what is going on.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "cli/step_news.h"
#include "stretto/v1/coordinator.pb.h"

namespace stretto::cli {
class Progress {
 public:
  explicit Progress(bool is_terminal, Clock& clock = Clock::Real(), std::FILE* out = stdout)
      : is_terminal_(is_terminal), clock_(clock), out_(out), last_line_ns_(clock.NowNs()) {}
  // Steps and evaluations are told from this metrics.jsonl from now on, once there is one: every
  // one of them, however short.
  void Follow(const std::string& metrics_path) { metrics_.emplace(metrics_path); }
  // Prints what is new since the last call.
  void Show(const v1::RunStatus& status);
  // A line for people; keeps the live line intact.
  void Note(const std::string& text);
  // While there is no status to show: the live line, or after a silence a line.
  void Wait(const std::string& text);
  // Removes the live line, and tells what the last status had not told yet.
  void End();

 private:
  void ShowNews(const v1::RunStatus& status);
  // Whether steps and evaluations come from the file.
  bool ShowNewsOfFile();
  void ShowEvaluation(int64_t step, double accuracy, std::optional<double> reward);
  void ShowLive(const std::string& line);
  void ClearLive();
  const bool is_terminal_;
  Clock& clock_;
  std::FILE* const out_;
  int64_t last_line_ns_;
  bool live_ = false;
  bool began_ = false;
  std::optional<MetricsReader> metrics_;
  int64_t num_steps_ = 0;
  int64_t last_step_ = 0;
  int64_t last_eval_step_ = -1;
  uint64_t num_events_ = 0;
  int64_t session_ = 0;  // of the coordinator that has told so many
  std::string last_phase_, last_detail_;
};

// A pipe hears of a run at least so often.
inline constexpr int64_t kMaxSilenceNs = 10'000'000'000;

// "step 3/60  reward 0.53  kl 0.0012 …" from a step's metrics.
std::string StepLine(const v1::RunStatus& status);
// "newest checkpoint: version 20; version 30 is being saved", and why the last save failed.
std::string CheckpointLine(const v1::RunStatus& status);
// "running, generating (12 of 64 rollouts, 8 judged) …" with members and their versions.
std::string LiveLine(const v1::RunStatus& status);
std::string StateName(v1::RunState state);
}  // namespace stretto::cli
