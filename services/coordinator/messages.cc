#include "services/coordinator/messages.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "rl/advantages.h"

namespace stretto::services {
namespace {
template <class T>
void Append(const google::protobuf::RepeatedField<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

bool AllFinite(const google::protobuf::RepeatedField<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

v1::FinishReason ReasonByName(const std::string& name) {
  return name == "length" ? v1::FINISH_REASON_LENGTH : v1::FINISH_REASON_STOP;
}
}  // namespace

v1::PolicyVersion ToProto(const Version& version) {
  v1::PolicyVersion proto;
  proto.set_number(version.number);
  proto.set_hash(version.hash);
  return proto;
}

Version FromProto(const v1::PolicyVersion& version) {
  if (version.hash().empty()) return {};  // a number without its hash proves nothing
  return {version.number(), version.hash()};
}

v1::PromptId ToProto(const DatasetPlace& place) {
  v1::PromptId proto;
  proto.set_epoch(place.epoch);
  proto.set_index(place.index);
  return proto;
}

v1::Completion ToProto(const RolloutRecord& rollout) {
  v1::Completion proto;
  proto.set_sample_index(rollout.sample_index);
  proto.mutable_ids()->Add(rollout.ids.begin(), rollout.ids.end());
  proto.mutable_logprobs()->Add(rollout.logprobs.begin(), rollout.logprobs.end());
  proto.mutable_versions()->Add(rollout.versions.begin(), rollout.versions.end());
  proto.mutable_sampling_logprobs()->Add(rollout.sampling_logprobs.begin(),
                                         rollout.sampling_logprobs.end());
  proto.set_finish_reason(ReasonByName(rollout.finish_reason));
  return proto;
}

namespace {
int64_t MaxTokensOfStep(const RolloutSection& rollout, int64_t step) {
  const int64_t first = rollout.first_max_tokens;
  if (first == 0 || step > rollout.ramp_steps) return rollout.max_tokens;
  return first + (rollout.max_tokens - first) * (step - 1) / rollout.ramp_steps;
}
}  // namespace

v1::SamplingParams TrainSampling(const RunConfig& config, int64_t step) {
  v1::SamplingParams sampling;
  sampling.set_temperature(static_cast<float>(config.rollout.temperature));
  sampling.set_top_k(static_cast<int32_t>(config.rollout.top_k));
  sampling.set_top_p(static_cast<float>(config.rollout.top_p));
  sampling.set_min_p(static_cast<float>(config.rollout.min_p));
  sampling.set_max_tokens(static_cast<int32_t>(MaxTokensOfStep(config.rollout, step)));
  sampling.set_min_tokens(static_cast<int32_t>(config.rollout.min_tokens));
  for (const std::string& stop : config.rollout.stop) sampling.add_stop_strings(stop);
  // That a completion ends is learned, too: what it ends with stays with its tokens. Scorers judge
  // the text before it.
  sampling.set_keep_stop_string(!config.rollout.stop.empty());
  return sampling;
}

v1::SamplingParams EvalSampling(const RunConfig& config) {
  v1::SamplingParams sampling = TrainSampling(config, /*step=*/INT64_MAX);
  sampling.set_temperature(0);
  sampling.set_top_k(0);
  sampling.set_top_p(1);
  sampling.set_min_p(0);
  if (config.eval.max_tokens > 0) {
    sampling.set_max_tokens(static_cast<int32_t>(config.eval.max_tokens));
    sampling.set_min_tokens(std::min(sampling.min_tokens(), sampling.max_tokens()));
  }
  return sampling;
}

RolloutCollector::RolloutCollector(uint32_t num_samples, int64_t max_tokens)
    : max_tokens_(max_tokens), rollouts_(num_samples) {
  for (uint32_t i = 0; i < num_samples; ++i) rollouts_[i].sample_index = i;
}

absl::Status RolloutCollector::Add(const v1::GenerateEvent& event) {
  const auto fault = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat("sample ", event.sample_index(), ": ", what));
  };
  if (event.sample_index() >= rollouts_.size()) return fault("was not asked for");
  RolloutRecord& rollout = rollouts_[event.sample_index()];
  if (!rollout.finish_reason.empty()) return fault("went on after its end");
  const int num_tokens = event.ids_size();
  const int num_sampling = event.sampling_logprobs_size();
  if (event.logprobs_size() != num_tokens || event.versions_size() != num_tokens ||
      (num_sampling != 0 && num_sampling != num_tokens)) {
    return fault("has arrays of different lengths");
  }
  if (!AllFinite(event.logprobs()) || !AllFinite(event.sampling_logprobs())) {
    return fault("has a log-prob that is not finite");
  }
  Append(event.ids(), &rollout.ids);
  Append(event.logprobs(), &rollout.logprobs);
  Append(event.versions(), &rollout.versions);
  Append(event.sampling_logprobs(), &rollout.sampling_logprobs);
  if (static_cast<int64_t>(rollout.ids.size()) > max_tokens_) {
    return fault(absl::StrCat("has more than the ", max_tokens_, " tokens asked for"));
  }
  switch (event.finish_reason()) {
    case v1::FINISH_REASON_UNSPECIFIED:
      break;
    case v1::FINISH_REASON_STOP:
      rollout.finish_reason = "stop";
      break;
    case v1::FINISH_REASON_LENGTH:
      rollout.finish_reason = "length";
      break;
    case v1::FINISH_REASON_ABORTED:
      return absl::UnavailableError(absl::StrCat("sample ", event.sample_index(), " was aborted"));
    default:
      return absl::InternalError(
          absl::StrCat("sample ", event.sample_index(), ": ", event.error()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RolloutRecord>> RolloutCollector::Finish() {
  for (const RolloutRecord& rollout : rollouts_) {
    const std::string sample = absl::StrCat("sample ", rollout.sample_index);
    if (rollout.finish_reason.empty()) return absl::DataLossError(sample + " did not finish");
    if (rollout.ids.empty()) return absl::DataLossError(sample + " has no tokens");
    const bool has_sampling = !rollout.sampling_logprobs.empty();
    if (has_sampling && rollout.sampling_logprobs.size() != rollout.ids.size()) {
      return absl::DataLossError(sample + " has sampling log-probs for a part of its tokens");
    }
  }
  return std::move(rollouts_);
}

absl::Status ApplyScores(const v1::ScoreResponse& response, bool want_reference_logprobs,
                         std::vector<RolloutRecord>* rollouts) {
  if (static_cast<size_t>(response.scores_size()) != rollouts->size()) {
    return absl::InternalError(absl::StrCat("the scorer answered with ", response.scores_size(),
                                            " scores for ", rollouts->size(), " completions"));
  }
  for (const v1::Score& score : response.scores()) {
    const std::string which = absl::StrCat("completion ", score.sample_index(), ": ");
    const auto it = std::find_if(rollouts->begin(), rollouts->end(), [&](const auto& rollout) {
      return rollout.sample_index == score.sample_index();
    });
    if (it == rollouts->end()) return absl::InternalError(which + "was not asked about");
    if (!score.error().empty()) {
      return score.is_retryable() ? absl::UnavailableError(score.error())
                                  : absl::AbortedError(which + score.error());
    }
    if (!std::isfinite(score.reward())) return absl::AbortedError(which + "reward is not finite");
    it->reward = score.reward();
    it->components.clear();
    for (const v1::RewardComponent& part : score.components()) {
      it->components[part.name()] = part.value();
    }
    it->reference_logprobs.assign(score.reference_logprobs().begin(),
                                  score.reference_logprobs().end());
    const size_t num_wanted = want_reference_logprobs ? it->ids.size() : 0;
    if (it->reference_logprobs.size() != num_wanted || !AllFinite(score.reference_logprobs())) {
      return absl::InternalError(which + "reference log-probs do not fit its tokens");
    }
  }
  return absl::OkStatus();
}

bool HasSignal(const std::vector<RolloutRecord>& rollouts) {
  return std::any_of(rollouts.begin(), rollouts.end(),
                     [&](const RolloutRecord& r) { return r.reward != rollouts[0].reward; });
}

v1::ExperienceGroup ToExperience(const GroupRecord& group, const AlgorithmSection& algorithm) {
  std::vector<double> rewards;
  for (const RolloutRecord& rollout : group.rollouts) rewards.push_back(rollout.reward);
  std::vector<double> advantages(rewards.size());
  // `batch_std` is `none` within the group; the trainer, which sees the batch, divides.
  const bool is_of_batch = algorithm.advantage_scale == "batch_std";
  const auto scale = rl::AdvantageScaleByName(is_of_batch ? "none" : algorithm.advantage_scale);
  STRETTO_CHECK(scale.ok());  // the run file was validated
  rl::GroupAdvantages(rewards, *scale, absl::MakeSpan(advantages));
  v1::ExperienceGroup proto;
  *proto.mutable_prompt_id() = ToProto(group.place);
  proto.mutable_prompt_ids()->Add(group.prompt_ids.begin(), group.prompt_ids.end());
  for (size_t i = 0; i < group.rollouts.size(); ++i) {
    const RolloutRecord& rollout = group.rollouts[i];
    v1::Experience* experience = proto.add_experiences();
    *experience->mutable_completion() = ToProto(rollout);
    experience->mutable_reference_logprobs()->Add(rollout.reference_logprobs.begin(),
                                                  rollout.reference_logprobs.end());
    experience->set_reward(rollout.reward);
    experience->set_advantage(advantages[i]);
  }
  return proto;
}
}  // namespace stretto::services
