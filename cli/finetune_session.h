// The steps of `stretto sft`, `dpo` and `reward-model`, with checkpoints beside the model that is
// to be written: what is killed, or interrupted with Ctrl-C, goes on when the same command is given
// again, and arrives at the same bits as if nothing had happened.
//
//   OUT.checkpoints/step-00000100/…   engine/training/checkpoint.h; gone when OUT has been written
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cli/finetune.h"

namespace stretto::cli {
struct FinetuneStep {
  engine::StepResult result;
  std::string more;  // for the step's line
};
// Computes a step (from 1 on) on the examples of these indices.
using TakeFinetuneStep =
    absl::FunctionRef<absl::StatusOr<FinetuneStep>(int64_t step, absl::Span<const size_t> batch)>;

class FinetuneSession {
 public:
  // `settings`: a JSON object of what decides the result beside the flags that they share.
  // FailedPrecondition: there are checkpoints of training with other settings or other data.
  // Reads the dataset once more, for its hash.
  static absl::StatusOr<FinetuneSession> Open(const FinetuneFlags& flags,
                                              const std::string& settings_json);

  // Takes the steps that are left, behind the newest checkpoint that is whole. Prints a line now
  // and then. Cancelled: interrupted (SIGINT, SIGTERM), and saved; a second signal ends the process
  // with exit code 130.
  absl::Status Run(size_t num_examples, engine::TrainerEngine& trainer, TakeFinetuneStep take);
  // The result has been written.
  absl::Status RemoveCheckpoints();

 private:
  FinetuneSession(const FinetuneFlags& flags, std::string settings);
  absl::Status CheckSettings(const std::string& folder) const;
  absl::Status Restore(engine::TrainerEngine& trainer);
  absl::Status Save(engine::TrainerEngine& trainer);
  absl::Status Stop(int64_t step, engine::TrainerEngine& trainer);

  FinetuneFlags flags_;
  std::string root_;
  std::string settings_;  // JSON, one key a line
};
}  // namespace stretto::cli
