// Objectives: losses of a step over its completion tokens, and their gradients by the log-probs and
// entropies that the trainer's forward pass computed. Pure functions over spans: no tensors, no
// threads, no state.
//
// A step's loss is a sum over its sequences, in batch order; each sequence's part depends on that
// sequence and on the step's totals alone. So a trainer may cut the batch as it likes: as long as
// it keeps one LossSums per sequence and merges them in batch order, loss, metrics and gradients
// keep their bits. One file per objective; a registry by name.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "rl/kl.h"

namespace stretto::rl {
enum class LossDenominator {
  kTokenMean,     // every token weighs 1 / (tokens of the step)
  kSequenceMean,  // every token weighs 1 / (sequences of the step · tokens of its sequence)
};
absl::StatusOr<LossDenominator> LossDenominatorByName(absl::string_view name);

struct ObjectiveOptions {
  double clip_low = 0.2, clip_high = 0.2;
  double kl_coef = 0;
  KlEstimator kl_estimator = KlEstimator::kK3;
  LossDenominator denominator = LossDenominator::kTokenMean;
  double entropy_coef = 0;
  double importance_cap = 0;  // 0: off
};

// One completion; T tokens. Spans marked "or empty" are optional.
struct SequenceInputs {
  absl::Span<const float> logprobs_T;            // of the policy being trained, now
  absl::Span<const float> behaviour_logprobs_T;  // of the policy that wrote the tokens
  absl::Span<const float> reference_logprobs_T;  // or empty: no KL term, none measured
  absl::Span<const float> entropies_T;           // or empty: none measured, no bonus
  // Of the policy before the first update on this batch; or empty: `logprobs_T` itself, held
  // constant (one update per batch). Used where importance_cap is on.
  absl::Span<const float> proximal_logprobs_T;
  double advantage = 0;
};

// Over all sequences of the step; on every rank and in every micro-batch the same.
struct StepTotals {
  int64_t num_tokens = 0;  // completion tokens
  int64_t num_sequences = 0;
};

// Derivatives of the step's loss; T entries each. Written, not added to.
struct SequenceGradients {
  absl::Span<float> d_logprobs_T;
  absl::Span<float> d_entropies_T;  // or empty
};

// Sums over tokens; Merge in batch order.
struct LossSums {
  double loss = 0;         // the step's loss: weighted and final
  double policy_loss = 0;  // its part without KL and entropy
  double kl = 0, entropy = 0, ratio = 0, importance_weight = 0;  // plain sums over tokens
  double ratio_min = 1, ratio_max = 1;
  int64_t num_tokens = 0, num_clipped_low = 0, num_clipped_high = 0, num_truncated = 0;
  bool has_kl = false, has_entropy = false, has_importance = false;

  void Merge(const LossSums& other);
  // loss, policy_loss, ratio_mean, ratio_min, ratio_max, clip_fraction, clip_fraction_low,
  // clip_fraction_high, and where measured kl, entropy, importance_weight_mean, truncated_fraction.
  std::map<std::string, double> Metrics() const;
};

class Objective {
 public:
  virtual ~Objective() = default;
  // Loss and gradients of one sequence of a step. A sequence without tokens contributes nothing.
  virtual LossSums Evaluate(const SequenceInputs& in, const StepTotals& totals,
                            const SequenceGradients& out) const = 0;
};

// "grpo", "reinforce", "supervised". An unknown name is an error that lists the known ones.
absl::StatusOr<std::unique_ptr<Objective>> MakeObjective(const std::string& name,
                                                         const ObjectiveOptions& options);
std::vector<std::string> ObjectiveNames();
}  // namespace stretto::rl
