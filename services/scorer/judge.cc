#include "services/scorer/judge.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace stretto::services {
namespace {
std::string Describe(const RewardSpec& spec) {
  return absl::StrCat(spec.type, "|", spec.name, "|", spec.weight, "|", spec.answer_field, "|",
                      spec.tolerance, "|", spec.take, "|", spec.ignore_case, "|", spec.pattern, "|",
                      spec.target_tokens, "|", absl::StrJoin(spec.required_keys, ","), "|",
                      spec.address, "|", spec.chat_format, "\n");
}

std::string NameOf(const RewardSpec& spec) { return spec.name.empty() ? spec.type : spec.name; }
}  // namespace

absl::Status Judge::Open(const JudgeOptions& options, Component* component) {
  const RewardSpec& spec = component->spec;
  if (spec.type == "service") {
    component->client = MakeRewardClient({.address = spec.address,
                                          .timeout_ms = spec.timeout_ms,
                                          .max_attempts = spec.max_attempts});
    return absl::OkStatus();
  }
  if (spec.type == "model") {
    if (!options.open_model) return absl::UnimplementedError("reward models don't judge here");
    ASSIGN_OR_RETURN(component->model, options.open_model(spec));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(component->verifier, MakeVerifier(spec, options.max_tokens));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Judge>> Judge::Create(const std::vector<RewardSpec>& specs,
                                                     const JudgeOptions& options) {
  std::unique_ptr<Judge> judge(new Judge());
  judge->description_ = absl::StrCat("max_tokens ", options.max_tokens, "\n");
  for (size_t i = 0; i < specs.size(); ++i) {
    Component component{.spec = specs[i],
                        .verifier = nullptr,
                        .client = nullptr,
                        .model = nullptr,
                        .failures = options.metrics->counter("stretto_scorer_reward_failures_total",
                                                             "Rewards that could not be had.",
                                                             {{"reward", NameOf(specs[i])}})};
    RETURN_IF_ERROR(Annotate(Open(options, &component),
                             absl::StrCat("rewards[", i, "] (", NameOf(specs[i]), ")")));
    absl::StrAppend(&judge->description_, Describe(specs[i]));
    if (component.model != nullptr) {
      absl::StrAppend(&judge->description_, component.model->identity(), "\n");
    }
    judge->components_.push_back(std::move(component));
  }
  return judge;
}

std::vector<absl::StatusOr<double>> Judge::Values(const Component& component,
                                                  const JudgeQuery& query,
                                                  const nlohmann::json& line,
                                                  const std::function<bool()>& cancelled) {
  std::vector<absl::StatusOr<double>> values;
  if (component.verifier != nullptr) {
    for (const JudgedCompletion& completion : query.completions) {
      values.push_back(component.verifier->Verify(
          {.completion = completion.text, .num_tokens = completion.num_tokens, .line = &line}));
    }
    return values;
  }
  if (component.model != nullptr) return component.model->Score(query);
  RewardQuery ask{.run_id = query.run_id, .prompt_json = query.line_json, .completions = {}};
  for (const JudgedCompletion& completion : query.completions) {
    ask.completions.push_back(completion.text);
  }
  const absl::StatusOr<std::vector<double>> rewards = component.client->GetRewards(ask, cancelled);
  for (size_t i = 0; i < query.completions.size(); ++i) {
    if (rewards.ok()) {
      values.emplace_back((*rewards)[i]);
    } else {
      values.emplace_back(rewards.status());
    }
  }
  return values;
}

absl::Status Judge::Probe(int64_t timeout_ms) {
  absl::Status first;
  for (const Component& component : components_) {
    if (component.client == nullptr) continue;
    const absl::Status status = component.client->Probe(timeout_ms);
    if (first.ok() && !status.ok()) {
      first = Annotate(status, absl::StrCat("reward '", NameOf(component.spec), "'"));
    }
  }
  return first;
}

std::string Judge::trouble() const {
  std::string trouble;
  for (const Component& component : components_) {
    const std::string text = component.client == nullptr ? "" : component.client->trouble();
    if (!text.empty()) absl::StrAppend(&trouble, trouble.empty() ? "" : "; ", text);
  }
  return trouble;
}

absl::StatusOr<std::vector<Judgement>> Judge::Score(const JudgeQuery& query,
                                                    const std::function<bool()>& cancelled) {
  const nlohmann::json line =
      nlohmann::json::parse(query.line_json, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) {
    return absl::InvalidArgumentError("prompt_json: a JSON object (the dataset line) is expected");
  }
  std::vector<Judgement> judgements(query.completions.size());
  for (const Component& component : components_) {
    const std::vector<absl::StatusOr<double>> values = Values(component, query, line, cancelled);
    for (size_t i = 0; i < values.size(); ++i) {
      Judgement& judgement = judgements[i];
      if (!values[i].ok()) {
        component.failures.Add();
        if (judgement.status.ok()) {
          judgement.status = Annotate(values[i].status(), NameOf(component.spec));
        }
        continue;
      }
      judgement.parts.push_back(
          {.name = NameOf(component.spec), .value = *values[i], .weight = component.spec.weight});
      judgement.reward += component.spec.weight * *values[i];
    }
  }
  return judgements;
}
}  // namespace stretto::services
