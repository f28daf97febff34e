// Speculation: a step computes, behind a sequence's last token, tokens that were only guessed, and
// draws a token from every row's logits as ever. As long as the token drawn is the one guessed, the
// next row's logits are those of the true prefix, and its draw (of its own position) is the one
// that the sequence would have made a step later. The first token that differs is the right one;
// the rows behind it are forgotten. So ids and log-probs have the bits that they have without.
//
// Here it is decided who guesses how much. A token is drafted when the chance that it is accepted
// is worth more than its row costs. With T(R) = 1 + row_cost · R for a step of R rows, of which B
// sequences draw, another row adds row_cost / T of the time and p / B of the tokens; a drafter's
// own cost is added. So alone and with few others much is drafted, in a full batch nothing. p is
// the product of the shares of drafted tokens that were accepted lately, of this sequence and for
// drafts of this confidence. A sequence whose drafts aren't worth their rows is tried again at
// growing intervals.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/inference/completion.h"
#include "engine/inference/drafter.h"
#include "engine/inference/scheduler.h"
#include "engine/inference/speculation_options.h"

namespace stretto::engine {
// The share of drafted tokens accepted lately, and the intervals of the tries when it is small.
class Acceptance {
 public:
  static constexpr float kRate = 0.15f;  // weight of the latest token
  static constexpr int32_t kFirstInterval = 16, kLastInterval = 512;

  explicit Acceptance(float share = 0.4f, float rate = kRate) : share_(share), rate_(rate) {}
  float share() const { return share_; }
  void Count(bool accepted);
  // The length of a draft whose every token must be accepted with at least the probability `least`;
  // up to `max`. Now and then 1 where it would be 0.
  int32_t Length(double least, int32_t max);

 private:
  float share_, rate_;
  int32_t interval_ = kFirstInterval;
  int32_t num_passed_over_ = 0;
};

// InvalidArgument when the options are impossible, or the draft model doesn't suit `model`.
absl::Status ValidateSpeculation(const Transformer& model, const SpeculationOptions& options);

class Speculator {
 public:
  // Of the kind that options.speculation names (not kOff; valid). ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<Speculator>> Create(const Transformer& model,
                                                            const EngineOptions& options,
                                                            int64_t num_kv_blocks);
  Speculator(const SpeculationOptions& options, std::unique_ptr<Drafter> drafter)
      : options_(options), drafter_(std::move(drafter)) {
    stats_.kind = options.kind;
    stats_.draft_cost = drafter_->cost();
    stats_.needed_alone = LeastProbability(/*num_sequences=*/1, /*num_rows=*/1);
  }

  // Adds drafts to the plan that `scheduler` has just made; its sequences are Completions.
  void Extend(Scheduler& scheduler);
  // Whether the token at `index` of a completion's draft was the one drawn, those before it were.
  void Verified(const Completion& completion, int32_t index, bool accepted);
  // The completion has ended.
  void Forget(const Completion& completion);
  const SpeculationStats& stats() const { return stats_; }

 private:
  struct State {
    std::array<Acceptance, kNumConfidences> accepted;  // by confidence
    int32_t confidence = 0;                            // of the draft in the step
  };
  double LeastProbability(int64_t num_sequences, int64_t num_rows) const;
  static bool HasRoom(const Scheduler& scheduler);
  State& StateOf(uint64_t id);
  void Collect(const Scheduler& scheduler, double least);

  SpeculationOptions options_;
  std::unique_ptr<Drafter> drafter_;
  absl::flat_hash_map<uint64_t, State> states_;  // by request
  // Of all sequences: where new ones begin, but not without hope.
  static constexpr float kAllRate = 0.03f, kLeastHope = 0.12f;
  std::array<Acceptance, kNumConfidences> accepted_ = {
      Acceptance(0.4f, kAllRate), Acceptance(0.4f, kAllRate), Acceptance(0.4f, kAllRate)};
  SpeculationStats stats_;

  // Of the current step; reused.
  std::vector<size_t> planned_;  // index in the plan
  std::vector<DraftRequest> requests_;
  std::vector<Draft> drafts_;
};
}  // namespace stretto::engine
