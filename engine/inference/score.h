// Log-probs of given completions under given weights: the reference's for KL control, or any other
// model's. The same bits as generation gives its tokens under those weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device/device.h"

namespace stretto::engine {
class ModelWeights;
class Transformer;

// A prompt and its completions (a group, or one): the prompt is computed once.
struct ScoreGroup {
  std::vector<int32_t> prompt_ids;                // not empty
  std::vector<std::vector<int32_t>> completions;  // may be empty each
  float temperature = 1.0f;                       // of the log-probs; 0 counts as 1
};
// One log-prob a completion token.
using GroupLogProbs = std::vector<std::vector<float>>;

struct ScorerOptions {
  int64_t kv_cache_bytes = int64_t{128} << 20;
  int64_t num_kv_blocks = 0;          // if positive, instead of kv_cache_bytes
  int32_t max_tokens_per_step = 256;  // rows of one forward pass
};

// Single-threaded like the engine.
class SequenceScorer {
 public:
  // `model` must outlive the scorer. ResourceExhausted when the KV cache cannot be allocated.
  static absl::StatusOr<std::unique_ptr<SequenceScorer>> Create(const Transformer& model,
                                                                const ScorerOptions& options);
  virtual ~SequenceScorer() = default;
  // Blocks for the computation. InvalidArgument, naming the group and why: an empty prompt, an id
  // outside the vocabulary, a sequence longer than the context or the KV cache; nothing is computed
  // then.
  virtual absl::StatusOr<std::vector<GroupLogProbs>> Score(const ModelWeights& weights,
                                                           absl::Span<const ScoreGroup> groups) = 0;
};
}  // namespace stretto::engine
