#include "services/generator/generator_service.h"

#include <algorithm>
#include <functional>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "grpcpp/server_context.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "services/generator/forced_prefix.h"
#include "stretto/v1/generator.grpc.pb.h"

namespace stretto::services {
namespace {
// Tokens of a rollout are put together for this long before they are sent; text is sent at once.
constexpr int64_t kGatherMs = 200;
constexpr int64_t kPollMs = 100;  // how soon a cancelled call is noticed
constexpr int kMaxSamples = 4096;
// With kMaxTopLogprobs alternatives each they take about 1 MiB.
constexpr size_t kMaxTokensPerEvent = 3000;

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

absl::StatusOr<engine::ConstraintSpec> SpecOf(const v1::Constraint& proto) {
  using Kind = engine::ConstraintSpec::Kind;
  if (proto.has_regex()) return engine::ConstraintSpec{Kind::kRegex, proto.regex()};
  if (proto.has_json_schema()) {
    return engine::ConstraintSpec{Kind::kJsonSchema, proto.json_schema()};
  }
  if (proto.json_object()) return engine::ConstraintSpec{Kind::kJsonObject, ""};
  return absl::InvalidArgumentError("it is empty: give a regex, a json_schema or json_object");
}

using ConstraintGetter =
    std::function<engine::ConstraintCache::Result(const engine::ConstraintSpec&)>;

// Blocks while a constraint is compiled.
absl::StatusOr<engine::SamplingParams> FromProto(const v1::SamplingParams& proto,
                                                 const ConstraintGetter& constraint_of) {
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
  sampling.keep_stop_string = proto.keep_stop_string();
  sampling.repetition_penalty = proto.repetition_penalty() == 0 ? 1.0f : proto.repetition_penalty();
  sampling.presence_penalty = proto.presence_penalty();
  sampling.frequency_penalty = proto.frequency_penalty();
  sampling.logit_bias = {proto.logit_bias().begin(), proto.logit_bias().end()};
  sampling.top_logprobs = proto.top_logprobs();
  if (!proto.has_constraint()) return sampling;
  const absl::StatusOr<engine::ConstraintSpec> spec = SpecOf(proto.constraint());
  if (!spec.ok()) return Annotate(spec.status(), "sampling.constraint");
  auto constraint = constraint_of(*spec);
  if (!constraint.ok()) return Annotate(constraint.status(), "sampling.constraint");
  sampling.constraint = *std::move(constraint);
  return sampling;
}

// A prompt's number for the random draws of its tokens; the epoch in the upper bits, so that every
// pass over the data draws anew.
uint64_t DrawPromptId(const v1::PromptId& id) {
  return (static_cast<uint64_t>(id.epoch()) << 40) ^ id.index();
}

void EndWithContext(int64_t context, int64_t num_prompt, engine::SamplingParams& sampling) {
  const int64_t left = std::max<int64_t>(context - num_prompt, 1);
  sampling.max_tokens = static_cast<int32_t>(std::min<int64_t>(sampling.max_tokens, left));
  sampling.min_tokens = std::min(sampling.min_tokens, sampling.max_tokens);
}

// `limits`: without what the request says itself. `context`: tokens that the model has room for.
absl::StatusOr<GenerationRequest> FromProto(const v1::GenerateRequest& proto,
                                            const ConstraintGetter& constraint_of, int64_t context,
                                            PrefixLimits limits) {
  if (proto.sampling().max_tokens() < 1) {
    return absl::InvalidArgumentError("sampling.max_tokens: at least 1 is expected");
  }
  if (proto.samples_size() > kMaxSamples) {
    return absl::InvalidArgumentError(
        absl::StrCat("samples: at most ", kMaxSamples, " in one call"));
  }
  GenerationRequest request;
  request.prompt_ids = {proto.prompt_ids().begin(), proto.prompt_ids().end()};
  ASSIGN_OR_RETURN(request.sampling, FromProto(proto.sampling(), constraint_of));
  if (proto.until_context()) {
    EndWithContext(context, proto.prompt_ids_size(), request.sampling);
  }
  request.run_seed = proto.run_seed();
  request.prompt_id = DrawPromptId(proto.prompt_id());
  request.priority = proto.priority();
  request.want_text = proto.return_text();
  request.prompt_logprobs = proto.prompt_logprobs();
  request.expected_version = proto.has_expected_version() ? proto.expected_version().number() : -1;
  request.expected_hash = proto.expected_version().hash();
  limits.max_tokens = request.sampling.max_tokens;
  if (request.sampling.ignore_eos) limits.stop_ids.clear();
  limits.stop_ids.insert(limits.stop_ids.end(), request.sampling.stop_ids.begin(),
                         request.sampling.stop_ids.end());
  std::set<uint32_t> seen;
  for (const v1::SampleRequest& sample : proto.samples()) {
    if (!seen.insert(sample.sample_index()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("samples: sample ", sample.sample_index(), " is asked for twice"));
    }
    SampleSpec spec{.sample_index = sample.sample_index(), .forced_prefix = {}};
    const std::string name = absl::StrCat("samples[", request.samples.size(), "]");
    ASSIGN_OR_RETURN(spec.forced_prefix, CheckForcedPrefix(sample, name, limits));
    request.samples.push_back(std::move(spec));
  }
  return request;
}

void ToProto(const std::vector<engine::TokenLogprob>& top, v1::TopLogprobs* proto) {
  for (const engine::TokenLogprob& entry : top) {
    proto->add_ids(entry.token);
    proto->add_logprobs(entry.logprob);
  }
}

// The part of a prompt's log-probs that begins at `begin`.
v1::GenerateEvent PromptToProto(const SampleUpdate& update, size_t begin) {
  v1::GenerateEvent event;
  event.set_sample_index(update.sample_index);
  const size_t end = std::min(update.prompt_logprobs.size(), begin + kMaxTokensPerEvent);
  for (size_t i = begin; i < end; ++i) {
    const engine::PromptLogprob& entry = update.prompt_logprobs[i];
    event.add_prompt_logprobs(entry.logprob);
    if (!entry.top.empty()) ToProto(entry.top, event.add_prompt_top_logprobs());
  }
  return event;
}

// The part of an update's tokens that begins at `begin`; the last part has the rest of the news.
v1::GenerateEvent TokensToProto(const SampleUpdate& update, size_t begin) {
  v1::GenerateEvent event;
  event.set_sample_index(update.sample_index);
  const size_t end = std::min(update.ids.size(), begin + kMaxTokensPerEvent);
  const auto add_part = [begin, end](const auto& from, auto* to) {
    if (from.empty()) return;
    to->Add(from.begin() + static_cast<ptrdiff_t>(begin),
            from.begin() + static_cast<ptrdiff_t>(end));
  };
  add_part(update.ids, event.mutable_ids());
  add_part(update.logprobs, event.mutable_logprobs());
  add_part(update.versions, event.mutable_versions());
  add_part(update.sampling_logprobs, event.mutable_sampling_logprobs());
  for (size_t i = begin; i < std::min(end, update.top_logprobs.size()); ++i) {
    ToProto(update.top_logprobs[i], event.add_top_logprobs());
  }
  if (end < update.ids.size()) return event;
  event.set_text(update.text);
  if (update.finished.has_value()) event.set_finish_reason(ToProto(*update.finished));
  event.set_error(update.error);
  return event;
}

// Each fits into a message. False when the caller has gone.
bool Write(const SampleUpdate& update, grpc::ServerWriter<v1::GenerateEvent>& writer) {
  for (size_t i = 0; i < update.prompt_logprobs.size(); i += kMaxTokensPerEvent) {
    if (!writer.Write(PromptToProto(update, i))) return false;
  }
  size_t begin = 0;
  do {
    if (!writer.Write(TokensToProto(update, begin))) return false;
    begin += kMaxTokensPerEvent;
  } while (begin < update.ids.size());
  return true;
}

class GeneratorServiceImpl final : public v1::Generator::Service {
 public:
  explicit GeneratorServiceImpl(const GeneratorParts& parts)
      : parts_(parts),
        prepare_seconds_(parts.metrics->histogram(
            "stretto_weights_prepare_seconds",
            "From the announcement of a version to its being ready to use.")),
        pause_seconds_(parts.metrics->histogram("stretto_weights_pause_seconds",
                                                "Generation stood still for a swap.")),
        sources_lost_(parts.metrics->counter(
            "stretto_weights_sources_lost_total",
            "Sources of weights that failed on the way, whose work another has taken over.")) {}

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateEvent>* writer) override {
    return ToGrpc(Stream(*context, *request, *writer));
  }

  grpc::Status PrepareWeights(grpc::ServerContext* context,
                              const v1::PrepareWeightsRequest* request,
                              v1::PrepareWeightsResponse* response) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    const v1::PolicyVersion& version = request->version();
    if (version.number() < 0) {
      return ToGrpc(absl::InvalidArgumentError(
          absl::StrCat("version.number is ", version.number(), "; expected 0 or more")));
    }
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
            info->was_delta ? " bytes of delta in " : " bytes in ", info->seconds, " s (",
            info->transfer_seconds, " until they were here, ", info->layout_seconds,
            " for their layout)");
    prepare_seconds_.Observe(info->seconds);
    sources_lost_.Add(info->num_sources_left);
    const Labels kind = {{"kind", info->was_delta ? "delta" : "snapshot"}};
    parts_.metrics->counter("stretto_weights_received_bytes_total", "Of new policy versions.", kind)
        .Add(static_cast<double>(info->bytes_received));
    *response->mutable_version() = version;
    response->set_bytes_received(info->bytes_received);
    response->set_was_delta(info->was_delta);
    response->set_seconds(info->seconds);
    response->set_transfer_seconds(info->transfer_seconds);
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
    parts_.loop->SetDraining(!request->end());
    LogInfo(request->end() ? "takes new work again: draining was ended"
                           : "draining: takes no new work from now on");
    if (request->end()) return grpc::Status::OK;
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
    const PrefixLimits limits{.vocab_size = parts_.host->files.config.vocab_size,
                              .max_tokens = 0,
                              .stop_ids = parts_.host->prompts->stop_ids(),
                              .version = parts_.policy->Current().first};
    const auto constraint_of = [&](const engine::ConstraintSpec& spec) {
      return parts_.constraints->Get(
          spec, [&context, this] { return context.IsCancelled() || parts_.loop->IsDraining(); });
    };
    absl::StatusOr<GenerationRequest> read = FromProto(
        proto, constraint_of, parts_.host->transformer->options().max_sequence_length, limits);
    if (absl::IsCancelled(read.status()) && parts_.loop->IsDraining()) {
      return absl::UnavailableError("the generator is draining and takes no new requests");
    }
    if (!read.ok()) return read.status();
    GenerationRequest request = *std::move(read);
    const int64_t gather_ms = request.want_text ? 0 : kGatherMs;
    ASSIGN_OR_RETURN(const std::shared_ptr<Generation> generation,
                     parts_.loop->Submit(std::move(request)));
    while (!generation->Done()) {
      // A member that has been given a new epoch drops what an earlier one began.
      const absl::Status fenced = Check(proto.caller());
      bool gone = context.IsCancelled() || !fenced.ok();
      if (!gone) {
        for (const SampleUpdate& update : generation->Next(gather_ms, kPollMs)) {
          gone = gone || !Write(update, writer);
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
    if (version.number() < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("version.number is ", version.number(), "; expected 0 or more"));
    }
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
    pause_seconds_.Observe(seconds);
    LogInfo("generating with version ", version.number());
    return absl::OkStatus();
  }

  const GeneratorParts parts_;
  const Histogram prepare_seconds_, pause_seconds_;
  const Counter sources_lost_;
};
}  // namespace

std::unique_ptr<grpc::Service> MakeGeneratorService(const GeneratorParts& parts) {
  return std::make_unique<GeneratorServiceImpl>(parts);
}
}  // namespace stretto::services
