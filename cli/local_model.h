// A model in this process, for the commands that need no cluster (generate, eval): files, prompts,
// device, weights and an inference engine, opened from a Hugging Face folder, a GGUF file, or a
// run's newest checkpoint. Single-threaded.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "engine/inference/engine.h"
#include "services/common/model_host.h"

namespace stretto::cli {
struct LocalModelOptions {
  services::ModelHostOptions host;  // path, dtype, prompts, context, threads
  std::string checkpoint;  // a checkpoint folder whose weights replace the model's; empty: none
  int64_t kv_cache_mb = 512;
  int32_t max_running = 64;
};

struct LocalCompletion {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  engine::FinishReason reason = engine::FinishReason::kStop;
  absl::Status status;  // not OK: the prompt was refused or failed; the message says why
};

class LocalModel {
 public:
  static absl::StatusOr<std::unique_ptr<LocalModel>> Open(const LocalModelOptions& options);

  const engine::PromptEncoder& prompts() const { return *host_->prompts; }

  // Completes all prompts in one continuous batch; results in the order of the prompts.
  // `on_token(prompt index, token)` is called as tokens come; may be empty. `seed` and the prompt's
  // index decide the sampling.
  std::vector<LocalCompletion> Complete(const std::vector<std::vector<int32_t>>& prompts,
                                        const engine::SamplingParams& sampling, uint64_t seed,
                                        const std::function<void(size_t, int32_t)>& on_token = {});

 private:
  absl::Status OpenEngine(const LocalModelOptions& options);

  std::unique_ptr<services::ModelHost> host_;
  std::unique_ptr<engine::InferenceEngine> engine_;
};

// Where a policy's parameters are read from: the masters of a checkpoint folder.
absl::StatusOr<std::shared_ptr<const engine::TensorSource>> OpenMasters(
    const std::string& checkpoint);
// The newest checkpoint of a run folder. NotFound: there is none.
absl::StatusOr<std::string> NewestCheckpoint(const std::string& run_dir);
// The model, numerics and prompts of a run, with the weights of its newest checkpoint.
absl::StatusOr<LocalModelOptions> OptionsOfRunDir(const std::string& run_dir);
// The run file that a run folder keeps.
std::string RunFileOf(const std::string& run_dir);
}  // namespace stretto::cli
