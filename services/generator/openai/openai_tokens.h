// vLLM's /tokenize and /detokenize: a text or a conversation as the ids that a completion of it
// would begin with, and ids as text. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/prompt/prompt_encoder.h"
#include "nlohmann/json.hpp"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
// The answer, and the model that was named (empty: none).
struct TokensAnswer {
  std::string model;
  nlohmann::json json;
};

// {"prompt" | "messages", "add_special_tokens"?, "return_token_strs"?, "model"?} →
// {"count", "max_model_len", "tokens", "token_strs"}. Errors as ParseCompletion's.
absl::StatusOr<TokensAnswer> Tokenize(const std::string& body, const engine::PromptEncoder& prompts,
                                      int64_t max_model_len, const ReadBounds& bounds = {});
// {"tokens", "model"?} → {"prompt"}; special tokens are text there.
absl::StatusOr<TokensAnswer> Detokenize(const std::string& body,
                                        const engine::PromptEncoder& prompts);
}  // namespace stretto::services
