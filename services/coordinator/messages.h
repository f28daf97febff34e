// Between the journal's records and the protos of the other services.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "services/coordinator/journal.h"
#include "stretto/v1/generator.pb.h"
#include "stretto/v1/scorer.pb.h"
#include "stretto/v1/trainer.pb.h"

namespace stretto::services {
v1::PolicyVersion ToProto(const Version& version);
Version FromProto(const v1::PolicyVersion& version);
v1::PromptId ToProto(const DatasetPlace& place);
v1::Completion ToProto(const RolloutRecord& rollout);

// The sampling of the run's training rollouts, or (greedy) of its evaluations.
// Of the rollouts of `step` (from 1 on), whose longest completion the curriculum decides.
v1::SamplingParams TrainSampling(const RunConfig& config, int64_t step);
v1::SamplingParams EvalSampling(const RunConfig& config);

// Gathers the events of one Generate call into whole rollouts and refuses what cannot be one:
// unknown samples, arrays of different lengths, more tokens than asked for, log-probs that are not
// finite.
class RolloutCollector {
 public:
  RolloutCollector(uint32_t num_samples, int64_t max_tokens);
  absl::Status Add(const v1::GenerateEvent& event);
  // All rollouts, once every sample has finished.
  absl::StatusOr<std::vector<RolloutRecord>> Finish();

 private:
  const int64_t max_tokens_;
  std::vector<RolloutRecord> rollouts_;
};

// Puts a scorer's answer beside the rollouts it is about. ABORTED: a reward could not be had (the
// message says of which completion and why); UNAVAILABLE: nor could anybody be asked; INTERNAL: an
// answer that does not fit the question.
absl::Status ApplyScores(const v1::ScoreResponse& response, bool want_reference_logprobs,
                         std::vector<RolloutRecord>* rollouts);

// A scored group as the trainer wants it, with the advantages of its rewards.
// Whether the completions have different rewards.
bool HasSignal(const std::vector<RolloutRecord>& rollouts);
v1::ExperienceGroup ToExperience(const GroupRecord& group, const AlgorithmSection& algorithm);
}  // namespace stretto::services
