#include "services/scorer/reward_model.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
ModelHostOptions OptionsOfRewardModel(const RunConfig& run, const RewardSpec& spec, int threads) {
  ModelHostOptions options;
  options.path = spec.path;
  options.scores = true;
  // As much as the run's sequences may have, with the token that brings out a score.
  options.most_by_default = std::max(options.most_by_default, run.model.max_sequence_length + 1);
  options.dtype = run.model.dtype;
  options.prompts.chat_format = spec.chat_format;
  options.prompts.chat_key = "the reward's chat_format";
  if (!run.data.system_prompt.empty()) options.prompts.system_prompt = run.data.system_prompt;
  options.backend = run.cluster.backend;
  options.threads = threads;
  return options;
}

absl::StatusOr<std::unique_ptr<RewardModel>> RewardModel::Create(const ModelHostOptions& options) {
  std::unique_ptr<RewardModel> model(new RewardModel());
  ASSIGN_OR_RETURN(model->host_, OpenModelHost(options));
  ASSIGN_OR_RETURN(const auto version, ReadInitialVersion(*model->host_));
  model->hash_ = version->hash;
  ASSIGN_OR_RETURN(model->weights_, BuildWeights(*model->host_, *version));
  absl::MutexLock lock(&model->mutex_);
  ASSIGN_OR_RETURN(model->scorer_, engine::SequenceScorer::Create(*model->host_->transformer, {}));
  return model;
}

// The tokens of an answer. The engine gives a value for each token from what stands before it; the
// last one, whose own value nobody asks for, brings out the value of the whole.
absl::StatusOr<std::vector<int32_t>> RewardModel::Encode(const std::string& completion,
                                                         size_t num_prompt) const {
  ASSIGN_OR_RETURN(auto ids,
                   host_->prompts->tokenizer().Encode(
                       completion, {.add_special_tokens = false, .parse_special = false}));
  const auto& stops = host_->prompts->stop_ids();
  if (!stops.empty()) ids.push_back(stops.front());
  ids.push_back(ids.empty() ? 0 : ids.back());
  const auto most = static_cast<size_t>(host_->transformer->options().max_sequence_length);
  if (num_prompt + ids.size() <= most) return ids;
  return absl::InvalidArgumentError(
      absl::StrCat("prompt and completion have ", num_prompt + ids.size() - 1,
                   " tokens by the reward model's tokenizer, which reads ", most - 1, " at most"));
}

std::vector<absl::StatusOr<double>> RewardModel::Score(const JudgeQuery& query) {
  const size_t num_completions = query.completions.size();
  const auto all = [&](const absl::Status& status) {
    return std::vector<absl::StatusOr<double>>(num_completions, status);
  };
  engine::ScoreGroup group;
  auto prompt = host_->prompts->EncodeLine(query.line_json);
  if (!prompt.ok()) return all(prompt.status());
  group.prompt_ids = *std::move(prompt);
  std::vector<absl::StatusOr<double>> scores = all(absl::InternalError("not computed"));
  group.completions.resize(num_completions);
  for (size_t i = 0; i < num_completions; ++i) {
    auto ids = Encode(query.completions[i].text, group.prompt_ids.size());
    if (ids.ok()) {
      group.completions[i] = *std::move(ids);
    } else {
      scores[i] = ids.status();
    }
  }
  absl::MutexLock lock(&mutex_);
  const auto values = scorer_->Score(*weights_, absl::MakeConstSpan(&group, 1), 1.0f);
  if (!values.ok()) return all(values.status());
  for (size_t i = 0; i < num_completions; ++i) {
    if (group.completions[i].empty()) continue;  // it has its error
    const double score = values->front()[i].back();
    scores[i] = score;
    if (!std::isfinite(score)) {
      scores[i] = absl::InternalError(absl::StrCat("the reward model's score is ", score));
    }
  }
  return scores;
}

std::function<absl::StatusOr<std::unique_ptr<CompletionScorer>>(const RewardSpec&)> RewardModelsOf(
    const RunConfig& run, int threads) {
  return
      [&run, threads](const RewardSpec& spec) -> absl::StatusOr<std::unique_ptr<CompletionScorer>> {
        return RewardModel::Create(OptionsOfRewardModel(run, spec, threads));
      };
}
}  // namespace stretto::services
