#include "services/trainer/step_objective.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/status.h"
#include "rl/advantages.h"

namespace stretto::services {
double AdvantageDivisor(const engine::TrainBatch& batch) {
  std::vector<double> advantages;
  for (const auto& group : batch.groups) {
    for (const auto& completion : group.completions) {
      if (!completion.ids.empty()) advantages.push_back(completion.advantage);
    }
  }
  return rl::BatchScale(advantages);
}

rl::LossSums StepSums::Total() const {
  rl::LossSums total;
  for (const SequenceSums& sequence : sequences) total.Merge(sequence.sums);
  if (!refused.status.ok()) total.loss = std::nan("");
  return total;
}

StepObjective::StepObjective(const rl::Objective& objective, const engine::TrainBatch& batch,
                             int64_t base_version, double advantage_divisor)
    : objective_(objective),
      batch_(batch),
      base_version_(base_version),
      advantage_divisor_(advantage_divisor) {}

void StepObjective::Evaluate(const engine::ObjectiveInput& input,
                             engine::ObjectiveOutput& output) const {
  const rl::StepTotals totals{.num_tokens = input.step_tokens,
                              .num_sequences = input.step_completions};
  for (size_t i = 0; i + 1 < input.completion_begin.size(); ++i) {
    const auto begin = static_cast<size_t>(input.completion_begin[i]);
    const auto size = static_cast<size_t>(input.completion_begin[i + 1]) - begin;
    rl::SequenceInputs in;
    in.logprobs_T = input.logprobs.subspan(begin, size);
    in.behaviour_logprobs_T = input.behaviour_logprobs.subspan(begin, size);
    if (!input.reference_logprobs.empty()) {
      in.reference_logprobs_T = input.reference_logprobs.subspan(begin, size);
    }
    in.entropies_T = input.entropy.subspan(begin, size);
    in.advantage = input.advantages[i] / advantage_divisor_;
    in.id = input.completions[i].completion;
    const absl::StatusOr<rl::LossSums> sums =
        objective_.Evaluate(in, totals,
                            {.d_logprobs_T = output.d_logprobs.subspan(begin, size),
                             .d_entropies_T = output.d_entropy.subspan(begin, size)});
    if (sums.ok()) {
      output.loss += sums->loss;
      state_.step.sequences.push_back({input.completions[i], *sums});
    } else {
      Refuse(input.completions[i], sums.status(), output);
    }
    Compare(input.completions[i], in.logprobs_T);
  }
  for (const float d : output.d_logprobs) state_.squared_gradients += double{d} * d;
}

// The engine skips a step whose loss is not a number.
void StepObjective::Refuse(const engine::CompletionRef& ref, const absl::Status& status,
                           engine::ObjectiveOutput& output) const {
  output.loss = std::nan("");
  StepSums::Refusal& refused = state_.step.refused;
  if (refused.status.ok()) refused = {ref, Annotate(status, absl::StrCat("group ", ref.group))};
}

void StepObjective::Compare(const engine::CompletionRef& ref,
                            absl::Span<const float> logprobs) const {
  if (state_.first_mismatch.has_value()) return;
  const engine::TrainCompletion& completion = batch_.groups[ref.group].completions[ref.completion];
  STRETTO_CHECK(completion.ids.size() == logprobs.size());
  for (size_t t = 0; t < logprobs.size(); ++t) {
    if (t >= completion.policy_versions.size() || t >= completion.behaviour_logprobs.size() ||
        completion.policy_versions[t] != base_version_) {
      continue;
    }
    const float generated = completion.behaviour_logprobs[t];
    if (std::memcmp(&logprobs[t], &generated, sizeof(float)) == 0) continue;
    state_.first_mismatch = Mismatch{.group = ref.group,
                                     .completion = ref.completion,
                                     .position = static_cast<int64_t>(t),
                                     .token = completion.ids[t],
                                     .trainer_logprob = logprobs[t],
                                     .generator_logprob = generated};
    return;
  }
}
}  // namespace stretto::services
