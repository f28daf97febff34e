// Supervised: the negative log-likelihood of the tokens, loss = −logprob. Advantages and behaviour
// log-probs play no part.
#include "rl/terms.h"

namespace stretto::rl {
namespace {
class Supervised : public Objective {
 public:
  explicit Supervised(const ObjectiveOptions& options) : options_(options) {}

  LossSums Evaluate(const SequenceInputs& in, const StepTotals& totals,
                    const SequenceGradients& out) const override {
    CheckSizes(in, out);
    LossSums sums;
    if (in.logprobs_T.empty()) return sums;
    const double weight = TokenWeight(options_.denominator, totals, in.logprobs_T.size());
    for (size_t t = 0; t < in.logprobs_T.size(); ++t) {
      sums.ratio += 1;
      AddToken(options_, in, t, weight, {.loss = -double{in.logprobs_T[t]}, .d_logprob = -1}, out,
               &sums);
    }
    return sums;
  }

 private:
  const ObjectiveOptions options_;
};
}  // namespace

std::unique_ptr<Objective> MakeSupervised(const ObjectiveOptions& options) {
  return std::make_unique<Supervised>(options);
}
}  // namespace stretto::rl
