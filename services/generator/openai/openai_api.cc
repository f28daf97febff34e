#include "services/generator/openai/openai_api.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/version.h"
#include "nlohmann/json.hpp"
#include "services/generator/openai/openai_fields.h"
#include "services/generator/openai/openai_request.h"
#include "services/generator/openai/openai_tokens.h"
#include "services/generator/openai/openai_writer.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr int64_t kPollMs = 100;     // how soon a client that has gone is noticed
constexpr int64_t kGatherMs = 200;   // between looks at an answer that is sent as a whole
constexpr int64_t kShortPollMs = 5;  // between looks at several prompts
// Parsed, JSON may take some thirty times its size: bodies from here on are parsed one at a time.
constexpr size_t kLargeBodyBytes = size_t{128} << 10;
// Answers from here on are sent choice by choice, and never held as a whole.
constexpr size_t kLargeAnswerBytes = size_t{1} << 20;

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
                                                               const OpenAiRequest& request,
                                                               int64_t max_model_len) {
    auto running = std::make_unique<RunningRequest>(loop, request.n);
    const uint64_t seed = request.seed.has_value() ? *request.seed : Random();
    for (size_t p = 0; p < request.prompts.size(); ++p) {
      GenerationRequest entry;
      entry.prompt_ids = request.prompts[p];
      entry.sampling = SamplingOf(request, p, max_model_len);
      entry.prompt_logprobs = (request.echo && request.logprobs) || request.prompt_logprobs >= 0;
      entry.run_seed = seed;
      // With a seed a prompt's choices are what they are without the others.
      entry.prompt_id = request.seed.has_value() ? 0 : p;
      // Smaller ones first, as in vLLM.
      entry.priority = -std::max(request.priority, -INT32_MAX);
      entry.want_text = true;
      entry.api = Api::kHttp;
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

// A request and its answer in the making.
struct Answer {
  Answer(OpenAiRequest taken, const engine::Tokenizer& tokenizer, WriterOptions options)
      : request(std::move(taken)), writer(request, tokenizer, std::move(options)) {}
  const OpenAiRequest request;
  OpenAiWriter writer;
};

// An answer on its way as a stream of events.
class EventStream final : public BodyStream {
 public:
  EventStream(std::unique_ptr<Answer> answer, std::unique_ptr<RunningRequest> running)
      : answer_(std::move(answer)), running_(std::move(running)) {}

  std::optional<std::string> Next() override {
    OpenAiWriter& writer = answer_->writer;
    if (state_ == State::kEnded) return std::nullopt;
    if (state_ == State::kNew) {
      state_ = State::kRunning;
      if (std::string begin = writer.Begin(); !begin.empty()) return begin;
    }
    if (!running_->Done() && !writer.HasChunks()) running_->Fetch(/*gather_ms=*/0, &writer);
    std::string events = writer.failure().ok() ? writer.TakeChunks() : "";
    if ((running_->Done() && !writer.HasChunks()) || !writer.failure().ok()) {
      state_ = State::kEnded;
      events += writer.End();
    }
    return events;
  }

 private:
  enum class State { kNew, kRunning, kEnded };
  const std::unique_ptr<Answer> answer_;
  const std::unique_ptr<RunningRequest> running_;
  State state_ = State::kNew;
};

// A long answer that has ended, choice by choice.
class PieceStream final : public BodyStream {
 public:
  PieceStream(std::string begin, std::unique_ptr<Answer> answer)
      : begin_(std::move(begin)), answer_(std::move(answer)) {}
  std::optional<std::string> Next() override {
    if (!begin_.empty()) return std::exchange(begin_, "");
    return answer_->writer.NextPiece();
  }

 private:
  std::string begin_;
  const std::unique_ptr<Answer> answer_;
};

// Counts how a stream has ended.
class CountedStream final : public BodyStream {
 public:
  CountedStream(std::unique_ptr<BodyStream> stream, std::function<void(int)> count)
      : stream_(std::move(stream)), count_(std::move(count)) {}
  ~CountedStream() override { count_(has_ended_ ? 200 : kHttpClientGone); }
  std::optional<std::string> Next() override {
    std::optional<std::string> bytes = stream_->Next();
    has_ended_ = !bytes.has_value();
    return bytes;
  }

 private:
  const std::unique_ptr<BodyStream> stream_;
  const std::function<void(int)> count_;
  bool has_ended_ = false;
};

HttpReply JsonReply(const Json& json, int status = 200) {
  HttpReply reply;
  reply.status = status;
  reply.body = json.dump();
  return reply;
}

HttpReply ErrorReply(int http_status, const std::string& body) {
  HttpReply reply;
  reply.status = http_status;
  reply.body = body;
  if (http_status == 429 || http_status == 503) reply.headers.emplace_back("Retry-After", "1");
  return reply;
}
HttpReply Error(const absl::Status& status) {
  return ErrorReply(HttpStatusOf(status), ErrorJson(status));
}

// To what a path can't do; and to OPTIONS, which asks what it can.
HttpReply OtherMethod(const HttpRequest& request, const std::string& allowed) {
  HttpReply reply;
  reply.status = 204;
  if (request.method != "OPTIONS") {
    reply = Error(absl::UnimplementedError(
        absl::StrCat(Brief(request.method), " isn't possible here: this path answers ", allowed)));
  }
  reply.headers.emplace_back("Allow", allowed);
  return reply;
}

bool IsCompletion(absl::string_view path) {
  return path == "/v1/completions" || path == "/v1/chat/completions";
}

bool IsTokens(absl::string_view path) { return path == "/tokenize" || path == "/detokenize"; }

constexpr const char* kPaths[] = {"/v1/completions", "/v1/chat/completions",
                                  "/v1/models",      "/tokenize",
                                  "/detokenize",     "/health",
                                  "/ping",           "/metrics",
                                  "/version"};

// The path that is meant by one with an address's slashes doubled, one too many at its end, or /v1
// left out or written twice. Empty: none.
std::string MeantPath(const std::string& path) {
  std::string bare = absl::StrReplaceAll(absl::StrCat(path, "/"), {{"//", "/"}});
  while (absl::StrContains(bare, "//")) bare = absl::StrReplaceAll(bare, {{"//", "/"}});
  bare.pop_back();
  bare = absl::StrReplaceAll(bare, {{"/v1/v1/", "/v1/"}});
  for (const char* known : kPaths) {
    if (bare == known || absl::StrCat("/v1", bare) == known || bare == absl::StrCat("/v1", known)) {
      return known;
    }
  }
  return absl::StartsWith(bare, "/v1/models/") ? bare : "";
}

HttpReply NoSuchPath(const HttpRequest& request) {
  const std::string meant = MeantPath(request.path);
  return Error(absl::NotFoundError(
      absl::StrCat("there is no ", Brief(request.method), " ", Brief(request.path), ": expected ",
                   meant.empty() ? absl::StrJoin(kPaths, ", ") : Brief(meant))));
}

// The second is what some hosts ask for.
bool IsHealth(absl::string_view path) { return path == "/health" || path == "/ping"; }

// Load balancers and Prometheus ask without a key; what they are told says nothing of requests.
bool IsOpen(const HttpRequest& request) {
  return IsHealth(request.path) || request.path == "/metrics" || request.method == "OPTIONS";
}

HttpReply NoKey() {
  const absl::Status status =
      absl::UnauthenticatedError("an API key is needed: `Authorization: Bearer KEY`");
  HttpReply reply = ErrorReply(401, ErrorJson(status, 401));
  reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  return reply;
}

// Whatever the type says, a body is taken for JSON, as clients often leave it at their default;
// what certainly isn't JSON is refused by its kind. OK, or the reason.
std::string WrongMediaType(const HttpRequest& request) {
  const absl::string_view encoding = request.Header("content-encoding");
  if (!encoding.empty() && !absl::EqualsIgnoreCase(encoding, "identity")) {
    return absl::StrCat("the body is encoded (Content-Encoding: ", Brief(encoding),
                        "): send it as it is");
  }
  const absl::string_view type = request.Header("content-type");
  if (absl::StartsWithIgnoreCase(type, "multipart/")) {
    return "the body is a form of several parts: send a JSON object (Content-Type: "
           "application/json)";
  }
  return "";
}

absl::Status ClientGone() {
  return absl::CancelledError("the client has gone, or has closed its sending half");
}
absl::Status Draining() {
  return absl::UnavailableError("the generator is draining: it takes no new work; ask another");
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

void OpenAiApi::Count(int status) const {
  metrics_
      ->counter("stretto_http_requests_total", "Answered HTTP requests; 499: the client had gone.",
                {{"code", absl::StrCat(status)}})
      .Add();
}

bool OpenAiApi::IsQuick(const HttpRequest& request) const {
  return request.method != "POST" || !(IsCompletion(request.path) || IsTokens(request.path));
}

HttpReply OpenAiApi::Refuse(int status, const std::string& message) {
  Count(status);
  return ErrorReply(status, ErrorJson(absl::UnknownError(message), status));
}

HttpReply OpenAiApi::Handle(const HttpRequest& request) {
  HttpReply reply = Route(request);
  AllowOrigin(request, &reply);
  if (reply.stream == nullptr) {
    Count(reply.status);
  } else {
    reply.stream = std::make_unique<CountedStream>(std::move(reply.stream),
                                                   [this](int status) { Count(status); });
  }
  return reply;
}

// What browsers ask before they let a page of another origin read an answer
// (fetch.spec.whatwg.org).
void OpenAiApi::AllowOrigin(const HttpRequest& request, HttpReply* reply) const {
  const std::vector<std::string>& origins = options_.cors_origins;
  if (origins.empty()) return;
  const std::string origin(request.Header("origin"));
  const bool all = std::find(origins.begin(), origins.end(), "*") != origins.end();
  if (!all) reply->headers.emplace_back("Vary", "Origin");
  if (origin.empty() ||
      (!all && std::find(origins.begin(), origins.end(), origin) == origins.end())) {
    return;
  }
  reply->headers.emplace_back("Access-Control-Allow-Origin", all ? "*" : origin);
  reply->headers.emplace_back("Access-Control-Expose-Headers", "Retry-After");
  if (request.method != "OPTIONS") return;
  reply->headers.emplace_back("Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS");
  reply->headers.emplace_back("Access-Control-Allow-Headers", "Authorization, Content-Type");
  reply->headers.emplace_back("Access-Control-Max-Age", "600");
}

HttpReply OpenAiApi::Route(const HttpRequest& request) {
  const std::string& path = request.path;
  if (!IsOpen(request) && !options_.keys.Allow(request.Header("authorization"))) return NoKey();
  if (IsCompletion(path) || IsTokens(path)) {
    if (request.method != "POST") return OtherMethod(request, "POST, OPTIONS");
    if (IsTokens(path)) return Tokens(request);
    return Complete(request, path == "/v1/chat/completions");
  }
  const bool is_models =
      path == "/v1/models" || (absl::StartsWith(path, "/v1/models/") && !absl::EndsWith(path, "/"));
  if (is_models || IsHealth(path) || path == "/metrics" || path == "/version") {
    if (request.method != "GET" && request.method != "HEAD") {
      return OtherMethod(request, "GET, HEAD, OPTIONS");
    }
    if (is_models) return Models(path);
    if (IsHealth(path)) return Health();
    if (path == "/version") return JsonReply({{"version", kVersion}});
    HttpReply reply;
    reply.content_type = kPrometheusText;
    reply.body = metrics_->Text();
    return reply;
  }
  if (path == "*") return OtherMethod(request, "GET, HEAD, POST, OPTIONS");
  return NoSuchPath(request);
}

absl::Status OpenAiApi::CheckWanted(const HttpRequest& request) const {
  if (request.gone()) return ClientGone();
  return loop_->IsDraining() ? Draining() : absl::OkStatus();
}

absl::StatusOr<OpenAiRequest> OpenAiApi::Parse(const HttpRequest& request, bool chat) {
  absl::MutexLockMaybe lock(request.body.size() >= kLargeBodyBytes ? &large_body_ : nullptr);
  const ReadBounds bounds{.max_model_len = options_.max_model_len,
                          .check = [&] { return CheckWanted(request); }};
  RETURN_IF_ERROR(bounds.check());  // others may have been long at theirs
  return chat ? ParseChat(request.body, *prompts_, bounds)
              : ParseCompletion(request.body, *prompts_, bounds);
}

HttpReply OpenAiApi::Complete(const HttpRequest& http, bool chat) {
  if (const std::string reason = WrongMediaType(http); !reason.empty()) {
    return ErrorReply(415, ErrorJson(absl::UnknownError(reason), 415));
  }
  auto parsed = Parse(http, chat);
  if (!parsed.ok()) return Error(parsed.status());
  if (const absl::Status status = CheckModel(parsed->model); !status.ok()) return Error(status);
  TruncatePrompts(options_.max_model_len, prompts_->tokenizer(), &*parsed);
  if (const absl::Status status = CompileConstraint(&*parsed, http.gone); !status.ok())
    return Error(status);
  auto running = RunningRequest::Start(loop_, *parsed, options_.max_model_len);
  if (!running.ok()) return Error(InFieldsOfBody(running.status(), *parsed));
  WriterOptions options;
  options.id = absl::StrFormat("%016x", Random());
  options.model = options_.model_name;
  options.created_seconds = NowSeconds();
  auto answer =
      std::make_unique<Answer>(*std::move(parsed), prompts_->tokenizer(), std::move(options));
  HttpReply reply;
  if (answer->request.stream) {
    reply.content_type = "text/event-stream";
    reply.headers.emplace_back("Cache-Control", "no-cache");
    reply.stream = std::make_unique<EventStream>(std::move(answer), *std::move(running));
    return reply;
  }
  OpenAiWriter& writer = answer->writer;
  while (!(*running)->Done() && writer.failure().ok()) {
    (*running)->Fetch(kGatherMs, &writer);
    if (http.gone()) return Error(ClientGone());
  }
  if (!writer.failure().ok()) return Error(writer.failure());
  while (reply.body.size() < kLargeAnswerBytes) {
    const std::optional<std::string> piece = writer.NextPiece();
    if (!piece.has_value()) return reply;
    reply.body += *piece;
  }
  reply.stream = std::make_unique<PieceStream>(std::exchange(reply.body, ""), std::move(answer));
  return reply;
}

HttpReply OpenAiApi::Tokens(const HttpRequest& http) {
  if (const std::string reason = WrongMediaType(http); !reason.empty()) {
    return ErrorReply(415, ErrorJson(absl::UnknownError(reason), 415));
  }
  absl::StatusOr<TokensAnswer> answer;
  {
    absl::MutexLockMaybe lock(http.body.size() >= kLargeBodyBytes ? &large_body_ : nullptr);
    // Up to a million tokens are told, whatever the context: only the work's end is bounded.
    const ReadBounds bounds{.check = [&] { return CheckWanted(http); }};
    if (const absl::Status status = bounds.check(); !status.ok()) return Error(status);
    answer = http.path == "/tokenize"
                 ? Tokenize(http.body, *prompts_, options_.max_model_len, bounds)
                 : Detokenize(http.body, *prompts_);
  }
  if (!answer.ok()) return Error(answer.status());
  if (const absl::Status status = CheckModel(answer->model); !status.ok()) return Error(status);
  HttpReply reply;
  reply.body = answer->json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return reply;
}

absl::Status OpenAiApi::CheckModel(const std::string& model) const {
  if (model.empty() || model == options_.model_name) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      "the model '", Brief(model), "' isn't served here: ask for '", options_.model_name, "'"));
}

absl::Status OpenAiApi::CompileConstraint(OpenAiRequest* request,
                                          const std::function<bool()>& gone) const {
  if (!request->constraint.has_value()) return absl::OkStatus();
  auto constraint =
      constraints_->Get(*request->constraint, [&] { return gone() || loop_->IsDraining(); });
  if (absl::IsCancelled(constraint.status()) && loop_->IsDraining()) return Draining();
  if (absl::IsInvalidArgument(constraint.status())) {
    return ParamError(
        request->constraint_param,
        absl::StrCat("'", request->constraint_param, "': ", constraint.status().message()));
  }
  if (!constraint.ok()) return Annotate(constraint.status(), request->constraint_param);
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
  return Error(absl::NotFoundError(absl::StrCat(
      "the model '", Brief(name), "' isn't served here: expected ", options_.model_name)));
}

HttpReply OpenAiApi::Health() const {
  if (loop_->IsDraining()) return Error(Draining());
  return JsonReply({{"status", "ok"}});
}
}  // namespace stretto::services
