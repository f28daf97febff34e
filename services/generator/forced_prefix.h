// Tokens that a sample begins with because another generator, or an earlier call, wrote them: what
// is asked for must be something that this model could have gone on from. What isn't would be
// continued as if it were, and trained on. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "stretto/v1/generator.pb.h"

namespace stretto::services {
struct PrefixLimits {
  int64_t vocab_size = 0;
  int64_t max_tokens = 0;         // of the completion, the prefix included
  std::vector<int32_t> stop_ids;  // that end a completion
  int64_t version = 0;            // the newest policy version that this generator has
};

// The ids of `sample.prefix`. `name` stands for the sample in messages. InvalidArgument names the
// field, as "samples[0].prefix.logprobs[3]": ids outside the vocabulary, one that ends a completion
// before the last, more than max_tokens; log-probs that aren't finite or are above 0; versions that
// are negative, fall, or are newer than the generator's; lists of other lengths than ids'; a sample
// index that isn't the sample's; an end that nothing follows.
absl::StatusOr<std::vector<int32_t>> CheckForcedPrefix(const v1::SampleRequest& sample,
                                                       const std::string& name,
                                                       const PrefixLimits& limits);
}  // namespace stretto::services
