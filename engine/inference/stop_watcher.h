// Looks for stop strings in a completion's text while it grows, and says how many of its tokens and
// how much of its text are certain to stay.
//
// With a stop string at [begin, end) of the text, token k stays if the text before it is shorter
// than `begin` (with keep: than `end`), and the text is cut there. Until a string is complete,
// everything is held back that its completion would cut off.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace stretto::engine {
class StopWatcher {
 public:
  // `min_tokens`: a stop string that would leave fewer tokens does not count.
  StopWatcher(std::vector<std::string> stop_strings, bool keep, int32_t min_tokens);

  // The next token, with the text that became certain by it. Returns true once a stop string has
  // been found; nothing may be pushed after that.
  bool Push(absl::string_view text);
  // Text that becomes certain at the end, without a token (a decoder's rest). Returns as Push does.
  bool Finish(absl::string_view text);

  bool stopped() const { return stopped_; }
  int32_t found() const { return found_; }  // which stop string has stopped it; -1: none
  // Tokens and text that are certain to stay. After Finish or a stop: all that stay.
  int32_t num_tokens() const { return num_tokens_; }
  absl::string_view text() const { return absl::string_view(text_).substr(0, text_size_); }

 private:
  bool Search();
  void Settle();
  int32_t TokensBefore(size_t text_size) const;
  size_t HeldBackFrom() const;

  std::vector<std::string> stop_strings_;
  bool keep_;
  int32_t min_tokens_;
  size_t longest_ = 0;
  std::string text_;
  std::vector<size_t> begins_;  // length of the text before each token
  size_t search_from_ = 0;      // no stop string begins before
  bool stopped_ = false, finished_ = false;
  int32_t found_ = -1;
  int32_t num_tokens_ = 0;
  size_t text_size_ = 0;
};
}  // namespace stretto::engine
