// The answers of OpenAI's completions and chat completions: updates of samples become choices, in
// one object or in a stream of chunks (server-sent events). Knows neither HTTP nor the engine's
// thread; one writer a request, used by one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/text/tokenizer.h"
#include "nlohmann/json.hpp"
#include "services/generator/generation_loop.h"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
struct WriterOptions {
  std::string id;     // of the answer, without its prefix
  std::string model;  // the name under which the model is served
  int64_t created_seconds = 0;
};

class OpenAiWriter {
 public:
  // `request` and `tokenizer` outlive the writer.
  OpenAiWriter(const OpenAiRequest& request, const engine::Tokenizer& tokenizer,
               WriterOptions options);

  // Takes news of a choice (prompt index times n, plus sample index).
  void Add(size_t choice, const SampleUpdate& update);
  // Why the request as a whole has failed: a choice ended with an error or was aborted.
  const absl::Status& failure() const { return failure_; }

  // Not a stream: everything, once all choices have ended.
  std::string Whole() const;

  // A stream: what it begins with; what has been added since; what it ends with.
  std::string Begin();
  std::string TakeChunks();
  std::string End();

 private:
  struct Choice {
    std::string text;
    std::string finish_reason;  // empty: not ended
    nlohmann::json logprobs;    // of the tokens in this object
    std::vector<int32_t> ids;
    std::vector<int64_t> versions;
    bool changed = false;
  };
  void AddTokens(size_t choice, const SampleUpdate& update);
  void AddLogprob(size_t choice, int32_t id, const float* logprob,
                  const std::vector<engine::TokenLogprob>* top);
  void AddPrompt(size_t choice, const SampleUpdate& update);
  nlohmann::json EmptyLogprobs() const;
  nlohmann::json TokenJson(const engine::TokenLogprob& token) const;
  std::string TokenString(int32_t id) const;
  nlohmann::json ChoiceJson(size_t index, const Choice& choice, bool chunk) const;
  nlohmann::json Envelope(bool chunk) const;
  nlohmann::json Usage() const;
  std::string Event(nlohmann::json choices, const nlohmann::json* usage = nullptr) const;

  const OpenAiRequest& request_;
  const engine::Tokenizer& tokenizer_;
  const WriterOptions options_;
  std::vector<Choice> choices_;
  std::vector<size_t> text_offset_;  // by choice: characters before its next token
  std::vector<size_t> num_prompt_logprobs_;
  int64_t completion_tokens_ = 0, cached_tokens_ = 0, version_ = -1;
  absl::Status failure_;
};

// The HTTP status of an error; and {"error": {"message", "type", "param", "code"}} for it, or for
// another status.
int HttpStatusOf(const absl::Status& status);
std::string ErrorJson(const absl::Status& status);
std::string ErrorJson(const absl::Status& status, int http_status);
}  // namespace stretto::services
