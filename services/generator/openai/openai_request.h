// The requests of OpenAI's completions and chat completions
// (platform.openai.com/docs/api-reference) as this generator serves them: a JSON body becomes
// prompt ids and sampling parameters. Beside OpenAI's own fields those of vLLM's server are read
// that have a meaning here (top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
// ignore_eos, include_stop_str_in_output, priority, return_token_ids, guided_regex, guided_json,
// guided_choice, structured_outputs). A field that isn't known, or
// asks for what isn't there, is an error and never passed over.
//
// Pure functions; any thread. Knows neither HTTP nor the engine's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/constrain/constraint.h"
#include "engine/inference/request.h"
#include "engine/prompt/prompt_encoder.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::services {
inline constexpr int kMaxChoices = 128;       // n, and prompts times n
inline constexpr int kMaxTopLogprobs = 20;    // as OpenAI's
inline constexpr size_t kMaxJsonDepth = 64;   // objects and lists inside one another
inline constexpr int kDefaultMaxTokens = 16;  // of completions; a chat may fill the context
// Of one answer, alternatives included: of echoed prompts (once for each choice), and without
// `stream` of all its tokens. Some 50 MB of text.
inline constexpr size_t kMaxAnswerLogprobs = size_t{2} << 20;

struct OpenAiRequest {
  bool chat = false;
  std::string model;  // empty: not named
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::string> prompt_texts;  // with `echo`: one a prompt
  engine::SamplingParams sampling;        // without its constraint
  std::optional<engine::ConstraintSpec> constraint;
  std::string constraint_param;  // the field that it came from
  // The field that gave max_tokens; empty: none, and a completion has no more than the context
  // leaves.
  std::string max_tokens_param;
  int n = 1;  // choices of one prompt
  std::optional<uint64_t> seed;
  int32_t priority = 0;
  bool stream = false, include_usage = false, continuous_usage = false;
  bool logprobs = false;
  int top_logprobs = 0;
  bool echo = false;              // completions: the choice begins with the prompt
  bool prompt_only = false;       // echo with max_tokens 0: nothing is generated
  bool return_token_ids = false;  // choices carry ids and the policy version of each token
  // The log-probs of the prompt's tokens, with so many alternatives (vLLM's field); -1: none.
  int prompt_logprobs = -1;
  // The last tokens of a longer prompt stay (vLLM's field); 0: all, -1: as many as leave room.
  int32_t truncate_prompt_tokens = 0;
};

// What bounds the work that reading a request takes.
struct ReadBounds {
  // Conversations that have so many tokens for certain are refused before they are encoded.
  int64_t max_model_len = INT64_MAX;
  // Asked now and then: an error ends the work, and is what comes of it.
  std::function<absl::Status()> check = [] { return absl::OkStatus(); };
};

// Cuts prompts to what `truncate_prompt_tokens` says.
void TruncatePrompts(int64_t max_model_len, const engine::Tokenizer& tokenizer,
                     OpenAiRequest* request);

// How a choice of prompt `index` is drawn, in a context of so many tokens.
engine::SamplingParams SamplingOf(const OpenAiRequest& request, size_t index,
                                  int64_t max_model_len);

// What the engine says of a field of its own, in the words of the body: its fields' names.
absl::Status InFieldsOfBody(const absl::Status& status, const OpenAiRequest& request);

// A token's own and its alternatives.
inline size_t LogprobsPerToken(const OpenAiRequest& request) {
  return request.logprobs ? 1 + static_cast<size_t>(request.top_logprobs) : 0;
}

// InvalidArgument says what is wrong where; ParamOf() names the field. Or the error of
// `bounds.check`.
absl::StatusOr<OpenAiRequest> ParseCompletion(const std::string& body,
                                              const engine::PromptEncoder& prompts,
                                              const ReadBounds& bounds = {});
absl::StatusOr<OpenAiRequest> ParseChat(const std::string& body,
                                        const engine::PromptEncoder& prompts,
                                        const ReadBounds& bounds = {});

// An InvalidArgument about the body's field `param`; and the field of such an error, or "".
absl::Status ParamError(const std::string& param, const std::string& message);
std::string ParamOf(const absl::Status& status);
}  // namespace stretto::services
