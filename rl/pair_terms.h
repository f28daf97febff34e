// What the objectives on pairs share.
#pragma once

#include "rl/pairs.h"

namespace stretto::rl {
// The numbers of one pair; margin and references are 0 where there are none.
struct Pair {
  double chosen = 0, rejected = 0, reference_chosen = 0, reference_rejected = 0, margin = 0;
};

// One pair's loss, unweighted, its derivatives, and what counts as the rewards.
struct PairTerm {
  double loss = 0, d_chosen = 0, d_rejected = 0;
  double chosen_reward = 0, rejected_reward = 0;
};

// −log σ(x) = log(1 + exp(−x)), without overflow, and its derivative −σ(−x).
struct Logistic {
  double loss = 0, d_x = 0;
};
Logistic LogisticLoss(double x);

// The objectives, each in its own file.
using PairLoss = PairTerm(const PairOptions& options, const Pair& pair);
PairLoss DpoLoss, RewardModelLoss;
}  // namespace stretto::rl
