// Shows a run's progress to a person: a permanent line for each step, and on a terminal one live
// line below them that is redrawn.
#pragma once

#include <cstdint>
#include <string>

#include "stretto/v1/coordinator.pb.h"

namespace stretto::cli {
class Progress {
 public:
  explicit Progress(bool is_terminal) : is_terminal_(is_terminal) {}
  // Prints what is new since the last call.
  void Show(const v1::RunStatus& status);
  // A line for people; keeps the live line intact.
  void Note(const std::string& text);
  // Removes the live line.
  void End();

 private:
  void ClearLive();
  const bool is_terminal_;
  bool live_ = false;
  bool began_ = false;
  int64_t last_step_ = 0;
  std::string last_phase_, last_detail_, last_event_;
};

// "step 3/60  reward 0.53  kl 0.0012 …" from a step's metrics.
std::string StepLine(const v1::RunStatus& status);
// "generating: …" with members and their versions.
std::string LiveLine(const v1::RunStatus& status);
std::string StateName(v1::RunState state);
}  // namespace stretto::cli
