// Log-probs of completions under the reference policy: the model as its files have it. Thread-safe
// (one computation at a time). Knows no gRPC.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/inference/score.h"
#include "services/common/model_host.h"

namespace stretto::services {
class Reference {
 public:
  // Reads the weights. `host` outlives the reference. Blocks.
  static absl::StatusOr<std::unique_ptr<Reference>> Create(const ModelHost* host);
  // One log-prob (of logits / temperature) a completion token, by completion. INVALID_ARGUMENT says
  // what cannot be scored.
  absl::StatusOr<engine::GroupLogProbs> LogProbs(const engine::ScoreGroup& group,
                                                 float temperature);
  // Tree hash of the weights.
  const std::string& hash() const { return hash_; }
  double busy_seconds() const;

 private:
  Reference() = default;
  std::string hash_;
  std::shared_ptr<const engine::ModelWeights> weights_;
  mutable absl::Mutex mutex_;
  std::unique_ptr<engine::SequenceScorer> scorer_ ABSL_GUARDED_BY(mutex_);
  double busy_seconds_ ABSL_GUARDED_BY(mutex_) = 0;
};
}  // namespace stretto::services
