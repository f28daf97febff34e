// A model in this process, for the commands that need no cluster (generate, eval): files, prompts,
// device, weights and an inference engine, opened from a Hugging Face folder, a GGUF file, or a
// run's newest checkpoint. Prompts of a model without a chat template are raw. Single-threaded.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "engine/constrain/constraint.h"
#include "engine/inference/engine.h"
#include "services/common/model_host.h"
#include "services/generator/draft_model.h"

namespace stretto::cli {
// Said where prompts are raw for want of a template.
inline constexpr char kRawRemark[] =
    "the model has no chat template: prompts are completed as they are (--chat-format names one, "
    "--raw says that it is meant)";

struct LocalModelOptions {
  services::ModelHostOptions host;  // path, dtype, prompts, context, threads
  std::string checkpoint;  // a checkpoint folder whose weights replace the model's; empty: none
  int64_t kv_cache_mb = 512;
  int32_t max_running = 64;
  std::string speculation = "off";  // ngram or model: how tokens are guessed ahead
  std::string draft_model;          // with model
  int64_t draft_tokens = 8;
};

struct LocalCompletion {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<std::vector<engine::TokenLogprob>> top_logprobs;  // where asked for
  std::string text;  // up to a stop string, special tokens left out
  engine::FinishReason reason = engine::FinishReason::kStop;
  absl::Status status;  // not OK: the prompt was refused or failed; the message says why
};

// `index` is that of the completion in the results.
struct CompleteOptions {
  engine::SamplingParams sampling = {};
  uint64_t seed = 0;        // with prompt and sample index it decides the sampling
  int32_t num_samples = 1;  // of each prompt
  // Each may be empty. Text comes in pieces; `stop` says that what is unfinished isn't wanted any
  // more.
  std::function<void(size_t index, const std::string& text)> on_text = nullptr;
  std::function<void(size_t index, const LocalCompletion& completion)> on_finished = nullptr;
  std::function<bool()> stop = nullptr;
};

class LocalModel {
 public:
  static absl::StatusOr<std::unique_ptr<LocalModel>> Open(const LocalModelOptions& options);

  const engine::PromptEncoder& prompts() const { return *host_->prompts; }

  // Tokens that prompt and completion may have together, and what the model itself allows.
  int64_t context() const { return engine_->max_context(); }
  // Whether it is the KV cache that allows no longer context.
  bool cache_is_short() const {
    return context() < host_->transformer->options().max_sequence_length;
  }
  // What sets the context, and the flag that changes it, for remarks.
  std::string Limit() const;
  int64_t vocab_size() const { return host_->files.config.vocab_size; }
  // What one should know of the draft model; empty: nothing.
  const std::string& draft_notice() const { return speculation_.notice; }
  engine::EngineStats stats() const { return engine_->stats(); }
  int64_t max_positions() const { return host_->files.config.max_position_embeddings; }
  // Errors of engine::Constraint::Compile.
  absl::StatusOr<std::shared_ptr<const engine::Constraint>> Compile(
      const engine::ConstraintSpec& spec) const;

  // Completes all prompts in one continuous batch; results in the order of the prompts, those of
  // one prompt together. Blocks.
  std::vector<LocalCompletion> Complete(const std::vector<std::vector<int32_t>>& prompts,
                                        const CompleteOptions& options);
  std::vector<LocalCompletion> Complete(const std::vector<std::vector<int32_t>>& prompts,
                                        const engine::SamplingParams& sampling, uint64_t seed) {
    return Complete(prompts, CompleteOptions{.sampling = sampling, .seed = seed});
  }

 private:
  absl::Status OpenEngine(const LocalModelOptions& options);
  absl::Status SubmitPrompt(size_t prompt, const std::vector<int32_t>& ids,
                            const CompleteOptions& options);
  absl::Status Explain(const absl::Status& status);

  std::unique_ptr<services::ModelHost> host_;
  std::shared_ptr<const engine::TensorSource> source_;  // of the weights, where it takes no memory
  std::optional<absl::Status> scanned_;                 // whether its values are finite, once asked
  services::Speculation speculation_;
  std::unique_ptr<engine::InferenceEngine> engine_;
};

// How many ended for want of room, before the tokens that they might have had.
int64_t NumWithoutRoom(const std::vector<LocalCompletion>& completions,
                       const engine::SamplingParams& sampling);

// Where a policy's parameters are read from: the masters of a checkpoint folder, or `base` with the
// adapter that it has, merged on `device`.
absl::StatusOr<std::shared_ptr<const engine::TensorSource>> OpenPolicy(
    const std::string& checkpoint, engine::Device& device, const engine::ModelFiles& base);
// The newest checkpoint of a run folder. NotFound: there is none.
absl::StatusOr<std::string> NewestCheckpoint(const std::string& run_dir);
// The model, numerics and prompts of a run, with the weights of its newest checkpoint.
absl::StatusOr<LocalModelOptions> OptionsOfRunDir(const std::string& run_dir);
// The run file that a run folder keeps.
std::string RunFileOf(const std::string& run_dir);
}  // namespace stretto::cli
