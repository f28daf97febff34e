// What speculation is configured with and what it counts. Plain values; the mechanism is in
// speculation.h.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace stretto::engine {
class ModelWeights;
class Transformer;

inline constexpr int32_t kMaxDraft = 16;  // tokens drafted for one sequence in one step

inline constexpr int32_t kMaxMinMatch = 8;

enum class SpeculationKind {
  kOff,
  kNgram,  // what followed the same tokens earlier in prompt and completion
  kModel,  // what a smaller model would write
};

struct SpeculationOptions {
  SpeculationKind kind = SpeculationKind::kOff;
  int32_t max_draft = 8;          // for a sequence and step: 1 to kMaxDraft
  int32_t max_drafted_rows = 64;  // of all sequences in a step; they have logits, which take memory
  int32_t min_match = 2;          // kNgram: tokens that must agree, 1 to kMaxMinMatch
  // What a row adds to a step, relative to what the step costs without rows (reading the weights).
  // It decides how likely a drafted token must be to be worth its row: with R rows for B
  // sequences, B / (1 / row_cost + R) of the chance to be accepted.
  float row_cost = 0.1f;

  // kModel: a model with the policy's vocabulary, of any size; it outlives the engine. Its version
  // decides how many tokens are accepted, never which.
  const Transformer* draft_model = nullptr;
  std::shared_ptr<const ModelWeights> draft_weights;
  int64_t draft_kv_blocks = 0;  // 0: as many as the policy's
  // What a token of the draft model costs, relative to one of the policy. 0: as the weights that
  // products read.
  float draft_cost = 0;
};

// Of an engine's life. A drafted token is verified when all those before it were accepted.
struct SpeculationStats {
  SpeculationKind kind = SpeculationKind::kOff;
  double draft_cost = 0;  // of a drafted token, relative to one of the policy: see Drafter
  // Steps in which some sequence could have had a draft, and those in which one had. Over the
  // former the sum of what a drafted token's chance had to be at least to be worth its row (above
  // 1: nothing is).
  int64_t num_steps = 0, num_drafted_steps = 0;
  double needed_sum = 0;
  double needed_alone = 0;  // the same in a step of one sequence
  int64_t num_drafted = 0, num_verified = 0, num_accepted = 0;
  // By index in the draft.
  std::array<int64_t, kMaxDraft> verified_at = {}, accepted_at = {};
  // Drafts in a row, up to now, of which not a single token was accepted. Large: the drafter has
  // nothing to do with what the policy writes.
  int64_t num_fruitless = 0;
  double draft_seconds = 0;
};
}  // namespace stretto::engine
