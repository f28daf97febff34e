// The generator's HTTP interface: which request gets which answer. It joins the parser, the
// GenerationLoop (the same that gRPC uses: the same queue, the same engine) and the writer.
//
//   POST /v1/completions, /v1/chat/completions     GET /v1/models[/NAME], /health, /metrics
//
// Thread-safe; a call occupies its thread until the answer, or for a stream until the connection's
// owner lets it go. Knows no HTTP library.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/constrain/constraint.h"
#include "engine/prompt/prompt_encoder.h"
#include "services/common/metrics.h"
#include "services/generator/generation_loop.h"

namespace stretto::services {
struct OpenAiRequest;

struct HttpRequest {
  std::string method, path, body;
  // Asked now and then: whether the client has gone. Work for it then ends.
  std::function<bool()> gone = [] { return false; };
};

// A body that grows. Destroying it ends the work behind it.
class BodyStream {
 public:
  virtual ~BodyStream() = default;
  // What is new; empty if nothing came within a short while; nothing at the end.
  virtual std::optional<std::string> Next() = 0;
};

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
  std::unique_ptr<BodyStream> stream;  // instead of `body`
};

struct OpenAiApiOptions {
  std::string model_name;
  int64_t max_model_len = 0;  // tokens of prompt and completion, told by /v1/models
};

class OpenAiApi {
 public:
  // All outlive the interface.
  OpenAiApi(GenerationLoop* loop, const engine::PromptEncoder* prompts,
            engine::ConstraintCache* constraints, Metrics* metrics, OpenAiApiOptions options);

  HttpReply Handle(const HttpRequest& request);
  // The answer for what never became a request: a body too large, broken HTTP.
  static HttpReply Error(const absl::Status& status);

 private:
  HttpReply Route(const HttpRequest& request);
  HttpReply Complete(const HttpRequest& request, bool chat);
  absl::Status CompileConstraint(OpenAiRequest* request) const;
  HttpReply Models(const std::string& path) const;
  HttpReply Health() const;

  GenerationLoop* const loop_;
  const engine::PromptEncoder* const prompts_;
  engine::ConstraintCache* const constraints_;
  Metrics* const metrics_;
  const OpenAiApiOptions options_;
  const int64_t started_seconds_;
};
}  // namespace stretto::services
