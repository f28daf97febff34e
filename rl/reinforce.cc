// REINFORCE with the group's baseline (Williams, 1992): loss = −w·A·logprob, w the truncated
// importance weight where importance_cap is on, else 1.
#include <algorithm>

#include "rl/terms.h"

namespace stretto::rl {
namespace {
class Reinforce : public Objective {
 public:
  explicit Reinforce(const ObjectiveOptions& options) : options_(options) {}

  LossSums Evaluate(const SequenceInputs& in, const StepTotals& totals,
                    const SequenceGradients& out) const override {
    CheckSizes(in, out);
    LossSums sums;
    if (in.logprobs_T.empty()) return sums;
    const double weight = TokenWeight(options_.denominator, totals, in.logprobs_T.size());
    for (size_t t = 0; t < in.logprobs_T.size(); ++t) {
      const double factor = ImportanceWeight(options_, in, t, &sums) * in.advantage;
      const double ratio = ExpOfDifference(in.logprobs_T[t], in.behaviour_logprobs_T[t]).value;
      sums.ratio += ratio;
      sums.ratio_min = std::min(sums.ratio_min, ratio);
      sums.ratio_max = std::max(sums.ratio_max, ratio);
      const PolicyTerm policy{.loss = -factor * in.logprobs_T[t], .d_logprob = -factor};
      AddToken(options_, in, t, weight, policy, out, &sums);
    }
    return sums;
  }

 private:
  const ObjectiveOptions options_;
};
}  // namespace

std::unique_ptr<Objective> MakeReinforce(const ObjectiveOptions& options) {
  return std::make_unique<Reinforce>(options);
}
}  // namespace stretto::rl
