// Per-token rewards, advantages and returns of one sequence, for objectives with a critic.
#pragma once

#include "absl/types/span.h"

namespace stretto::rl {
// rewards[t] = −kl_coef · (logprobs[t] − references[t]), plus `score` at the last token (Ziegler et
// al., "Fine-Tuning Language Models from Human Preferences", 2019). All spans have T entries;
// `references_T` may be empty. Without tokens there is nothing to write: the score is lost.
void TokenRewards(double score, absl::Span<const float> logprobs_T,
                  absl::Span<const float> references_T, double kl_coef,
                  absl::Span<double> rewards_T);

struct GaeOptions {
  double gamma = 1, lambda = 0.95;
};
// Generalised advantage estimation (Schulman et al., 2016), from the last token back:
//   δ[t] = r[t] + γ·v[t + 1] − v[t],  A[t] = δ[t] + γλ·A[t + 1],  return[t] = A[t] + v[t],
// with nothing behind the last token. All spans have T entries.
void GeneralizedAdvantages(const GaeOptions& options, absl::Span<const double> rewards_T,
                           absl::Span<const float> values_T, absl::Span<double> advantages_T,
                           absl::Span<double> returns_T);
}  // namespace stretto::rl
