// Scores of completions by a reward model (…ForSequenceClassification with one label), which reads
// prompt and completion as a conversation of its own: its tokenizer and chat template may be others
// than the policy's.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "config/run_config.h"
#include "engine/inference/score.h"
#include "services/common/model_host.h"
#include "services/scorer/judge.h"

namespace stretto::services {
// How the model of a reward of type model is opened.
ModelHostOptions OptionsOfRewardModel(const RunConfig& run, const RewardSpec& spec, int threads);

class RewardModel final : public CompletionScorer {
 public:
  // Reads the weights. Blocks.
  static absl::StatusOr<std::unique_ptr<RewardModel>> Create(const ModelHostOptions& options);
  // The score at the end of prompt, completion and the token that ends an answer, which is added
  // whether or not the policy has written one. Equal bits whatever else is scored beside it.
  // INVALID_ARGUMENT: a prompt that its template has no place for, or one that is too long with its
  // completion.
  std::vector<absl::StatusOr<double>> Score(const JudgeQuery& query) override;
  std::string identity() const override { return hash_; }

 private:
  RewardModel() = default;
  absl::StatusOr<std::vector<int32_t>> Encode(const std::string& completion,
                                              size_t num_prompt) const;
  std::string hash_;  // of the weights
  std::unique_ptr<ModelHost> host_;
  std::shared_ptr<const engine::ModelWeights> weights_;
  absl::Mutex mutex_;
  std::unique_ptr<engine::SequenceScorer> scorer_ ABSL_GUARDED_BY(mutex_);
};

// For JudgeOptions.
std::function<absl::StatusOr<std::unique_ptr<CompletionScorer>>(const RewardSpec&)> RewardModelsOf(
    const RunConfig& run, int threads);
}  // namespace stretto::services
