// The generator's HTTP interface: which request gets which answer. It joins the parser, the
// GenerationLoop (the same that gRPC uses: the same queue, the same engine) and the writer.
//
//   POST /v1/completions, /v1/chat/completions     GET /v1/models[/NAME], /health, /metrics
//   POST /tokenize, /detokenize                    GET /version
//
// With keys (OpenAiApiOptions::keys) everything but /health and /metrics wants one.
//
// Thread-safe; a completion occupies its thread until the answer, or for a stream until the
// connection's owner lets it go. Knows no sockets.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "engine/constrain/constraint.h"
#include "engine/prompt/prompt_encoder.h"
#include "services/common/api_key.h"
#include "services/common/http_message.h"
#include "services/common/metrics.h"
#include "services/generator/generation_loop.h"

namespace stretto::services {
struct OpenAiRequest;

struct OpenAiApiOptions {
  std::string model_name;
  int64_t max_model_len = 0;  // tokens of prompt and completion, told by /v1/models
  ApiKeys keys = {};
  // Origins of web pages whose scripts may read the answers ("*": all); none: those of no other.
  std::vector<std::string> cors_origins = {};
};

class OpenAiApi final : public HttpHandler {
 public:
  // All outlive the interface.
  OpenAiApi(GenerationLoop* loop, const engine::PromptEncoder* prompts,
            engine::ConstraintCache* constraints, Metrics* metrics, OpenAiApiOptions options);

  HttpReply Handle(const HttpRequest& request) override;
  HttpReply Refuse(int status, const std::string& message) override;
  bool IsQuick(const HttpRequest& request) const override;

 private:
  void Count(int status) const;
  HttpReply Route(const HttpRequest& request);
  void AllowOrigin(const HttpRequest& request, HttpReply* reply) const;
  HttpReply Complete(const HttpRequest& request, bool chat);
  HttpReply Tokens(const HttpRequest& request);
  absl::Status CheckModel(const std::string& model) const;
  // Why a request's work must end: its client has gone, or the generator is draining.
  absl::Status CheckWanted(const HttpRequest& request) const;
  absl::StatusOr<OpenAiRequest> Parse(const HttpRequest& request, bool chat);
  absl::Status CompileConstraint(OpenAiRequest* request, const std::function<bool()>& gone) const;
  HttpReply Models(const std::string& path) const;
  HttpReply Health() const;

  GenerationLoop* const loop_;
  const engine::PromptEncoder* const prompts_;
  engine::ConstraintCache* const constraints_;
  Metrics* const metrics_;
  const OpenAiApiOptions options_;
  const int64_t started_seconds_;
  absl::Mutex large_body_;  // held while one is parsed
};
}  // namespace stretto::services
