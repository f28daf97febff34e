// One step's objective as the engine calls it: rl's pure functions, sequence by sequence, with the
// step's sums kept in the order of the calls. It also looks where the trainer's log-probs are not
// those of the generator, which names the first such token.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "engine/training/micro_batch.h"
#include "engine/training/objective.h"
#include "rl/objective.h"

namespace stretto::services {
// A token whose log-prob has other bits in the trainer than in the generator, both under the same
// version.
struct Mismatch {
  int64_t group = 0, completion = 0, position = 0;  // indices in the batch; token of the completion
  int32_t token = 0;
  float trainer_logprob = 0, generator_logprob = 0;
};

// What an objective with a critic is told of a completion, by token.
struct TokenTargets {
  std::vector<float> advantages, old_values, returns;
  std::vector<float> proximal_logprobs;  // or empty
};
using BatchTargets = std::vector<std::vector<TokenTargets>>;  // by group and completion

// rl::BatchScale of the advantages of the batch's completions that have tokens.
double AdvantageDivisor(const engine::TrainBatch& batch);

// What the sequences of a step came to. A rank of a group has those it computed; together they are
// the step's.
struct SequenceSums {
  engine::CompletionRef ref;
  rl::LossSums sums;
};
struct StepSums {
  struct Refusal {
    engine::CompletionRef ref;
    absl::Status status;  // OK: none
  };
  std::vector<SequenceSums> sequences;  // in the order of evaluation
  Refusal refused;                      // the first that the objective refused

  // Their sum, in that order. Something refused: its loss is NaN.
  rl::LossSums Total() const;
};

// Of the tokens that have one: how large their gradients are doesn't depend on how many a rank was
// given.
struct TokenGradients {
  double squares = 0;
  int64_t num_tokens = 0;
  void Add(double gradient) {
    squares += gradient * gradient;
    num_tokens += gradient != 0 ? 1 : 0;
  }
  void Merge(const TokenGradients& other) {
    squares += other.squares;
    num_tokens += other.num_tokens;
  }
  // 0: no token has a gradient.
  double RootMeanSquare() const {
    return num_tokens == 0 ? 0 : std::sqrt(squares / static_cast<double>(num_tokens));
  }
};

// For one step of one batch. Not thread-safe.
class StepObjective final : public engine::Objective {
 public:
  // All outlive the object. `base_version`: the version that the step starts from; −1: weights have
  // changed since, nothing is compared. Advantages are
  // divided by `advantage_divisor`, or are those of `targets`.
  StepObjective(const rl::Objective& objective, const engine::TrainBatch& batch,
                int64_t base_version, double advantage_divisor = 1.0,
                const BatchTargets* targets = nullptr);

  void Evaluate(const engine::ObjectiveInput& input,
                engine::ObjectiveOutput& output) const override;

  const StepSums& step() const { return state_.step; }
  // Of the loss, by the log-probs of the tokens that were seen here.
  const TokenGradients& gradients() const { return state_.gradients; }
  rl::LossSums sums() const { return state_.step.Total(); }
  const absl::optional<Mismatch>& first_mismatch() const { return state_.first_mismatch; }
  // What the objective refused first: group, sequence (the completion's index), token and input.
  // Then the step's loss is NaN.
  const absl::Status& error() const { return state_.step.refused.status; }

 private:
  struct State {
    StepSums step;
    absl::optional<Mismatch> first_mismatch;
    TokenGradients gradients;
  };
  void Refuse(const engine::CompletionRef& ref, const absl::Status& status,
              engine::ObjectiveOutput& output) const;
  void Compare(const engine::CompletionRef& ref, absl::Span<const float> logprobs) const;

  const rl::Objective& objective_;
  const engine::TrainBatch& batch_;
  const int64_t base_version_;
  const double advantage_divisor_;
  const BatchTargets* targets_;
  mutable State state_;  // of the step under way
};

// The same for a critic's update: what the engine takes for log-probs are its values.
class CriticObjective final : public engine::Objective {
 public:
  // `targets` outlive the object.
  CriticObjective(const rl::ObjectiveOptions& options, const BatchTargets& targets)
      : options_(options), targets_(targets) {}
  void Evaluate(const engine::ObjectiveInput& input,
                engine::ObjectiveOutput& output) const override;
  const StepSums& step() const { return step_; }

 private:
  const rl::ObjectiveOptions options_;
  const BatchTargets& targets_;
  mutable StepSums step_;
};
}  // namespace stretto::services
