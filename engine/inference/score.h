// Log-probs of given completions under given weights: the reference's for KL control, or any other
// model's. The same bits as generation gives its tokens under those weights. It runs on the packed
// face of the transformer: a group's prompt is computed once, and many groups share a pass.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace stretto::engine {
class ModelWeights;
class Transformer;

// A prompt and its completions (a group, or one): the prompt is computed once.
struct ScoreGroup {
  std::vector<int32_t> prompt_ids;                // not empty
  std::vector<std::vector<int32_t>> completions;  // may be empty each
};
// One log-prob a completion token.
using GroupLogProbs = std::vector<std::vector<float>>;

struct ScorerOptions {
  // Rows of one pass; a sequence that is longer alone gets a pass of its own length. The scratch
  // memory grows with it.
  int64_t max_tokens_per_pass = 1024;
  size_t logits_bytes = size_t{64} << 20;
};

// Single-threaded like the engine.
class SequenceScorer {
 public:
  // `model` must outlive the scorer.
  static absl::StatusOr<std::unique_ptr<SequenceScorer>> Create(const Transformer& model,
                                                                const ScorerOptions& options);
  virtual ~SequenceScorer() = default;
  // Log-probs of logits / temperature (0 counts as 1). Blocks for the computation. InvalidArgument,
  // naming the group and why: an empty prompt, an id outside the vocabulary, a sequence longer than
  // the context, a temperature that is negative or not finite; nothing is computed then.
  // ResourceExhausted: no memory for a pass.
  virtual absl::StatusOr<std::vector<GroupLogProbs>> Score(const ModelWeights& weights,
                                                           absl::Span<const ScoreGroup> groups,
                                                           float temperature) = 0;
};
}  // namespace stretto::engine
