// Objectives: losses of a step over its completion tokens, and their gradients by the log-probs,
// entropies and values that the trainer's forward pass computed. Pure functions over spans: no
// tensors, no threads, no state. What trains on pairs stands in rl/pairs.h.
//
// A step's loss is a sum over its sequences, in batch order; each sequence's part depends on that
// sequence and on the step's totals alone. So a trainer may cut the batch as it likes: as long as
// it keeps one LossSums per sequence and merges them in batch order, loss, metrics and gradients
// keep their bits. One file per objective; a registry by name. docs/objectives.md has the formulas.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "rl/kl.h"

namespace stretto::rl {
enum class LossDenominator {
  kTokenMean,     // every token weighs 1 / (tokens of the step)
  kSequenceMean,  // every token weighs 1 / (sequences of the step · tokens of its sequence)
  kConstant,      // every token weighs 1 / (sequences of the step · constant_length)
  kSequenceSum,   // every token weighs 1 / (sequences of the step)
};
// "token_mean", "sequence_mean", "constant", "sequence_sum".
absl::StatusOr<LossDenominator> LossDenominatorByName(absl::string_view name);

enum class RatioLevel {
  kToken,     // each token has its own probability ratio
  kSequence,  // all have the geometric mean of these ("GSPO"; Zheng et al., 2025)
};
absl::StatusOr<RatioLevel> RatioLevelByName(absl::string_view name);  // "token", "sequence"

struct ObjectiveOptions {
  double clip_low = 0.2, clip_high = 0.2;
  // Above 1: a negative advantage is never weighed by a ratio above this ("dual clip"; Ye et al.,
  // "Mastering Complex Control in MOBA Games", 2020). 0: off.
  double dual_clip = 0;
  RatioLevel ratio_level = RatioLevel::kToken;
  double kl_coef = 0;
  KlEstimator kl_estimator = KlEstimator::kK3;
  LossDenominator denominator = LossDenominator::kTokenMean;
  double constant_length = 0;  // of kConstant: tokens
  double entropy_coef = 0;
  double importance_cap = 0;  // 0: off
  double value_coef = 0.5;    // weight of the critic's loss (ppo)
  double value_clip = 0.2;    // how far values may move within one batch (ppo); 0: no clip
};

// One completion; T tokens, those that are trained on: a masked token is not handed over. Spans
// marked "or empty" are optional.
struct SequenceInputs {
  absl::Span<const float> logprobs_T;            // of the policy being trained, now
  absl::Span<const float> behaviour_logprobs_T;  // of the policy that wrote the tokens
  absl::Span<const float> reference_logprobs_T;  // or empty: no KL term, none measured
  absl::Span<const float> entropies_T;           // or empty: none measured, no bonus
  // Of the policy before the first update on this batch; or empty: `logprobs_T` itself, held
  // constant (one update per batch). Used where importance_cap is on.
  absl::Span<const float> proximal_logprobs_T;
  double advantage = 0;
  absl::Span<const float> advantages_T = {};  // or empty: `advantage` for every token
  // The critic's: now, when the batch was collected, and what they should be. For ppo, else empty.
  absl::Span<const float> values_T = {}, old_values_T = {}, returns_T = {};
  int64_t id = 0;  // named in errors
};

// Over all sequences of the step; on every rank and in every micro-batch the same.
struct StepTotals {
  int64_t num_tokens = 0;     // completion tokens
  int64_t num_sequences = 0;  // with tokens
};

// Derivatives of the step's loss; T entries each. Written, not added to.
struct SequenceGradients {
  absl::Span<float> d_logprobs_T;
  absl::Span<float> d_entropies_T;    // or empty
  absl::Span<float> d_values_T = {};  // or empty
};

// Sums over tokens; Merge in batch order.
struct LossSums {
  double loss = 0;         // the step's loss: weighted and final
  double policy_loss = 0;  // its part without KL, entropy and values
  double value_loss = 0;   // its part from values
  double kl = 0, entropy = 0, ratio = 0, importance_weight = 0;  // plain sums over tokens
  double ratio_min = 1, ratio_max = 1;
  int64_t num_tokens = 0, num_clipped_low = 0, num_clipped_high = 0, num_truncated = 0;
  int64_t num_clipped_dual = 0, num_clipped_values = 0;
  bool has_kl = false, has_entropy = false, has_importance = false, has_dual = false,
       has_values = false;

  void Merge(const LossSums& other);
  // loss, policy_loss, ratio_mean, ratio_min, ratio_max, clip_fraction, clip_fraction_low,
  // clip_fraction_high, and where measured kl, entropy, importance_weight_mean, truncated_fraction,
  // clip_fraction_dual, value_loss, value_clip_fraction.
  std::map<std::string, double> Metrics() const;
};

// A name of the registry with its options. Copyable, immutable, thread-safe.
class Objective {
 public:
  // Loss and gradients of one sequence of a step. A sequence without tokens contributes nothing.
  // InvalidArgument names the sequence, the token and the input that is not finite, or what the
  // objective needs and the sequence lacks; nothing is written then. Spans of other lengths than T
  // are a bug.
  absl::StatusOr<LossSums> Evaluate(const SequenceInputs& in, const StepTotals& totals,
                                    const SequenceGradients& out) const;

  struct Kind;  // an entry of the registry
 private:
  friend absl::StatusOr<Objective> MakeObjective(const std::string& name,
                                                 const ObjectiveOptions& options);
  Objective(const Kind* kind, const ObjectiveOptions& options) : kind_(kind), options_(options) {}
  const Kind* kind_;
  ObjectiveOptions options_;
};

// What a critic that is a model of its own is trained by: ppo's value loss alone, with its
// denominators. One completion's values now, when the batch was collected, and what they should be.
struct CriticInputs {
  absl::Span<const float> values_T, old_values_T, returns_T;
  int64_t id = 0;  // named in errors
};
// Writes d_values_T; of the sums value_loss, loss, num_tokens and num_clipped_values mean
// something. InvalidArgument as Objective::Evaluate. The options are such as MakeObjective accepts.
absl::StatusOr<LossSums> EvaluateCritic(const ObjectiveOptions& options, const CriticInputs& in,
                                        const StepTotals& totals, absl::Span<float> d_values_T);

// "grpo", "ppo", "reinforce", "rloo", "supervised". An unknown name is an error that lists the
// known ones; options that cannot be are errors that name them.
absl::StatusOr<Objective> MakeObjective(const std::string& name, const ObjectiveOptions& options);
std::vector<std::string> ObjectiveNames();
}  // namespace stretto::rl
