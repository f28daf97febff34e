// What a caller asks of the inference engine, and what it gets back: one request is one completion,
// tokens in and tokens out. Plain values; no thread, clock or socket.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {
class Constraint;

inline constexpr int32_t kMaxTopLogprobs = 32;

// A token and its log-prob under logits / temperature (0 counts as 1), before any other
// transformation.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

// Of a prompt's token, given those before it: as Event::logprob and Event::top_logprobs.
struct PromptLogprob {
  float logprob = 0;
  int32_t rank = 0;  // 1 of the likeliest; of equals the smaller id's comes first. 0: no top asked
  std::vector<TokenLogprob> top;
};

// How tokens are drawn. The transformations of the logits come in this order: bias, repetition
// penalty, presence and frequency penalties, the masks of the constraint and of the stop ids before
// `min_tokens`; then those of SamplingRow (temperature, top-k, top-p, min-p).
struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off

  // Of the completion, forced prefix included; 0: what the context leaves, more is refused
  // (InferenceEngine::max_context).
  int32_t max_tokens = 0;
  int32_t min_tokens = 0;  // no stop id is drawn and no stop string ends it before so many tokens
  // A drawn stop id is the completion's last token. The engine's EOS ids stop as well, unless
  // `ignore_eos`.
  std::vector<int32_t> stop_ids;
  bool ignore_eos = false;
  // Text that ends the completion (needs an engine with a TextDecoder). Tokens are held back while
  // their text may be the beginning of one. The completion then ends with the token that holds the
  // last byte before the stop string (ids and log-probs), its text right before it; with
  // `keep_stop_string`, after the token and the text of the string's last byte.
  std::vector<std::string> stop_strings;
  bool keep_stop_string = false;
  // Whether text leaves special tokens out. Where it doesn't, one that ends the completion is left
  // out all the same, unless `keep_stop_string`.
  bool skip_special_tokens = true;

  // Keskar et al. 2019: a logit of a token seen in prompt or completion is divided by it if
  // positive, multiplied if negative. 1: off.
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;   // subtracted from the logit of each token of the completion
  float frequency_penalty = 0.0f;  // the same, times the number of its occurrences
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id, addend

  // What the completion's text must match (engine/constrain/constraint.h); null: anything. Only
  // tokens are drawn whose text leads on to a match, and stop ids and EOS that have no text only
  // where the text matches. The completion ends (kStop) where nothing can follow. Before
  // `min_tokens` stop ids are drawn only where nothing else can be.
  std::shared_ptr<const Constraint> constraint;

  // So many of the likeliest tokens are reported beside each drawn one (0 to kMaxTopLogprobs).
  int32_t top_logprobs = 0;

  // Whether a row of logits is changed before SamplingRow's transformations.
  bool ChangesLogits() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f ||
           !logit_bias.empty() || constraint != nullptr;
  }
};

// Who a draw belongs to: with the token's position this decides its random number, and nothing else
// does (base/philox.h, TokenDraw).
struct DrawIdentity {
  uint64_t run_seed = 0;
  uint64_t prompt_id = 0;
  uint32_t sample_index = 0;
};

struct Request {
  uint64_t id = 0;  // the caller's; unique among unfinished requests of an engine
  std::vector<int32_t> prompt_ids;
  // Tokens that this completion already has, written by another engine or an earlier life of this
  // one. They aren't reported again; positions go on after them.
  std::vector<int32_t> forced_prefix;
  SamplingParams sampling;
  DrawIdentity draw;
  int32_t priority = 0;    // higher goes first
  bool want_text = false;  // fill Event::text (needs an engine with a TextDecoder)
  // Report the log-probs of the prompt's tokens. The prompt is then computed whole: the prefix
  // cache holds no logits.
  bool prompt_logprobs = false;
};

// What a swap of weights does to the rollouts that are running (contracts: "Weights under a running
// rollout"). Requests that have written no token yet always start over with the new weights.
enum class SwapPolicy {
  kFinish,     // they end on their version; its weights stay until then
  kRecompute,  // their KV is computed again under the new weights
  kKeep,       // their KV stays as it is
};

enum class FinishReason {
  kStop,     // a stop id, EOS or a stop string
  kLength,   // max_tokens or the end of the context
  kAborted,  // Cancel()
  kError,    // see Event::status
};
absl::string_view Name(FinishReason reason);  // "stop", "length", "aborted", "error"

// What a step reports. A request's events come in order: kPrompt where asked for, tokens by
// position, then one kFinished.
struct Event {
  enum class Kind { kToken, kFinished, kPrompt };
  Kind kind = Kind::kToken;
  uint64_t request_id = 0;

  // kToken
  int32_t token = 0;
  int32_t position = 0;        // index in the completion
  float logprob = 0;           // under logits / temperature, before any other transformation
  float sampling_logprob = 0;  // under the distribution that it was drawn from; 0 when greedy
  int64_t version = 0;         // of the weights that computed its logits
  // kToken and kFinished, where asked for: text that became certain with this event (whole UTF-8
  // characters).
  std::string text;
  // kToken, where asked for: the likeliest tokens, the likeliest first (of equals the smaller id).
  std::vector<TokenLogprob> top_logprobs;

  // kPrompt: of the prompt's tokens from the second on.
  std::vector<PromptLogprob> prompt_logprobs;

  // kFinished
  FinishReason reason = FinishReason::kStop;
  absl::Status status;  // why, for kError
  // What ended it, for kStop: one of stop_ids, or of stop_strings (its index). Neither, -1: EOS, or
  // the constraint.
  int32_t stop_id = -1, stop_string = -1;
  int32_t num_tokens = 0;            // of the completion, forced prefix included
  int32_t cached_prompt_tokens = 0;  // not computed because the prefix cache or the group had them
  int32_t num_preemptions = 0;
};
}  // namespace stretto::engine
