// Objectives on pairs of which one completion is preferred: reward models on their scores, DPO on
// the completions' log-probs. Pure functions over spans, as those of rl/objective.h; a step's loss
// is the sum over its pairs, in order, of their losses / (pairs of the step).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace stretto::rl {
enum class PreferenceLoss { kSigmoid, kIpo };
absl::StatusOr<PreferenceLoss> PreferenceLossByName(absl::string_view name);  // "sigmoid", "ipo"

struct PairOptions {
  double beta = 0.1;                               // dpo: strength of the pull to the reference
  PreferenceLoss loss = PreferenceLoss::kSigmoid;  // dpo
  double label_smoothing = 0;   // dpo, sigmoid: how often a preference is wrong; below ½
  bool reference_free = false;  // dpo: as if the reference found both alike
  double center_coef = 0;       // reward_model: weight of (chosen + rejected)²
};

// P pairs.
struct PairInputs {
  // Scores of a reward model; for dpo what SequenceScore makes of the completions' log-probs, under
  // the policy and under the reference (empty where that is not used).
  absl::Span<const double> chosen_P, rejected_P;
  absl::Span<const double> reference_chosen_P = {}, reference_rejected_P = {};
  absl::Span<const double> margins_P = {};  // reward_model: by how much chosen is better; or empty
  int64_t first_id = 0;                     // of the first pair; named in errors
};

// Derivatives of the step's loss by chosen_P and rejected_P. Written, not added to.
struct PairGradients {
  absl::Span<double> d_chosen_P, d_rejected_P;
};

// Merge in order.
struct PairSums {
  double loss = 0;  // weighted and final
  // Plain sums over pairs: the scores (dpo: beta · (log-prob − reference), the implied rewards).
  double chosen_reward = 0, rejected_reward = 0;
  int64_t num_pairs = 0, num_right = 0;  // right: chosen is above rejected

  void Merge(const PairSums& other);
  // loss, accuracy, chosen_reward, rejected_reward, reward_margin.
  std::map<std::string, double> Metrics() const;
};

class PairObjective {
 public:
  // `step_pairs`: of the whole step. InvalidArgument names the pair and the input that is not
  // finite, or what is missing; nothing is written then. Spans of other lengths than P are a bug.
  absl::StatusOr<PairSums> Evaluate(const PairInputs& in, int64_t step_pairs,
                                    const PairGradients& out) const;

  struct Kind;  // an entry of the registry
 private:
  friend absl::StatusOr<PairObjective> MakePairObjective(const std::string& name,
                                                         const PairOptions& options);
  PairObjective(const Kind* kind, const PairOptions& options) : kind_(kind), options_(options) {}
  const Kind* kind_;
  PairOptions options_;
};

// "dpo", "reward_model". Errors as MakeObjective's.
absl::StatusOr<PairObjective> MakePairObjective(const std::string& name,
                                                const PairOptions& options);
std::vector<std::string> PairObjectiveNames();

// What dpo compares: the sum of a completion's log-probs, for kIpo their mean (0 without tokens).
struct SequenceScore {
  double value = 0;
  double d_logprob = 0;  // by each of the log-probs
};
SequenceScore ScoreSequence(PreferenceLoss loss, absl::Span<const float> logprobs_T);
}  // namespace stretto::rl
