#include "engine/inference/completion.h"

#include <algorithm>

#include "base/check.h"
#include "base/philox.h"
#include "engine/constrain/constraint.h"

namespace stretto::engine {
absl::string_view Name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAborted:
      return "aborted";
    case FinishReason::kError:
      return "error";
  }
  return "?";
}

Completion::Completion(Request request, int32_t max_size, absl::Span<const int32_t> eos_ids,
                       const TextDecoderFactory& text_decoder)
    : request_(std::move(request)),
      num_prompt_(static_cast<int32_t>(request_.prompt_ids.size())),
      num_forced_(static_cast<int32_t>(request_.forced_prefix.size())),
      eos_ids_(eos_ids),
      num_reported_(num_forced_) {
  tokens = std::move(request_.prompt_ids);
  tokens.insert(tokens.end(), request_.forced_prefix.begin(), request_.forced_prefix.end());
  max_tokens = max_size;
  priority = request_.priority;
  resumed = num_forced_ > 0;
  skip_prefix_cache = request_.prompt_logprobs && num_prompt_ > 1;
  const SamplingParams& p = request_.sampling;
  if (p.constraint != nullptr) constraint_state_ = p.constraint->start();
  for (const int32_t token : request_.forced_prefix) FollowConstraint(token);
  if (request_.want_text || !p.stop_strings.empty()) decoder_ = text_decoder(p);
  if (!p.stop_strings.empty()) {
    watcher_ = std::make_unique<StopWatcher>(p.stop_strings, p.keep_stop_string, p.min_tokens);
  }
  for (const int32_t token : request_.forced_prefix) {
    if (WatchText(token)) break;
  }
  // The text of the forced prefix was reported with it.
  text_.clear();
  if (watcher_ != nullptr) text_reported_ = watcher_->text().size();
}

void Completion::FollowConstraint(int32_t token) {
  const Constraint* constraint = request_.sampling.constraint.get();
  if (constraint != nullptr) constraint_state_ = constraint->Next(constraint_state_, token);
}

bool Completion::ConstraintMustEnd() const {
  const Constraint* constraint = request_.sampling.constraint.get();
  return constraint != nullptr && constraint_state_ != Constraint::kDead &&
         constraint->MustEnd(constraint_state_);
}

int32_t Completion::NumPossible(absl::Span<const int32_t> draft) const {
  const Constraint* constraint = request_.sampling.constraint.get();
  if (constraint == nullptr) return static_cast<int32_t>(draft.size());
  int64_t state = constraint_state_;
  int32_t count = 0;
  for (const int32_t token : draft) {
    state = constraint->Next(state, token);
    if (state == Constraint::kDead || constraint->MustEnd(state)) break;
    ++count;
  }
  return count;
}

float Completion::NextUniform(int32_t ahead) const {
  const DrawIdentity& d = request_.draw;
  return UniformFloat(
      {d.run_seed, d.prompt_id, d.sample_index, static_cast<uint32_t>(num_tokens() + ahead), 0});
}

void Completion::AddPromptLogprobs(int32_t begin, std::vector<PromptLogprob> logprobs,
                                   std::vector<Event>& events) {
  prompt_logprobs_.resize(static_cast<size_t>(begin));
  for (PromptLogprob& logprob : logprobs) prompt_logprobs_.push_back(std::move(logprob));
  if (static_cast<int32_t>(prompt_logprobs_.size()) < num_prompt_ - 1) return;
  Event& event = events.emplace_back();
  event.kind = Event::Kind::kPrompt;
  event.request_id = id();
  event.prompt_logprobs = std::move(prompt_logprobs_);
  skip_prefix_cache = false;
}

std::optional<FinishReason> Completion::EndsAtStart() const {
  if (num_forced_ == 0) return std::nullopt;
  if (watcher_ != nullptr && watcher_->stopped()) return FinishReason::kStop;
  if (IsStopId(tokens.back()) || ConstraintMustEnd()) return FinishReason::kStop;
  if (size() >= max_tokens) return FinishReason::kLength;
  return std::nullopt;
}

std::optional<FinishReason> Completion::Accept(const Sampled& sampled, int64_t version,
                                               std::vector<TokenLogprob> top_logprobs,
                                               std::vector<Event>& events) {
  held_back_.push_back({sampled, version, std::move(top_logprobs)});
  if (WatchText(sampled.token)) return FinishReason::kStop;
  // The end of the text is not certain before Finish, which must come last to find a stop string.
  if (IsStopId(sampled.token)) return FinishReason::kStop;
  FollowConstraint(sampled.token);
  STRETTO_CHECK(constraint_state_ != Constraint::kDead);  // it would have been masked
  if (ConstraintMustEnd()) return FinishReason::kStop;
  if (size() == max_tokens) return FinishReason::kLength;
  Report(watcher_ != nullptr ? watcher_->num_tokens() : num_tokens(), events);
  return std::nullopt;
}

void Completion::Finish(FinishReason reason, absl::Status status, std::vector<Event>& events) {
  if (decoder_ != nullptr && (watcher_ == nullptr || !watcher_->stopped())) {
    const std::string rest = decoder_->Finish();
    if (watcher_ == nullptr) {
      text_ += rest;
    } else if (watcher_->Finish(rest) && reason == FinishReason::kLength) {
      reason = FinishReason::kStop;
    }
  }
  Report(watcher_ != nullptr ? watcher_->num_tokens() : num_tokens(), events);
  Event event;
  event.kind = Event::Kind::kFinished;
  event.request_id = id();
  event.text = TakeText();
  event.reason = reason;
  event.status = std::move(status);
  if (watcher_ != nullptr && watcher_->stopped()) {
    event.stop_string = watcher_->found();
  } else if (reason == FinishReason::kStop && IsStopId(tokens.back()) && !IsEos(tokens.back())) {
    event.stop_id = tokens.back();
  }
  event.num_tokens = num_reported_;
  event.cached_prompt_tokens = std::max(num_cached, 0);
  event.num_preemptions = num_preemptions;
  events.push_back(std::move(event));
}

bool Completion::IsStopId(int32_t token) const {
  const std::vector<int32_t>& ids = request_.sampling.stop_ids;
  return std::find(ids.begin(), ids.end(), token) != ids.end() || IsEos(token);
}

bool Completion::IsEos(int32_t token) const {
  return !request_.sampling.ignore_eos &&
         std::find(eos_ids_.begin(), eos_ids_.end(), token) != eos_ids_.end();
}

// Returns true when a stop string has been found.
bool Completion::WatchText(int32_t token) {
  if (decoder_ == nullptr) return false;
  const std::string text = decoder_->Push(token);
  if (watcher_ != nullptr) return watcher_->Push(text);
  text_ += text;
  return false;
}

void Completion::Report(int32_t num_certain, std::vector<Event>& events) {
  const int32_t count = num_certain - num_reported_;
  if (count <= 0) return;
  for (int32_t i = 0; i < count; ++i) {
    Drawn& drawn = held_back_[i];
    Event& event = events.emplace_back();
    event.request_id = id();
    event.token = drawn.sampled.token;
    event.position = num_reported_++;
    event.logprob = drawn.sampled.logprob;
    event.sampling_logprob = drawn.sampled.sampling_logprob;
    event.version = drawn.version;
    event.top_logprobs = std::move(drawn.top_logprobs);
  }
  held_back_.erase(held_back_.begin(), held_back_.begin() + count);
  events.back().text = TakeText();
}

std::string Completion::TakeText() {
  std::string text = std::move(text_);
  text_.clear();
  if (watcher_ != nullptr && watcher_->text().size() > text_reported_) {
    text = std::string(watcher_->text().substr(text_reported_));
    text_reported_ = watcher_->text().size();
  }
  return request_.want_text ? text : std::string();
}
}  // namespace stretto::engine
