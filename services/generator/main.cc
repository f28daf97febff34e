// stretto-generator: writes rollouts for a run (--run FILE), or serves one model by itself
// (--model PATH), in which case it needs no coordinator.
#include <algorithm>
#include <filesystem>
#include <memory>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/counts.h"
#include "base/flag_checks.h"
#include "base/machine.h"
#include "base/status.h"
#include "engine/constrain/constraint.h"
#include "engine/text/stream_decoder.h"
#include "grpcpp/impl/service_type.h"
#include "services/common/http_server.h"
#include "services/common/log.h"
#include "services/common/service_main.h"
#include "services/generator/draft_model.h"
#include "services/generator/generator_service.h"
#include "services/generator/openai/openai_api.h"

namespace stretto::services {
namespace {
class Decoder final : public engine::TextDecoder {
 public:
  Decoder(const engine::PromptEncoder& prompts, const engine::SamplingParams& sampling)
      : decoder_(prompts.tokenizer(), sampling.skip_special_tokens) {
    if (sampling.skip_special_tokens || sampling.keep_stop_string) return;
    left_out_ = sampling.stop_ids;
    const std::vector<int32_t>& eos = prompts.stop_ids();
    if (!sampling.ignore_eos) left_out_.insert(left_out_.end(), eos.begin(), eos.end());
    const auto is_text = [&](int32_t id) { return !prompts.tokenizer().IsSpecial(id); };
    left_out_.erase(std::remove_if(left_out_.begin(), left_out_.end(), is_text), left_out_.end());
  }
  std::string Push(int32_t token) override {
    const bool ends = std::find(left_out_.begin(), left_out_.end(), token) != left_out_.end();
    return ends ? "" : decoder_.Push(token);
  }
  std::string Finish() override { return decoder_.Finish(); }

 private:
  engine::StreamDecoder decoder_;
  std::vector<int32_t> left_out_;  // special tokens that end the completion
};

absl::StatusOr<engine::SwapPolicy> ParseSwapPolicy(const std::string& name) {
  if (name == "finish") return engine::SwapPolicy::kFinish;
  if (name == "recompute") return engine::SwapPolicy::kRecompute;
  if (name == "keep") return engine::SwapPolicy::kKeep;
  return absl::InvalidArgumentError(
      absl::StrCat("schedule.weight_update '", name, "': expected finish, recompute or keep"));
}

// As browsers send it: nothing else would ever match. The reason against it, or "".
std::string CheckOrigin(const std::string& origin) {
  if (origin == "*") return "";
  const size_t scheme = origin.find("://");
  const bool good = scheme != std::string::npos && scheme > 0 && scheme + 3 < origin.size() &&
                    origin.find_first_of("/ \t\r\n,*", scheme + 3) == std::string::npos;
  return good ? "" : "expected scheme://host or scheme://host:port without a path, or *";
}

// Of a model's or adapter's folder or file, for those who ask for it by name.
std::string NameOf(const std::string& path) {
  const auto normal = std::filesystem::path(path).lexically_normal();
  const auto last = (normal.has_filename() ? normal : normal.parent_path()).filename();
  return (last.extension() == ".gguf" ? last.stem() : last).string();  // "Qwen2.5-0.5B" is whole
}

absl::StatusOr<int64_t> KvCacheBytes(const ClusterSection& cluster) {
  if (cluster.kv_cache_share <= 0) return cluster.kv_cache_mb << 20;
  const absl::StatusOr<int64_t> usable = UsableMemoryBytes(Files::Real());
  if (!usable.ok()) {
    return Annotate(usable.status(), "cluster.kv_cache_share (set kv_cache_mb instead)");
  }
  const auto bytes = static_cast<int64_t>(cluster.kv_cache_share * static_cast<double>(*usable));
  LogInfo("keys and values have ", bytes >> 20, " MiB of the ", *usable >> 20,
          " MiB that this process may use");
  return bytes;
}

class GeneratorProgram final : public Service {
 public:
  std::string kind() const override { return "generator"; }
  std::string summary() const override {
    return "Completes prompts, over HTTP as the OpenAI API does and over gRPC, or as a member of a "
           "run.";
  }

  void AddFlags(CLI::App& app) override {
    AddModelFlags(app);
    AddEngineFlags(app);
    AddHttpFlags(app);
    // A run has these of its own: given as well they would be passed over.
    app.callback([this, &app] {
      CheckHttpFlags(app);
      if (app.get_option("--run")->count() == 0) return CheckDraftFlags(app);
      for (const char* flag :
           {"--model", "--adapter", "--dtype", "--backend", "--chat-format",
            "--max-sequence-length", "--kv-cache-mb", "--kv-cache-share", "--max-running",
            "--speculation", "--draft-model", "--draft-tokens"}) {
        if (app.get_option(flag)->count() == 0) continue;
        if (absl::string_view(flag) == "--model") {
          throw CLI::ValidationError(flag, "excludes --run, whose run file names the model");
        }
        throw CLI::ValidationError(flag, "is for --model: with --run the run file says it");
      }
    });
  }

  absl::Status Start(const ServiceContext& context) override {
    RETURN_IF_ERROR(Configure(context));
    in_run_ = context.run.has_value() || !context.flags.coordinator.empty();
    ASSIGN_OR_RETURN(host_, OpenModelHost(model_));
    ASSIGN_OR_RETURN(policy_, PolicyHolder::Create(host_.get(), FetchWeights));
    if (in_run_) policy_->ReserveMemory();
    if (!model_.adapter.empty()) host_->files.tensors = nullptr;  // merged ones take memory
    engine::EngineOptions options;
    ASSIGN_OR_RETURN(options.kv_cache_bytes, KvCacheBytes(cluster_));
    options.max_running = static_cast<int32_t>(cluster_.max_running);
    options.max_tokens_per_step =
        static_cast<int32_t>(std::max(cluster_.prefill_tokens, cluster_.max_running));
    options.max_queued = max_queued_;
    options.eos_ids = host_->prompts->stop_ids();
    options.text_decoder = [this](const engine::SamplingParams& sampling) {
      return std::make_unique<Decoder>(*host_->prompts, sampling);
    };
    ASSIGN_OR_RETURN(speculation_, OpenSpeculation(*host_, cluster_.speculation,
                                                   cluster_.draft_model, cluster_.draft_tokens));
    options.speculation = speculation_.options;
    if (!speculation_.notice.empty()) LogInfo(speculation_.notice);
    ASSIGN_OR_RETURN(auto engine, engine::InferenceEngine::Create(
                                      *host_->transformer, policy_->CurrentWeights(), options));
    context_ = engine->max_context();
    LogInfo("context of ", context_, " tokens, KV cache of ",
            engine->stats().blocks_total * engine::kBlockTokens, ", at most ", options.max_running,
            " sequences at once, ", Count(host_->transformer->device().num_threads(), "thread"));
    loop_ = std::make_unique<GenerationLoop>(std::move(engine), context.metrics);
    constraints_ = std::make_unique<engine::ConstraintCache>([this] {
      return engine::TokenTrie::Of(host_->prompts->tokenizer(), host_->prompts->stop_ids());
    });
    service_ = MakeGeneratorService({.host = host_.get(),
                                     .policy = policy_.get(),
                                     .loop = loop_.get(),
                                     .fence = context.fence,
                                     .constraints = constraints_.get(),
                                     .metrics = context.metrics,
                                     .swap_policy = swap_policy_});
    weights_service_ = MakeWeightsService(&policy_->relay(), context.metrics);
    LogInfo("model ", model_.path, model_.adapter.empty() ? "" : ", adapter " + model_.adapter,
            ", version 0 is ", policy_->Current().second);
    return StartHttp(context);
  }

  std::vector<grpc::Service*> grpc_services() override {
    return {service_.get(), weights_service_.get()};
  }

  std::optional<Membership> membership() override {
    Membership membership;
    membership.pool = v1::POOL_GENERATOR;
    membership.profile = host_->profile;
    membership.version = [this] {
      const auto [number, hash] = policy_->Current();
      v1::PolicyVersion version;
      version.set_number(number);
      version.set_hash(hash);
      return version;
    };
    membership.notice = [this]() -> std::string {
      if (!loop_->IsDraining()) return "";
      return "is draining and takes no new rollouts, as its Drain was called; restart it, or call "
             "Drain with end: true, and it does again";
    };
    return membership;
  }

  int http_port() const override { return http_ == nullptr ? -1 : http_->port(); }

  void Drain(int64_t timeout_ms) override {
    policy_->StopPreparing();
    if (http_ != nullptr) http_->AnnounceEnd();
    // What has been generated of a run's rollouts is valid; another generator goes on from there.
    loop_->FinishWithin(timeout_ms, /*abort_rollouts=*/in_run_);
  }
  void Stop() override {
    http_.reset();
    loop_.reset();
  }

 private:
  void AddModelFlags(CLI::App& app) {
    app.add_option("--model", model_.path,
                   "serve this model (Hugging Face folder or GGUF file), without a run file; "
                   "default: none");
    app.add_option("--adapter", model_.adapter,
                   "with --model: a LoRA adapter (PEFT folder), merged into it at the start; "
                   "default: none");
    app.add_option("--dtype", model_.dtype, "with --model: bf16 or f32")
        ->capture_default_str()
        ->check(OneOf({"bf16", "f32"}));
    app.add_option("--weight-dtype", weight_dtype_,
                   "matrices as bf16 (as --dtype says), int8, int4 or fp8; with --run it wins over "
                   "rollout.weight_dtype, its default")
        ->check(OneOf({"bf16", "int8", "int4", "fp8"}));
    app.add_option("--kv-dtype", kv_dtype_,
                   "keys and values as bf16 (as --dtype says), int8 or fp8; with --run it wins "
                   "over rollout.kv_dtype, its default")
        ->check(OneOf({"bf16", "int8", "fp8"}));
    app.add_option("--backend", model_.backend, "with --model: cpu or reference")
        ->capture_default_str()
        ->check(OneOf({"cpu", "reference"}));
    app.add_option("--chat-format", model_.prompts.chat_format,
                   "with --model: auto or a format's name (docs/chat-formats.md)")
        ->capture_default_str();
    app.add_option("--max-sequence-length", model_.max_sequence_length,
                   "with --model: the context, tokens of prompt and completion together; default: "
                   "the model's own, but at most 4096 even where the model allows more")
        ->check(IntegerIn(1, 1 << 24));
  }

  void AddEngineFlags(CLI::App& app) {
    CLI::Option* mb = app.add_option("--kv-cache-mb", cluster_.kv_cache_mb,
                                     "with --model: memory for keys and values, MiB")
                          ->capture_default_str()
                          ->check(IntegerIn(1, 1 << 24));
    app.add_option("--kv-cache-share", cluster_.kv_cache_share,
                   "with --model: the same as a share of the memory that this process may use, "
                   "instead of --kv-cache-mb; default: none")
        ->check(NumberIn({.low = 0, .high = 0.99, .without_low = true}))
        ->excludes(mb);
    app.add_option("--max-queued", max_queued_,
                   "completions that may wait, each of a request's n counted; a request for more "
                   "is refused")
        ->capture_default_str()
        ->check(IntegerIn(1, 1 << 20));
    app.add_option("--max-running", cluster_.max_running,
                   "with --model: sequences computed at once")
        ->capture_default_str()
        ->check(IntegerIn(1, 65536));
    app.add_option("--speculation", cluster_.speculation,
                   "with --model: how tokens are guessed ahead: off, ngram or model")
        ->capture_default_str()
        ->check(OneOf({"off", "ngram", "model"}));
    app.add_option("--draft-model", cluster_.draft_model,
                   "with --speculation model: a smaller model with the same tokenizer; default: "
                   "none");
    app.add_option("--draft-tokens", cluster_.draft_tokens,
                   "with --speculation: most tokens guessed for a sequence and step")
        ->capture_default_str()
        ->check(IntegerIn(1, engine::kMaxDraft));
  }

  void AddHttpFlags(CLI::App& app) {
    app.add_option("--http-port", http_port_,
                   "port of the OpenAI-compatible API and of /metrics; 0: a free one, -1: none")
        ->capture_default_str()
        ->check(IntegerIn(-1, 65535));
    app.add_option("--served-model-name", served_model_name_,
                   "the model's name in the OpenAI-compatible API; default: the run's, or the "
                   "adapter's or model's folder's");
    app.add_option("--api-key", api_keys_.given,
                   "a key that the HTTP API wants as Authorization: Bearer KEY (may be repeated; "
                   "other users of the machine can read a command line); default: none is wanted");
    app.add_option("--api-key-file", api_keys_.file,
                   "a file with such keys, one a line; STRETTO_API_KEY in the environment is one "
                   "more; default: none");
    app.add_option("--cors-origin", cors_origins_,
                   "an origin (https://host[:port], or *) whose web pages may use the HTTP API "
                   "(may be repeated); default: none")
        ->check(CLI::Validator(CheckOrigin, "ORIGIN"));
  }

  // Flags that would be passed over.
  void CheckHttpFlags(const CLI::App& app) const {
    if (http_port_ >= 0) return;
    for (const char* flag :
         {"--served-model-name", "--api-key", "--api-key-file", "--cors-origin"}) {
      if (app.count(flag) == 0) continue;
      throw CLI::ValidationError(flag, "is for the HTTP API: give --http-port too");
    }
  }
  void CheckDraftFlags(const CLI::App& app) const {
    const bool has_draft = app.count("--draft-model") > 0;
    if (cluster_.speculation == "model" && !has_draft) {
      throw CLI::ValidationError("--speculation model", "needs --draft-model PATH");
    }
    if (cluster_.speculation != "model" && has_draft) {
      throw CLI::ValidationError("--draft-model",
                                 "a draft model is for --speculation model: give it too");
    }
    if (cluster_.speculation == "off" && app.count("--draft-tokens") > 0) {
      throw CLI::ValidationError("--draft-tokens",
                                 "is for --speculation ngram and model: give one of them too");
    }
  }

  absl::Status StartHttp(const ServiceContext& context) {
    if (http_port_ < 0) {
      if (!context.run.has_value()) LogInfo("no HTTP API: --http-port PORT serves one");
      return absl::OkStatus();
    }
    OpenAiApiOptions options;
    ASSIGN_OR_RETURN(options.keys, ApiKeys::Read(api_keys_));
    options.model_name = served_model_name_;
    options.max_model_len = context_;
    options.cors_origins = cors_origins_;
    if (options.model_name.empty()) {
      options.model_name = context.run.has_value()
                               ? context.run->run.name
                               : NameOf(model_.adapter.empty() ? model_.path : model_.adapter);
    }
    api_ = std::make_unique<OpenAiApi>(loop_.get(), host_->prompts.get(), constraints_.get(),
                                       context.metrics, options);
    auto http = HttpServer::Start(api_.get(),
                                  {.bind = context.flags.bind, .port = http_port_, .limits = {}});
    if (!http.ok()) return Annotate(http.status(), "--http-port");
    http_ = *std::move(http);
    if (!options.keys.empty()) LogInfo("the HTTP API wants an API key");
    LogInfo("OpenAI-compatible API at http://", context.flags.bind, ":", http_->port(),
            "/v1, model ", options.model_name);
    return absl::OkStatus();
  }

  absl::Status Configure(const ServiceContext& context) {
    if (context.run.has_value() == !model_.path.empty()) {
      return absl::InvalidArgumentError("give either --run FILE or --model PATH");
    }
    if (!context.run.has_value()) {
      model_.threads = context.flags.threads;
      model_.prompts.chat_optional = true;  // for completions, and over gRPC, none is needed
      if (!weight_dtype_.empty()) model_.weight_dtype = weight_dtype_;
      if (!kv_dtype_.empty()) model_.kv_dtype = kv_dtype_;
      return absl::OkStatus();
    }
    const RunConfig& run = *context.run;
    cluster_ = run.cluster;
    const int64_t threads =
        context.flags.threads > 0 ? context.flags.threads : run.cluster.generator_threads;
    model_ = OptionsOfRun(run, static_cast<int>(threads));
    model_.exact = run.schedule.numerics == "exact";
    model_.weight_dtype = weight_dtype_.empty() ? run.rollout.weight_dtype : weight_dtype_;
    model_.kv_dtype = kv_dtype_.empty() ? run.rollout.kv_dtype : kv_dtype_;
    for (const auto& [dtype, what] : {std::pair(model_.weight_dtype, " weights"),
                                      std::pair(model_.kv_dtype, " keys and values")}) {
      if (dtype == "bf16" || run.schedule.numerics != "exact") continue;
      return absl::InvalidArgumentError(
          absl::StrCat("schedule.numerics is exact, but ", dtype, what,
                       " don't give the trainer's log-probs: set it to fast and "
                       "algorithm.importance_cap above 0, which corrects for the difference"));
    }
    ASSIGN_OR_RETURN(swap_policy_, ParseSwapPolicy(run.schedule.weight_update));
    return absl::OkStatus();
  }

  bool in_run_ = false;
  ModelHostOptions model_;
  std::string weight_dtype_, kv_dtype_;  // the flags
  ClusterSection cluster_;
  engine::SwapPolicy swap_policy_ = engine::SwapPolicy::kFinish;
  std::unique_ptr<ModelHost> host_;
  std::unique_ptr<PolicyHolder> policy_;
  Speculation speculation_;
  std::unique_ptr<GenerationLoop> loop_;
  std::unique_ptr<engine::ConstraintCache> constraints_;
  std::unique_ptr<grpc::Service> service_, weights_service_;
  int64_t context_ = 0;  // tokens of prompt and completion together
  int http_port_ = -1;
  std::string served_model_name_;
  std::vector<std::string> cors_origins_;
  ApiKeySources api_keys_{.given = {}, .file = "", .environment_key = "STRETTO_API_KEY"};
  int32_t max_queued_ = engine::EngineOptions().max_queued;
  std::unique_ptr<OpenAiApi> api_;
  std::unique_ptr<HttpServer> http_;
};
}  // namespace
}  // namespace stretto::services

int main(int argc, char** argv) {
  stretto::services::GeneratorProgram program;
  return stretto::services::ServiceMain(argc, argv, program);
}
