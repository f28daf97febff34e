#include "services/generator/openai/openai_api.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/status.h"
#include "nlohmann/json.hpp"
#include "services/generator/openai/openai_request.h"
#include "services/generator/openai/openai_writer.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr int64_t kPollMs = 100;     // how soon a client that has gone is noticed
constexpr int64_t kGatherMs = 200;   // between looks at an answer that is sent as a whole
constexpr int64_t kShortPollMs = 5;  // between looks at several prompts

int64_t NowSeconds() { return Clock::Real().WallUs() / 1'000'000; }

// For ids, and for the seed of a request that names none: the one place where chance comes in.
uint64_t Random() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// The request's samples under way, one Generation a prompt. What hasn't ended is cancelled with it.
class RunningRequest {
 public:
  static absl::StatusOr<std::unique_ptr<RunningRequest>> Start(GenerationLoop* loop,
                                                               const OpenAiRequest& request) {
    auto running = std::make_unique<RunningRequest>(loop, request.n);
    const uint64_t seed = request.seed.has_value() ? *request.seed : Random();
    for (size_t p = 0; p < request.prompts.size(); ++p) {
      GenerationRequest entry;
      entry.prompt_ids = request.prompts[p];
      entry.sampling = request.sampling;
      entry.sampling.top_logprobs = request.logprobs ? request.top_logprobs : 0;
      entry.prompt_logprobs = request.echo && request.logprobs;
      entry.run_seed = seed;
      entry.prompt_id = p;
      entry.priority = request.priority;
      entry.want_text = true;
      for (int i = 0; i < request.n; ++i) {
        entry.samples.push_back({.sample_index = static_cast<uint32_t>(i), .forced_prefix = {}});
      }
      ASSIGN_OR_RETURN(auto generation, loop->Submit(std::move(entry)));
      running->generations_.push_back(std::move(generation));
    }
    return running;
  }
  RunningRequest(GenerationLoop* loop, int n) : loop_(loop), n_(static_cast<size_t>(n)) {}
  ~RunningRequest() {
    for (const auto& generation : generations_) {
      if (!generation->Done()) loop_->Cancel(generation);
    }
  }

  bool Done() const {
    for (const auto& generation : generations_) {
      if (!generation->Done()) return false;
    }
    return true;
  }
  // Gives the writer what is new; waits a while for it.
  void Fetch(int64_t gather_ms, OpenAiWriter* writer) {
    const bool single = generations_.size() == 1;
    bool any = false;
    for (size_t p = 0; p < generations_.size(); ++p) {
      any = Deliver(p, single ? gather_ms : 0, single ? kPollMs : 0, writer) || any;
    }
    if (!any && !single) Clock::Real().SleepNs(kShortPollMs * 1'000'000);
  }

 private:
  bool Deliver(size_t prompt, int64_t gather_ms, int64_t timeout_ms, OpenAiWriter* writer) {
    const std::vector<SampleUpdate> updates = generations_[prompt]->Next(gather_ms, timeout_ms);
    for (const SampleUpdate& update : updates) {
      writer->Add(prompt * n_ + update.sample_index, update);
    }
    return !updates.empty();
  }

  GenerationLoop* const loop_;
  const size_t n_;
  std::vector<std::shared_ptr<Generation>> generations_;
};

// A request on its way to a stream of events. Owns all that the writer refers to.
class EventStream final : public BodyStream {
 public:
  EventStream(std::unique_ptr<const OpenAiRequest> request, const engine::Tokenizer& tokenizer,
              WriterOptions options, std::unique_ptr<RunningRequest> running)
      : request_(std::move(request)),
        writer_(*request_, tokenizer, std::move(options)),
        running_(std::move(running)) {}

  std::optional<std::string> Next() override {
    if (state_ == State::kEnded) return std::nullopt;
    if (state_ == State::kNew) {
      state_ = State::kRunning;
      if (std::string begin = writer_.Begin(); !begin.empty()) return begin;
    }
    if (!running_->Done()) running_->Fetch(/*gather_ms=*/0, &writer_);
    std::string events = writer_.failure().ok() ? writer_.TakeChunks() : "";
    if (running_->Done() || !writer_.failure().ok()) {
      state_ = State::kEnded;
      events += writer_.End();
    }
    return events;
  }

 private:
  enum class State { kNew, kRunning, kEnded };
  const std::unique_ptr<const OpenAiRequest> request_;
  OpenAiWriter writer_;
  const std::unique_ptr<RunningRequest> running_;
  State state_ = State::kNew;
};

HttpReply JsonReply(const Json& json, int status = 200) {
  HttpReply reply;
  reply.status = status;
  reply.body = json.dump();
  return reply;
}

HttpReply WrongMethod(const std::string& allowed) {
  HttpReply reply = OpenAiApi::Error(
      absl::UnimplementedError(absl::StrCat("only ", allowed, " is possible here")));
  reply.headers.emplace_back("Allow", allowed);
  return reply;
}
}  // namespace

OpenAiApi::OpenAiApi(GenerationLoop* loop, const engine::PromptEncoder* prompts,
                     engine::ConstraintCache* constraints, Metrics* metrics,
                     OpenAiApiOptions options)
    : loop_(loop),
      prompts_(prompts),
      constraints_(constraints),
      metrics_(metrics),
      options_(std::move(options)),
      started_seconds_(NowSeconds()) {}

HttpReply OpenAiApi::Error(const absl::Status& status) {
  HttpReply reply;
  reply.status = HttpStatusOf(status);
  reply.body = ErrorJson(status);
  if (reply.status == 429 || reply.status == 503) reply.headers.emplace_back("Retry-After", "1");
  return reply;
}

HttpReply OpenAiApi::Handle(const HttpRequest& request) {
  HttpReply reply = Route(request);
  metrics_
      ->counter("stretto_http_requests_total", "Answered HTTP requests.",
                {{"code", absl::StrCat(reply.status)}})
      .Add();
  return reply;
}

HttpReply OpenAiApi::Route(const HttpRequest& request) {
  const bool is_get = request.method == "GET" || request.method == "HEAD";
  const std::string& path = request.path;
  if (path == "/v1/completions" || path == "/v1/chat/completions") {
    if (request.method != "POST") return WrongMethod("POST");
    return Complete(request, path == "/v1/chat/completions");
  }
  const bool is_models = path == "/v1/models" || absl::StartsWith(path, "/v1/models/");
  if (is_models || path == "/health" || path == "/metrics") {
    if (!is_get) return WrongMethod("GET");
    if (is_models) return Models(path);
    if (path == "/health") return Health();
    HttpReply reply;
    reply.content_type = "text/plain; version=0.0.4";
    reply.body = metrics_->Text();
    return reply;
  }
  return Error(absl::NotFoundError(absl::StrCat("there is no ", request.method, " ", path)));
}

HttpReply OpenAiApi::Complete(const HttpRequest& http, bool chat) {
  auto parsed = chat ? ParseChat(http.body, *prompts_) : ParseCompletion(http.body, *prompts_);
  if (!parsed.ok()) return Error(parsed.status());
  if (!parsed->model.empty() && parsed->model != options_.model_name) {
    return Error(absl::NotFoundError(absl::StrCat(
        "the model '", parsed->model, "' isn't served here: ask for '", options_.model_name, "'")));
  }
  if (const absl::Status status = CompileConstraint(&*parsed); !status.ok()) return Error(status);
  auto running = RunningRequest::Start(loop_, *parsed);
  if (!running.ok()) return Error(running.status());
  WriterOptions options;
  options.id = absl::StrFormat("%016x", Random());
  options.model = options_.model_name;
  options.created_seconds = NowSeconds();
  const engine::Tokenizer& tokenizer = prompts_->tokenizer();
  HttpReply reply;
  if (parsed->stream) {
    reply.content_type = "text/event-stream";
    reply.headers.emplace_back("Cache-Control", "no-cache");
    reply.stream =
        std::make_unique<EventStream>(std::make_unique<const OpenAiRequest>(*std::move(parsed)),
                                      tokenizer, std::move(options), *std::move(running));
    return reply;
  }
  OpenAiWriter writer(*parsed, tokenizer, std::move(options));
  while (!(*running)->Done()) {
    (*running)->Fetch(kGatherMs, &writer);
    if (http.gone()) return Error(absl::CancelledError("the client has gone"));
  }
  if (!writer.failure().ok()) return Error(writer.failure());
  reply.body = writer.Whole();
  return reply;
}

absl::Status OpenAiApi::CompileConstraint(OpenAiRequest* request) const {
  if (!request->constraint.has_value()) return absl::OkStatus();
  auto constraint = constraints_->Get(*request->constraint);
  if (!constraint.ok()) {
    return ParamError(
        request->constraint_param,
        absl::StrCat("'", request->constraint_param, "': ", constraint.status().message()));
  }
  request->sampling.constraint = *std::move(constraint);
  return absl::OkStatus();
}

HttpReply OpenAiApi::Models(const std::string& path) const {
  const Json model{{"id", options_.model_name},
                   {"object", "model"},
                   {"created", started_seconds_},
                   {"owned_by", "stretto"},
                   {"max_model_len", options_.max_model_len}};
  if (path == "/v1/models") return JsonReply({{"object", "list"}, {"data", Json::array({model})}});
  const absl::string_view name = absl::StripPrefix(path, "/v1/models/");
  if (name == options_.model_name) return JsonReply(model);
  return Error(absl::NotFoundError(absl::StrCat("the model '", name, "' isn't served here")));
}

HttpReply OpenAiApi::Health() const {
  if (loop_->IsDraining()) return Error(absl::UnavailableError("the generator is draining"));
  return JsonReply({{"status", "ok"}});
}
}  // namespace stretto::services
