// A model in this process, for the commands that need no cluster (generate, eval, sft): files,
// tokenizer, chat format, device, weights and an inference engine, opened from a Hugging Face folder, a
// GGUF file, or a run's newest checkpoint. Single-threaded.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "engine/formats/model_files.h"
#include "engine/inference/engine.h"
#include "engine/model/transformer.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace stretto::cli {
struct LocalModelOptions {
  std::string model;       // Hugging Face folder or GGUF file
  std::string checkpoint;  // a checkpoint folder whose weights replace the model's; empty: none
  std::string dtype = "bf16";
  std::string backend = "cpu";
  std::string chat_format = "auto";
  int64_t max_sequence_length = 2048;  // at most; a shorter context of the model wins
  int threads = 0;
  int64_t kv_cache_mb = 512;
  int64_t max_running = 64;
};

struct LocalCompletion {
  std::vector<int32_t> prompt_ids, ids;
  std::vector<float> logprobs;
  engine::FinishReason reason = engine::FinishReason::kStop;
  absl::Status status;  // not OK: the request was refused or failed; the message says why
};

class LocalModel {
 public:
  static absl::StatusOr<std::unique_ptr<LocalModel>> Open(const LocalModelOptions& options);

  const engine::ModelFiles& files() const { return files_; }
  const engine::Tokenizer& tokenizer() const { return *tokenizer_; }
  // An error (of the template, see chat_template.h) if conversations can't be written.
  const absl::StatusOr<engine::ChatTemplate>& chat() const { return chat_; }
  std::vector<int32_t> EncodeRaw(const std::string& text) const;
  absl::StatusOr<std::vector<int32_t>> EncodeChat(
      const std::vector<engine::ChatMessage>& messages) const;

  // Completes all prompts in one continuous batch; results in the order of the prompts.
  // `on_token(prompt index, token)` is called as tokens come; may be empty. `seed` and the prompt's
  // index decide the sampling.
  std::vector<LocalCompletion> Complete(
      const std::vector<std::vector<int32_t>>& prompts, const engine::SamplingParams& sampling,
      uint64_t seed, const std::function<void(size_t, int32_t)>& on_token = {});

  // The reader of this model's parameters: the checkpoint's masters where there is one.
  engine::ParameterReader Reader() const;

 private:
  absl::Status OpenText(const std::string& chat_format);
  absl::Status OpenEngine(const LocalModelOptions& options);

  engine::ModelFiles files_;
  std::shared_ptr<const engine::TensorSource> masters_;
  std::unique_ptr<engine::Tokenizer> tokenizer_;
  absl::StatusOr<engine::ChatTemplate> chat_ = absl::UnknownError("not opened");
  std::unique_ptr<engine::Device> device_;
  std::unique_ptr<engine::Transformer> transformer_;
  std::unique_ptr<engine::InferenceEngine> engine_;
};

// The tokenizer of a model wherever it lies.
absl::StatusOr<std::unique_ptr<engine::Tokenizer>> OpenTokenizer(const engine::ModelFiles& files);

// What `--model` and `--run` mean: a model path, or the model and newest checkpoint of a run folder.
absl::Status ResolveModel(const std::string& model, const std::string& run_dir,
                          LocalModelOptions* options);
}  // namespace stretto::cli
