#include "services/trainer/step_objective.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/status.h"
#include "rl/advantages.h"

namespace stretto::services {
namespace {
const TokenTargets& TargetsOf(const BatchTargets& targets, const engine::CompletionRef& ref) {
  return targets[ref.group][ref.completion];
}

// The engine skips a step whose loss is not a number.
void Refuse(const engine::CompletionRef& ref, const absl::Status& status, StepSums& step,
            engine::ObjectiveOutput& output) {
  output.loss = std::nan("");
  if (!step.refused.status.ok()) return;
  step.refused = {ref, Annotate(status, absl::StrCat("group ", ref.group))};
}
}  // namespace

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
                             int64_t base_version, double advantage_divisor,
                             const BatchTargets* targets)
    : objective_(objective),
      batch_(batch),
      base_version_(base_version),
      advantage_divisor_(advantage_divisor),
      targets_(targets) {}

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
    if (targets_ != nullptr) {
      const TokenTargets& targets = TargetsOf(*targets_, input.completions[i]);
      in.advantages_T = targets.advantages;
      in.proximal_logprobs_T = targets.proximal_logprobs;
    }
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
  for (const float d : output.d_logprobs) state_.gradients.Add(d);
}

void StepObjective::Refuse(const engine::CompletionRef& ref, const absl::Status& status,
                           engine::ObjectiveOutput& output) const {
  services::Refuse(ref, status, state_.step, output);
}

void CriticObjective::Evaluate(const engine::ObjectiveInput& input,
                               engine::ObjectiveOutput& output) const {
  const rl::StepTotals totals{.num_tokens = input.step_tokens,
                              .num_sequences = input.step_completions};
  for (size_t i = 0; i + 1 < input.completion_begin.size(); ++i) {
    const auto begin = static_cast<size_t>(input.completion_begin[i]);
    const auto size = static_cast<size_t>(input.completion_begin[i + 1]) - begin;
    const engine::CompletionRef& ref = input.completions[i];
    const TokenTargets& targets = TargetsOf(targets_, ref);
    const rl::CriticInputs in{.values_T = input.logprobs.subspan(begin, size),
                              .old_values_T = targets.old_values,
                              .returns_T = targets.returns,
                              .id = ref.completion};
    const auto sums =
        rl::EvaluateCritic(options_, in, totals, output.d_logprobs.subspan(begin, size));
    if (sums.ok()) {
      output.loss += sums->loss;
      step_.sequences.push_back({ref, *sums});
    } else {
      Refuse(ref, Annotate(sums.status(), "critic"), step_, output);
    }
  }
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
