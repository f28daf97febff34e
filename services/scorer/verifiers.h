// Built-in rewards: pure functions of a completion's text and the dataset line it answers.
// Immutable and thread-safe.
//
//   exact    1 if the completion is the answer, white space around both apart
//   contains 1 if the answer stands in the completion, not inside a longer ASCII word or number
//   integer  1 if the number taken from the completion is the answer, an integer of any size
//   numeric  1 if it is within `tolerance` of the answer, absolute or relative to it
//   regex    1 if the pattern is found in the completion
//   length   1 up to target_tokens, falling linearly to 0 at the run's max_tokens
//   json     1 if the completion is a JSON object that has the required keys
// Everything else is 0.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/run_config.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::services {
struct VerifierInput {
  absl::string_view completion;          // decoded, without special tokens; UTF-8
  int64_t num_tokens = 0;                // of the completion
  const nlohmann::json* line = nullptr;  // the dataset line, an object
};

class Verifier {
 public:
  virtual ~Verifier() = default;
  // INVALID_ARGUMENT: the line lacks what the verifier needs, or it has another type; the message
  // names the field. RESOURCE_EXHAUSTED: matching a pattern took too many steps.
  virtual absl::StatusOr<double> Verify(const VerifierInput& input) const = 0;
};

// `spec.type` is one of the above. INVALID_ARGUMENT: another type, or a pattern that does not
// compile (the message says where). `max_tokens`: rollout.max_tokens.
absl::StatusOr<std::unique_ptr<Verifier>> MakeVerifier(const RewardSpec& spec, int64_t max_tokens);
}  // namespace stretto::services
