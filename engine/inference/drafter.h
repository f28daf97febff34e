// Proposes how completions go on. A proposal is checked against what the policy draws and costs
// time at worst: no drafter can change a token.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace stretto::engine {
struct SamplingParams;
struct DrawIdentity;

// A completion that wants to be continued.
struct DraftRequest {
  uint64_t id = 0;                   // the request's
  absl::Span<const int32_t> tokens;  // prompt and completion so far: it only grows
  int32_t num_prompt = 0;
  const SamplingParams* params = nullptr;
  const DrawIdentity* draw = nullptr;
  int32_t max_tokens = 0;        // of the draft; at least 1
  int64_t constraint_state = 0;  // of params->constraint behind `tokens`
};

struct Draft {
  std::vector<int32_t> tokens;  // up to max_tokens ids of the vocabulary; none: no idea
  int32_t confidence = 0;       // [0, kNumConfidences): drafts that deserve about the same trust
};
inline constexpr int32_t kNumConfidences = 3;

class Drafter {
 public:
  virtual ~Drafter() = default;
  // One draft a request. Blocks for the computation, if any.
  virtual void Propose(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts) = 0;
  // The completion has ended.
  virtual void Forget(uint64_t id) = 0;
  // What one drafted token costs, relative to one token of the policy by itself.
  virtual double cost() const = 0;
};
}  // namespace stretto::engine
