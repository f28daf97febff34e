#include "engine/training/objective.h"

#include <algorithm>

namespace stretto::engine {
void CrossEntropy::Evaluate(const ObjectiveInput& input, ObjectiveOutput& output) const {
  const double weight = 1.0 / static_cast<double>(input.step_tokens);
  double sum = 0;
  for (float logprob : input.logprobs) sum += double{logprob};
  output.loss = -sum * weight;
  std::fill(output.d_logprobs.begin(), output.d_logprobs.end(), static_cast<float>(-weight));
}
}  // namespace stretto::engine
