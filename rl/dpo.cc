// DPO: direct preference optimization (Rafailov et al., 2023). With
//   x = (chosen − rejected) − (reference_chosen − reference_rejected)
// the sigmoid loss is −(1 − ε)·log σ(βx) − ε·log σ(−βx), ε the label smoothing (Mitchell, "A note
// on DPO with noisy preferences", 2023), and IPO's is (x − 1/(2β))² (Azar et al., "A General
// Theoretical Paradigm to Understand Learning from Human Preferences", 2023), there on mean
// log-probs. Reference-free leaves the reference out.
#include "rl/pair_terms.h"

namespace stretto::rl {
PairTerm DpoLoss(const PairOptions& options, const Pair& pair) {
  const double x =
      (pair.chosen - pair.rejected) - (pair.reference_chosen - pair.reference_rejected);
  PairTerm term;
  term.chosen_reward = options.beta * (pair.chosen - pair.reference_chosen);
  term.rejected_reward = options.beta * (pair.rejected - pair.reference_rejected);
  if (options.loss == PreferenceLoss::kIpo) {
    const double error = x - 1 / (2 * options.beta);
    term.loss = error * error;
    term.d_chosen = 2 * error;
  } else {
    const Logistic right = LogisticLoss(options.beta * x), wrong = LogisticLoss(-options.beta * x);
    const double smoothing = options.label_smoothing;
    term.loss = right.loss * (1 - smoothing) + wrong.loss * smoothing;
    term.d_chosen = options.beta * (right.d_x * (1 - smoothing) - wrong.d_x * smoothing);
  }
  term.d_rejected = -term.d_chosen;
  return term;
}
}  // namespace stretto::rl
