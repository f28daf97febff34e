// Cuts a batch into micro-batches by a rule that sees the batch and the token budget alone: not the
// number of ranks, threads or bytes that happen to be free. Groups that have an advantage come
// first, then those without (all rewards equal): where the objective gives these no gradient, their
// micro-batches need no backward pass. Otherwise the order of groups, completions and tokens is
// kept, so gradients always add up in the same order.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/packed_pass.h"
#include "engine/training/objective.h"

namespace stretto::engine {
struct TrainCompletion {
  std::vector<int32_t> ids;
  std::vector<float> behaviour_logprobs;  // one a token, or empty (zeros)
  std::vector<float> reference_logprobs;  // one a token, or empty: no reference
  // The version behind each token's log-prob, or empty: unknown. Decides which tokens enter
  // StepResult::logprob_mismatch_max.
  std::vector<int64_t> policy_versions;
  float advantage = 0;
};
// The completions of one prompt. The prompt is not empty.
struct TrainGroup {
  std::vector<int32_t> prompt_ids;
  std::vector<TrainCompletion> completions;
};
struct TrainBatch {
  std::vector<TrainGroup> groups;

  int64_t num_tokens() const;       // of completions: what is trained on
  int64_t num_completions() const;  // those with tokens
};

// Targets of completion i of `completions` are [target_begin[i], target_begin[i + 1]).
struct MicroBatch {
  PackedBatch packed;
  std::vector<CompletionRef> completions;
  std::vector<int64_t> target_begin;
};

struct MicroBatchLimits {
  // A group costs its prompt and its completions in tokens. Groups are put together while they fit
  // in this; one that is alone too large is cut between completions, the prompt repeated; a
  // completion that is alone too large makes a micro-batch of its own.
  int64_t max_tokens = 4096;
  int64_t max_sequence_length = 0;  // prompt + completion
  int64_t vocab_size = 0;
};
// InvalidArgument names group, completion and what is wrong: an empty prompt, an id outside the
// vocabulary, a sequence that is too long, log-probs that do not match the tokens, a non-finite
// number. Completions without tokens are left out.
absl::StatusOr<std::vector<MicroBatch>> CutMicroBatches(const TrainBatch& batch,
                                                        const MicroBatchLimits& limits);
}  // namespace stretto::engine
