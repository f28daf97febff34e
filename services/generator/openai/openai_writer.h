// The answers of OpenAI's completions and chat completions: updates of samples become choices, in
// one object or in a stream of chunks (server-sent events). Knows neither HTTP nor the engine's
// thread; one writer a request, used by one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
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

  // Not a stream: everything, once all choices have ended. Written choice by choice, since an
  // echoed prompt with its log-probs takes many times its request in each of them.
  std::optional<std::string> NextPiece();
  std::string Whole();  // all pieces together

  // A stream: what it begins with; what has been added since, as long as HasChunks() and about a
  // megabyte at a time; what it ends with.
  std::string Begin();
  bool HasChunks() const;
  std::string TakeChunks();
  std::string End();

 private:
  struct Token {
    int32_t id = 0;
    float logprob = 0;
    std::vector<engine::TokenLogprob> top;
  };
  struct Choice {
    // Of the object that is written next.
    std::string text;
    std::string finish_reason;  // empty: not ended
    nlohmann::json stop_reason;
    std::vector<Token> tokens;  // where log-probs are asked for
    std::vector<int32_t> ids;
    std::vector<int64_t> versions;
    bool changed = false;
    // Of all objects together.
    bool owes_prompt_text = false;
    size_t num_prompt_tokens = 0;  // of an echo, whose log-probs are written
    size_t text_offset = 0;        // characters before the next token
  };
  // A token as it is written: a prompt's first has no log-prob.
  struct TokenView {
    int32_t id = 0;
    const float* logprob = nullptr;
    const std::vector<engine::TokenLogprob>* top = nullptr;
  };
  size_t PromptOf(size_t choice) const { return choice / static_cast<size_t>(request_.n); }
  void AddTokens(size_t choice, const SampleUpdate& update);
  void CountLogprobs(size_t num_tokens);
  std::vector<TokenView> TakeTokens(size_t choice);
  nlohmann::json TokenJson(const engine::TokenLogprob& token) const;
  std::string TokenString(int32_t id) const;
  nlohmann::json Alternatives(const TokenView& token) const;
  std::string Logprobs(size_t choice);
  std::string ChatLogprobs(const std::vector<TokenView>& tokens) const;
  std::string PromptLogprobs(size_t prompt) const;
  std::string TakeChoice(size_t index, bool chunk);
  nlohmann::json Envelope(bool chunk) const;
  nlohmann::json Usage() const;
  std::string Event(const std::string& choices, const nlohmann::json* usage = nullptr) const;

  const OpenAiRequest& request_;
  const engine::Tokenizer& tokenizer_;
  const WriterOptions options_;
  std::vector<Choice> choices_;
  // Where they are asked for: the choices of one prompt share them.
  std::vector<std::vector<engine::PromptLogprob>> prompt_logprobs_;
  size_t num_logprobs_ = 0, next_piece_ = 0;
  int64_t completion_tokens_ = 0, cached_tokens_ = 0, version_ = -1;
  absl::Status failure_;
};

// The HTTP status of an error; and {"error": {"message", "type", "param", "code"}} for it, or for
// another status.
int HttpStatusOf(const absl::Status& status);
std::string ErrorJson(const absl::Status& status);
std::string ErrorJson(const absl::Status& status, int http_status);
}  // namespace stretto::services
