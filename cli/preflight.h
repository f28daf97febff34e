// What `stretto up` looks at before it starts anything, so that a mistake is said at once and by
// itself, not from the end of some service's log.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "config/run_config.h"

namespace stretto::cli {
// The data (each line, with what the rewards need of it), the model's files (headers, tensors,
// tokenizer, chat format) and the first prompts through both, the draft model's, the rewards and
// whether their services answer. Weights are not read. Blocks, for some seconds where a reward
// service doesn't answer. The errors are those of whatever reads it later: the same words, the same
// codes. `notes`: what is no error but should be known.
absl::Status CheckRun(const RunConfig& run, std::vector<std::string>* notes);
}  // namespace stretto::cli
