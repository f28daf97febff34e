#include "services/scorer/reference.h"

#include "base/clock.h"
#include "base/status.h"

namespace stretto::services {
absl::StatusOr<std::unique_ptr<Reference>> Reference::Create(const ModelHost* host) {
  std::unique_ptr<Reference> reference(new Reference());
  ASSIGN_OR_RETURN(const auto version, ReadInitialVersion(*host));
  reference->hash_ = version->hash;
  ASSIGN_OR_RETURN(reference->weights_, BuildWeights(*host, *version));
  absl::MutexLock lock(&reference->mutex_);
  ASSIGN_OR_RETURN(reference->scorer_, engine::SequenceScorer::Create(*host->transformer, {}));
  return reference;
}

absl::StatusOr<engine::GroupLogProbs> Reference::LogProbs(const engine::ScoreGroup& group,
                                                          float temperature) {
  absl::MutexLock lock(&mutex_);
  const int64_t start_ns = Clock::Real().NowNs();
  absl::StatusOr<std::vector<engine::GroupLogProbs>> logprobs =
      scorer_->Score(*weights_, absl::MakeConstSpan(&group, 1), temperature);
  busy_seconds_ += static_cast<double>(Clock::Real().NowNs() - start_ns) * 1e-9;
  RETURN_IF_ERROR(logprobs.status());
  return std::move(logprobs->at(0));
}

double Reference::busy_seconds() const {
  absl::MutexLock lock(&mutex_);
  return busy_seconds_;
}
}  // namespace stretto::services
