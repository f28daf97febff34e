// Reward model: the logistic likelihood of the preference under Bradley and Terry (1952),
//   loss = −log σ(chosen − rejected − margin) + center_coef · (chosen + rejected)²,
// with a margin where preferences have a strength (Touvron et al., "Llama 2", 2023) and a term that
// keeps the scores around 0 (Eisenstein et al., "Helping or Herding?", 2023).
#include "rl/pair_terms.h"

namespace stretto::rl {
PairTerm RewardModelLoss(const PairOptions& options, const Pair& pair) {
  const Logistic logistic = LogisticLoss(pair.chosen - pair.rejected - pair.margin);
  const double sum = pair.chosen + pair.rejected;
  const double d_sum = 2 * options.center_coef * sum;
  return {.loss = logistic.loss + options.center_coef * sum * sum,
          .d_chosen = logistic.d_x + d_sum,
          .d_rejected = -logistic.d_x + d_sum,
          .chosen_reward = pair.chosen,
          .rejected_reward = pair.rejected};
}
}  // namespace stretto::rl
