// One completion on its way through the engine: the request, the sequence that the scheduler moves,
// and what has been reported of it. It decides when the completion ends and which events that
// gives.
//
// A token is reported once it is certain to stay: at once, or, with stop strings, when no stop
// string that may still be completed would cut it off.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "engine/device/device.h"
#include "engine/inference/engine.h"
#include "engine/inference/request.h"
#include "engine/inference/scheduler.h"
#include "engine/inference/stop_watcher.h"

namespace stretto::engine {
class Completion : public Sequence {
 public:
  // `max_size`: tokens that prompt and completion may reach. `eos_ids` must outlive the completion.
  Completion(Request request, int32_t max_size, absl::Span<const int32_t> eos_ids,
             const TextDecoderFactory& text_decoder);

  uint64_t id() const { return request_.id; }
  const Request& request() const { return request_; }
  int32_t num_prompt() const { return num_prompt_; }
  int32_t num_tokens() const { return size() - num_prompt_; }
  // The draw of the next token, or of the one that comes `ahead` tokens after it.
  float NextUniform(int32_t ahead = 0) const;
  // Whether stop ids must not be drawn yet.
  bool MasksStopIds(int32_t ahead = 0) const {
    return num_tokens() + ahead < request_.sampling.min_tokens;
  }

  // Where the tokens so far have led the constraint: Constraint::kDead where they break it; 0
  // without one.
  int64_t constraint_state() const { return constraint_state_; }
  // How many tokens of a draft the completion could go on with, without coming to its end.
  int32_t NumPossible(absl::Span<const int32_t> draft) const;

  // Whether the prompt's log-probs are asked for and not all known. Then tokens
  // [begin, begin + count) of the sequence have been computed, and each row's target is known.
  bool NeedsPromptLogprobs() const { return skip_prefix_cache; }
  // Takes those of tokens [begin + 1, …) after what is known up to `begin`; more than are missing
  // are computed anew after a change of weights. Reports them all when they are complete.
  void AddPromptLogprobs(int32_t begin, std::vector<PromptLogprob> logprobs,
                         std::vector<Event>& events);

  // Why the forced prefix alone ends the completion, if it does.
  std::optional<FinishReason> EndsAtStart() const;
  // The token that was appended last. Reports what became certain; returns why the completion ends,
  // if it does.
  std::optional<FinishReason> Accept(const Sampled& sampled, int64_t version,
                                     std::vector<TokenLogprob> top_logprobs,
                                     std::vector<Event>& events);
  // Reports what was held back, then the end.
  void Finish(FinishReason reason, absl::Status status, std::vector<Event>& events);

 private:
  struct Drawn {
    Sampled sampled;
    int64_t version;
    std::vector<TokenLogprob> top_logprobs;
  };
  bool IsEos(int32_t token) const;
  bool IsStopId(int32_t token) const;
  void FollowConstraint(int32_t token);
  bool ConstraintMustEnd() const;
  bool WatchText(int32_t token);
  void Report(int32_t num_certain, std::vector<Event>& events);
  std::string TakeText();

  Request request_;  // without its ids: they are in `tokens`
  int32_t num_prompt_;
  int32_t num_forced_;
  absl::Span<const int32_t> eos_ids_;
  std::unique_ptr<TextDecoder> decoder_;  // if text or stop strings are wanted
  std::unique_ptr<StopWatcher> watcher_;  // if there are stop strings
  std::vector<Drawn> held_back_;          // tokens [num_reported_, …)
  int32_t num_reported_;                  // of the completion, forced prefix included
  int64_t constraint_state_ = 0;
  std::string text_;                            // certain, not reported; without a watcher
  std::vector<PromptLogprob> prompt_logprobs_;  // of the prompt's tokens from the second on
  size_t text_reported_ = 0;                    // bytes; with a watcher
};
}  // namespace stretto::engine
