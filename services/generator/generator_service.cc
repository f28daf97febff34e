#include "services/generator/generator_service.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "grpcpp/server_context.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "stretto/v1/generator.grpc.pb.h"

namespace stretto::services {
namespace {
// Tokens of a rollout are put together for this long before they are sent; text is sent at once.
constexpr int64_t kGatherMs = 200;
constexpr int64_t kPollMs = 100;  // how soon a cancelled call is noticed
constexpr int kMaxSamples = 4096;

v1::FinishReason ToProto(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case engine::FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case engine::FinishReason::kAborted:
      return v1::FINISH_REASON_ABORTED;
    case engine::FinishReason::kError:
      return v1::FINISH_REASON_ERROR;
  }
  return v1::FINISH_REASON_ERROR;
}

engine::SamplingParams FromProto(const v1::SamplingParams& proto) {
  engine::SamplingParams sampling;
  sampling.temperature = proto.temperature();
  sampling.top_k = proto.top_k();
  sampling.top_p = proto.top_p() == 0 ? 1.0f : proto.top_p();
  sampling.min_p = proto.min_p();
  sampling.max_tokens = proto.max_tokens();
  sampling.min_tokens = proto.min_tokens();
  sampling.stop_ids = {proto.stop_ids().begin(), proto.stop_ids().end()};
  sampling.stop_strings = {proto.stop_strings().begin(), proto.stop_strings().end()};
  sampling.ignore_eos = proto.ignore_eos();
  return sampling;
}

// A prompt's number for the random draws of its tokens; the epoch in the upper bits, so that every
// pass over the data draws anew.
uint64_t DrawPromptId(const v1::PromptId& id) {
  return (static_cast<uint64_t>(id.epoch()) << 40) ^ id.index();
}

absl::StatusOr<GenerationRequest> FromProto(const v1::GenerateRequest& proto) {
  if (proto.sampling().max_tokens() < 1) {
    return absl::InvalidArgumentError("sampling.max_tokens: at least 1 is expected");
  }
  if (proto.samples_size() > kMaxSamples) {
    return absl::InvalidArgumentError(
        absl::StrCat("samples: at most ", kMaxSamples, " in one call"));
  }
  GenerationRequest request;
  request.prompt_ids = {proto.prompt_ids().begin(), proto.prompt_ids().end()};
  request.sampling = FromProto(proto.sampling());
  request.run_seed = proto.run_seed();
  request.prompt_id = DrawPromptId(proto.prompt_id());
  request.priority = proto.priority();
  request.want_text = proto.return_text();
  request.expected_version = proto.has_expected_version() ? proto.expected_version().number() : -1;
  request.expected_hash = proto.expected_version().hash();
  std::set<uint32_t> seen;
  for (const v1::SampleRequest& sample : proto.samples()) {
    if (!seen.insert(sample.sample_index()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("samples: sample ", sample.sample_index(), " is asked for twice"));
    }
    request.samples.push_back(
        {.sample_index = sample.sample_index(),
         .forced_prefix = {sample.prefix().ids().begin(), sample.prefix().ids().end()}});
  }
  return request;
}

v1::GenerateEvent ToProto(const SampleUpdate& update) {
  v1::GenerateEvent event;
  event.set_sample_index(update.sample_index);
  event.mutable_ids()->Add(update.ids.begin(), update.ids.end());
  event.mutable_logprobs()->Add(update.logprobs.begin(), update.logprobs.end());
  event.mutable_versions()->Add(update.versions.begin(), update.versions.end());
  event.mutable_sampling_logprobs()->Add(update.sampling_logprobs.begin(),
                                         update.sampling_logprobs.end());
  event.set_text(update.text);
  if (update.finished.has_value()) event.set_finish_reason(ToProto(*update.finished));
  event.set_error(update.error);
  return event;
}

class GeneratorServiceImpl final : public v1::Generator::Service {
 public:
  explicit GeneratorServiceImpl(const GeneratorParts& parts) : parts_(parts) {}

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateEvent>* writer) override {
    return ToGrpc(Stream(*context, *request, *writer));
  }

  grpc::Status PrepareWeights(grpc::ServerContext* context,
                              const v1::PrepareWeightsRequest* request,
                              v1::PrepareWeightsResponse* response) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    const v1::PolicyVersion& version = request->version();
    const absl::StatusOr<PreparedInfo> info =
        parts_.policy->Prepare(version.number(), version.hash(), request->caller().run_id(),
                               {request->sources().begin(), request->sources().end()},
                               [context] { return context->IsCancelled(); });
    if (!info.ok()) {
      LogWarning("version ", version.number(),
                 " could not be prepared: ", info.status().ToString());
      return ToGrpc(info.status());
    }
    LogInfo("version ", version.number(), " prepared from ", info->bytes_received,
            info->was_delta ? " bytes of delta in " : " bytes in ", info->seconds, " s");
    *response->mutable_version() = version;
    response->set_bytes_received(info->bytes_received);
    response->set_was_delta(info->was_delta);
    response->set_seconds(info->seconds);
    return grpc::Status::OK;
  }

  grpc::Status CommitWeights(grpc::ServerContext* context, const v1::CommitWeightsRequest* request,
                             v1::CommitWeightsResponse* response) override {
    return ToGrpc(Commit(*context, *request, *response));
  }

  grpc::Status GetGeneratorStatus(grpc::ServerContext*, const v1::GetGeneratorStatusRequest*,
                                  v1::GeneratorStatus* response) override {
    const LoopStatus status = parts_.loop->Status();
    response->mutable_version()->set_number(status.version);
    response->mutable_version()->set_hash(status.hash);
    *response->mutable_profile() = parts_.host->profile;
    response->set_num_running(static_cast<uint32_t>(status.stats.num_running));
    response->set_num_queued(static_cast<uint32_t>(status.stats.num_queued));
    response->set_num_blocks(static_cast<uint64_t>(status.stats.blocks_total));
    response->set_num_free_blocks(
        static_cast<uint64_t>(status.stats.blocks_total - status.stats.blocks_used));
    response->set_tokens_generated(static_cast<uint64_t>(status.stats.tokens_generated));
    response->set_prompt_tokens(static_cast<uint64_t>(status.stats.prompt_tokens_computed));
    response->set_prefix_hit_tokens(static_cast<uint64_t>(status.stats.prompt_tokens_cached));
    response->set_num_preemptions(static_cast<uint64_t>(status.stats.num_preemptions));
    response->set_busy_seconds(status.busy_seconds);
    response->set_draining(status.draining);
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse*) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    parts_.loop->SetDraining(true);
    while (!parts_.loop->Idle()) {
      if (context->IsCancelled()) return {grpc::StatusCode::CANCELLED, "still draining"};
      Clock::Real().SleepNs(kPollMs * 1'000'000);
    }
    return grpc::Status::OK;
  }

 private:
  absl::Status Check(const v1::Caller& caller) const {
    return parts_.fence->Check(caller.run_id(), caller.member_epoch());
  }

  absl::Status Stream(grpc::ServerContext& context, const v1::GenerateRequest& proto,
                      grpc::ServerWriter<v1::GenerateEvent>& writer) {
    RETURN_IF_ERROR(Check(proto.caller()));
    ASSIGN_OR_RETURN(GenerationRequest request, FromProto(proto));
    const int64_t gather_ms = request.want_text ? 0 : kGatherMs;
    ASSIGN_OR_RETURN(const std::shared_ptr<Generation> generation,
                     parts_.loop->Submit(std::move(request)));
    while (!generation->Done()) {
      // A member that has been given a new epoch drops what an earlier one began.
      const absl::Status fenced = Check(proto.caller());
      bool gone = context.IsCancelled() || !fenced.ok();
      if (!gone) {
        for (const SampleUpdate& update : generation->Next(gather_ms, kPollMs)) {
          gone = gone || !writer.Write(ToProto(update));
        }
      }
      if (gone) {
        parts_.loop->Cancel(generation);
        return fenced.ok() ? absl::CancelledError("the caller has gone") : fenced;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Commit(grpc::ServerContext& context, const v1::CommitWeightsRequest& request,
                      v1::CommitWeightsResponse& response) {
    RETURN_IF_ERROR(Check(request.caller()));
    const v1::PolicyVersion& version = request.version();
    *response.mutable_version() = version;
    if (parts_.policy->Current() == std::make_pair(version.number(), version.hash())) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(engine::ServedWeights weights,
                     parts_.policy->Get(version.number(), version.hash()));
    ASSIGN_OR_RETURN(const double seconds,
                     parts_.loop->Swap(std::move(weights), parts_.swap_policy,
                                       [&context] { return context.IsCancelled(); }));
    parts_.policy->Committed(version.number(), version.hash());
    response.set_pause_seconds(seconds);
    LogInfo("generating with version ", version.number());
    return absl::OkStatus();
  }

  const GeneratorParts parts_;
};
}  // namespace

std::unique_ptr<grpc::Service> MakeGeneratorService(const GeneratorParts& parts) {
  return std::make_unique<GeneratorServiceImpl>(parts);
}
}  // namespace stretto::services
