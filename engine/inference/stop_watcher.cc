#include "engine/inference/stop_watcher.h"

#include <algorithm>

#include "base/check.h"

namespace stretto::engine {
StopWatcher::StopWatcher(std::vector<std::string> stop_strings, bool keep, int32_t min_tokens)
    : stop_strings_(std::move(stop_strings)), keep_(keep), min_tokens_(min_tokens) {
  for (const std::string& s : stop_strings_) {
    STRETTO_CHECK(!s.empty());
    longest_ = std::max(longest_, s.size());
  }
}

bool StopWatcher::Push(absl::string_view text) {
  STRETTO_CHECK(!stopped_ && !finished_);
  begins_.push_back(text_.size());
  text_.append(text.data(), text.size());
  if (!Search()) Settle();
  return stopped_;
}

bool StopWatcher::Finish(absl::string_view text) {
  STRETTO_CHECK(!stopped_ && !finished_);
  finished_ = true;
  text_.append(text.data(), text.size());
  if (!Search()) Settle();
  return stopped_;
}

// The stop string that begins first (of those, the shortest) and leaves enough tokens.
bool StopWatcher::Search() {
  while (true) {
    size_t begin = std::string::npos, size = 0;
    size_t which = 0;
    for (size_t i = 0; i < stop_strings_.size(); ++i) {
      const std::string& s = stop_strings_[i];
      const size_t at = text_.find(s, search_from_);
      if (at < begin || (at == begin && at != std::string::npos && s.size() < size)) {
        begin = at;
        size = s.size();
        which = i;
      }
    }
    if (begin == std::string::npos) break;
    const size_t cut = keep_ ? begin + size : begin;
    if (TokensBefore(cut) >= min_tokens_) {
      stopped_ = true;
      found_ = static_cast<int32_t>(which);
      text_size_ = cut;
      num_tokens_ = TokensBefore(cut);
      return true;
    }
    search_from_ = begin + 1;
  }
  // What was searched in vain is done with, but for the beginnings of strings.
  if (text_.size() >= longest_) search_from_ = std::max(search_from_, text_.size() + 1 - longest_);
  return false;
}

void StopWatcher::Settle() {
  if (finished_ || keep_) {
    num_tokens_ = static_cast<int32_t>(begins_.size());
    text_size_ = text_.size();
    return;
  }
  text_size_ = HeldBackFrom();
  num_tokens_ = TokensBefore(text_size_);
}

int32_t StopWatcher::TokensBefore(size_t text_size) const {
  return static_cast<int32_t>(std::lower_bound(begins_.begin(), begins_.end(), text_size) -
                              begins_.begin());
}

// Where the longest end of the text begins that a stop string may still go on from.
size_t StopWatcher::HeldBackFrom() const {
  for (size_t at = std::min(search_from_, text_.size()); at < text_.size(); ++at) {
    const absl::string_view tail = absl::string_view(text_).substr(at);
    for (const std::string& s : stop_strings_) {
      if (tail.size() < s.size() && absl::string_view(s).substr(0, tail.size()) == tail) return at;
    }
  }
  return text_.size();
}
}  // namespace stretto::engine
