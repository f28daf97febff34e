#include "rl/gae.h"

#include "base/check.h"

namespace stretto::rl {
void TokenRewards(double score, absl::Span<const float> logprobs_T,
                  absl::Span<const float> references_T, double kl_coef,
                  absl::Span<double> rewards_T) {
  STRETTO_CHECK(rewards_T.size() == logprobs_T.size());
  STRETTO_CHECK(references_T.empty() || references_T.size() == logprobs_T.size());
  for (size_t t = 0; t < logprobs_T.size(); ++t) {
    const double kl = references_T.empty() ? 0.0 : double{logprobs_T[t]} - references_T[t];
    rewards_T[t] = -kl_coef * kl;
  }
  if (!rewards_T.empty()) rewards_T.back() += score;
}

void GeneralizedAdvantages(const GaeOptions& options, absl::Span<const double> rewards_T,
                           absl::Span<const float> values_T, absl::Span<double> advantages_T,
                           absl::Span<double> returns_T) {
  STRETTO_CHECK(values_T.size() == rewards_T.size() && advantages_T.size() == rewards_T.size() &&
                returns_T.size() == rewards_T.size());
  double next_value = 0, next_advantage = 0;
  for (size_t t = rewards_T.size(); t-- > 0;) {
    const double value = values_T[t];
    const double delta = rewards_T[t] + options.gamma * next_value - value;
    next_advantage = delta + options.gamma * options.lambda * next_advantage;
    advantages_T[t] = next_advantage;
    returns_T[t] = next_advantage + value;
    next_value = value;
  }
}
}  // namespace stretto::rl
