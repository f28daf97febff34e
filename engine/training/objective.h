// What a training objective sees and gives: spans over the trained tokens of one micro-batch, so
// that objectives need no tensors and the engine needs no objective.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/types/span.h"

namespace stretto::engine {
// A completion's place in the batch of a step.
struct CompletionRef {
  int64_t group = 0, completion = 0;
};

// Tokens stand completion by completion; completion c has tokens [completion_begin[c],
// completion_begin[c + 1]).
struct ObjectiveInput {
  absl::Span<const float> logprobs;             // under the weights being trained
  absl::Span<const float> entropy;              // of the distribution each token was drawn from
  absl::Span<const float> behaviour_logprobs;   // as the generator recorded them
  absl::Span<const float> reference_logprobs;   // empty when there is no reference
  absl::Span<const int64_t> completion_begin;   // num_completions + 1 offsets
  absl::Span<const float> advantages;           // one a completion
  absl::Span<const CompletionRef> completions;  // which ones these are
  // Of the whole step: the denominators of losses and metrics.
  int64_t step_tokens = 0;
  int64_t step_completions = 0;
};

// Gradients of the loss (which is minimised). Both spans arrive zeroed.
struct ObjectiveOutput {
  absl::Span<float> d_logprobs;
  absl::Span<float> d_entropy;
  double loss = 0;                        // this micro-batch's part of the step's loss
  std::map<std::string, double> metrics;  // parts that add up over the step (divide by step_tokens)
};

// A pure function of its input: equal inputs give equal bits.
class Objective {
 public:
  virtual ~Objective() = default;
  virtual void Evaluate(const ObjectiveInput& input, ObjectiveOutput& output) const = 0;
};

// Cross-entropy: the mean of −logprob over all trained tokens of the step.
class CrossEntropy final : public Objective {
 public:
  void Evaluate(const ObjectiveInput& input, ObjectiveOutput& output) const override;
};
}  // namespace stretto::engine
