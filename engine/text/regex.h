// The patterns of a tokenizer.json, run by PCRE2 (UTF, Unicode properties, JIT). tokenizer.json is
// written for Oniguruma, whose \s, \w and \h mean other sets than PCRE2's; Compile rewrites these
// and refuses what it cannot express (nested classes, class intersection).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {

// Immutable and thread-safe.
class Regex {
 public:
  static absl::StatusOr<std::shared_ptr<const Regex>> Compile(absl::string_view pattern);
  // A pattern that matches exactly `text`.
  static absl::StatusOr<std::shared_ptr<const Regex>> Literal(absl::string_view text);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Calls `found(begin, end)` for each match in `text` (valid UTF-8), from left to right without
  // overlap. An error when the search exceeds PCRE2's limits.
  absl::Status ForEachMatch(absl::string_view text,
                            const std::function<void(size_t, size_t)>& found) const;

 private:
  struct Code;
  explicit Regex(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

}  // namespace stretto::engine
