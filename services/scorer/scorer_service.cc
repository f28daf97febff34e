#include "services/scorer/scorer_service.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"
#include "grpcpp/server_context.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "stretto/v1/scorer.grpc.pb.h"

namespace stretto::services {
namespace {
class ScorerServiceImpl final : public v1::Scorer::Service {
 public:
  explicit ScorerServiceImpl(const ScorerParts& parts)
      : parts_(parts),
        tag_(engine::TensorHash(
            AsBytes(absl::StrCat(parts.judge->description(), "reference ",
                                 parts.reference != nullptr ? parts.reference->hash() : "none")))),
        scored_(parts.metrics->counter("stretto_scorer_completions_total",
                                       "Completions that have a reward.")),
        failed_(parts.metrics->counter("stretto_scorer_errors_total",
                                       "Completions whose reward could not be had.")) {}

  grpc::Status Score(grpc::ServerContext* context, const v1::ScoreRequest* request,
                     v1::ScoreResponse* response) override {
    return ToGrpc(ScoreGroup(*context, *request, *response));
  }

  grpc::Status Tokenize(grpc::ServerContext*, const v1::TokenizeRequest* request,
                        v1::TokenizeResponse* response) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    for (const std::string& line : request->prompt_json()) {
      v1::TokenizedPrompt* prompt = response->add_prompts();
      const absl::StatusOr<std::vector<int32_t>> ids = parts_.host->prompts->EncodeLine(line);
      // One token at least is generated. The coordinator doesn't know what the model allows.
      const int64_t room = parts_.host->transformer->options().max_sequence_length - 1;
      if (!ids.ok()) {
        prompt->set_error(std::string(ids.status().message()));
      } else if (static_cast<int64_t>(ids->size()) > room) {
        prompt->set_error(
            absl::StrCat("the prompt has ", ids->size(), " tokens, more than the allowed ", room));
      } else {
        prompt->mutable_ids()->Add(ids->begin(), ids->end());
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status GetScorerStatus(grpc::ServerContext*, const v1::GetScorerStatusRequest*,
                               v1::ScorerStatus* response) override {
    *response->mutable_profile() = parts_.host->profile;
    response->set_scorer_tag(tag_);
    response->set_num_scored(num_scored_);
    response->set_num_errors(num_errors_);
    if (parts_.reference != nullptr) response->set_busy_seconds(parts_.reference->busy_seconds());
    return grpc::Status::OK;
  }

 private:
  absl::Status Check(const v1::Caller& caller) const {
    return parts_.fence->Check(caller.run_id(), caller.member_epoch());
  }

  absl::Status CheckIds(const google::protobuf::RepeatedField<int32_t>& ids,
                        absl::string_view what) const {
    const int64_t vocab_size = parts_.host->files.config.vocab_size;
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, ": id ", id, " is outside the vocabulary of ", vocab_size));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ScoreGroup(grpc::ServerContext& context, const v1::ScoreRequest& request,
                          v1::ScoreResponse& response) {
    RETURN_IF_ERROR(Check(request.caller()));
    for (const v1::Completion& completion : request.completions()) {
      RETURN_IF_ERROR(
          CheckIds(completion.ids(), absl::StrCat("completion ", completion.sample_index())));
    }
    JudgeQuery query{
        .run_id = request.caller().run_id(), .line_json = request.prompt_json(), .completions = {}};
    for (const v1::Completion& completion : request.completions()) {
      query.completions.push_back(
          {.text = TextOf(completion), .num_tokens = completion.ids_size()});
    }
    ASSIGN_OR_RETURN(const std::vector<Judgement> judgements,
                     parts_.judge->Score(query, [&context] { return context.IsCancelled(); }));
    for (size_t i = 0; i < judgements.size(); ++i) {
      AddScore(request.completions(static_cast<int>(i)).sample_index(), judgements[i], response);
    }
    response.set_scorer_tag(tag_);
    if (context.IsCancelled()) return absl::CancelledError("the caller has gone");
    if (!request.want_reference_logprobs()) return absl::OkStatus();
    return AddReferenceLogProbs(request, response);
  }

  // Without the stop string that ended it: that one ends in the last token, if there is one.
  std::string TextOf(const v1::Completion& completion) const {
    const auto ids = absl::MakeConstSpan(completion.ids().data(), completion.ids().size());
    const engine::Tokenizer& tokenizer = parts_.host->prompts->tokenizer();
    std::string text = tokenizer.Decode(ids);
    if (parts_.stop_strings.empty() || ids.empty()) return text;
    const size_t before = tokenizer.Decode(ids.first(ids.size() - 1)).size();
    size_t end = text.size();
    for (const std::string& stop : parts_.stop_strings) {
      const size_t from = before + 1 > stop.size() ? before + 1 - stop.size() : 0;
      end = std::min(end, text.find(stop, from));
    }
    text.resize(end);
    return text;
  }

  void AddScore(uint32_t sample_index, const Judgement& judgement, v1::ScoreResponse& response) {
    v1::Score* score = response.add_scores();
    score->set_sample_index(sample_index);
    for (const RewardPart& part : judgement.parts) {
      v1::RewardComponent* component = score->add_components();
      component->set_name(part.name);
      component->set_value(part.value);
      component->set_weight(part.weight);
    }
    if (judgement.status.ok()) {
      score->set_reward(judgement.reward);
      ++num_scored_;
      scored_.Add();
    } else {
      score->set_error(judgement.status.ToString());
      score->set_is_retryable(absl::IsUnavailable(judgement.status));
      ++num_errors_;
      failed_.Add();
    }
  }

  absl::Status AddReferenceLogProbs(const v1::ScoreRequest& request, v1::ScoreResponse& response) {
    if (parts_.reference == nullptr) {
      return absl::FailedPreconditionError(
          "reference log-probs are asked for, but this scorer has loaded no reference "
          "(algorithm.kl_coef is 0)");
    }
    RETURN_IF_ERROR(CheckIds(request.prompt_ids(), "prompt_ids"));
    engine::ScoreGroup group;
    group.prompt_ids = {request.prompt_ids().begin(), request.prompt_ids().end()};
    for (const v1::Completion& completion : request.completions()) {
      group.completions.emplace_back(completion.ids().begin(), completion.ids().end());
    }
    ASSIGN_OR_RETURN(const engine::GroupLogProbs logprobs,
                     parts_.reference->LogProbs(group, request.temperature()));
    for (int i = 0; i < response.scores_size(); ++i) {
      response.mutable_scores(i)->mutable_reference_logprobs()->Add(logprobs[i].begin(),
                                                                    logprobs[i].end());
    }
    return absl::OkStatus();
  }

  const ScorerParts parts_;
  const std::string tag_;
  const Counter scored_, failed_;
  std::atomic<uint64_t> num_scored_{0}, num_errors_{0};
};
}  // namespace

std::unique_ptr<grpc::Service> MakeScorerService(const ScorerParts& parts) {
  return std::make_unique<ScorerServiceImpl>(parts);
}
}  // namespace stretto::services
