// How the run is: steps that must not count.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "rl/spikes.h"
#include "services/coordinator/coordinator.h"

namespace stretto::services {
// What a step's gradient norm may be: a function of the recorded steps before it, so that a step
// taken again is judged alike.
double Coordinator::SpikeThreshold(int64_t step) const {
  std::vector<double> norms;
  for (auto it = grad_norms_.begin(); it != grad_norms_.end() && it->first < step; ++it) {
    norms.push_back(it->second);
  }
  return rl::SpikeThreshold(norms, config_.train.grad_spike_factor);
}

void Coordinator::RememberNorm(const StepRecord& step) {
  if (!step.skip_reason.empty()) {
    ++num_skipped_;
    return;
  }
  const auto norm = step.metrics.find("grad_norm");
  if (norm != step.metrics.end() && std::isfinite(norm->second)) {
    grad_norms_[step.step] = norm->second;
  }
}

// Tells of a step that changed nothing, or should not have, and ends the run where it is to end.
void Coordinator::JudgeStep(const StepRecord& step) {
  const auto found = step.metrics.find("grad_norm");
  const double norm = found == step.metrics.end() ? 0 : found->second;
  const double threshold = SpikeThreshold(step.step);
  const bool is_spike = std::isfinite(norm) && norm > threshold;
  const std::string& policy = is_spike ? config_.train.grad_spike : config_.train.not_finite_step;
  if (!step.skip_reason.empty()) {
    Record(RecordEvent{absl::StrCat("step ", step.step, " changed nothing: ", step.skip_reason)});
    if (policy == "stop") {
      core_->OnFault(
          absl::AbortedError(absl::StrCat("step ", step.step, ": ", step.skip_reason, " (train.",
                                          is_spike ? "grad_spike" : "not_finite_step",
                                          ": stop; the same command goes on without that step)")),
          RunNowNs());
    }
  } else if (is_spike) {
    Record(RecordEvent{absl::StrCat("step ", step.step, ": gradient norm ", norm,
                                    " is a spike (above ", threshold, ")")});
  }
  const auto mismatch = step.metrics.find("logprob_mismatch_max");
  // Rollouts that keep keys and values over a swap are nobody else's computation.
  const bool is_exact =
      config_.schedule.numerics == "exact" && config_.schedule.weight_update != "keep";
  if (!is_exact || mismatch == step.metrics.end() || mismatch->second == 0) return;
  Record(RecordEvent{absl::StrCat(
      "step ", step.step, ": log-probs of the trainer differ from those in its rollouts by ",
      mismatch->second,
      ", which can't be in exact numerics: a machine errs, or the journal or a rollout was "
      "damaged; "
      "the trainer's log names the first token")});
}

}  // namespace stretto::services
