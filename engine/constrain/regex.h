// Regular expressions in the syntax that PCRE, Python and ECMAScript share, as far as it describes
// regular languages: literals, `.` (not a line break), classes with ranges, negation and \d \w \s
// (ASCII) and their complements, escapes (\n \t \r \f \v \0 \xHH \uHHHH \u{…}), groups, `|`,
// `* + ? {m} {m,} {m,n}` (lazy ones mean the same), `^` at the beginning and `$` at the end of the
// expression or of an alternative of it. Characters are Unicode code points.
//
// At the very beginning of an expression that is one alternative, behind `^` or of a whole text,
// look-ahead (?=…) and (?!…) too: passwords' (?=.*[0-9]), and "not only" rules. And at the
// beginning of alternatives of a group that ends the expression.
//
// Not regular, or not read: back references, other look-around, word boundaries, possessive
// quantifiers, inline flags, Unicode properties. InvalidArgument says what and at which character.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/constrain/pattern.h"
#include "engine/constrain/work.h"

namespace stretto::engine {
inline constexpr size_t kMaxRegexBytes = 16 << 10;
inline constexpr int kMaxRegexDepth = 100;  // groups within groups
inline constexpr int32_t kMaxRepeat = 10'000;

enum class RegexMatch {
  kWhole,   // the whole text must match
  kSearch,  // some part of it, as JSON Schema's `pattern` means it
};
enum class RegexText {
  kPlain,      // the text itself
  kJsonString  // the text as it stands within the quotes of a JSON string
};

// `work`: what look-ahead may cost beside other things.
absl::StatusOr<PatternPtr> ParseRegex(absl::string_view expression, RegexMatch match,
                                      RegexText text = RegexText::kPlain, Work* work = nullptr);
// The expression that matches one of these texts and nothing else.
std::string RegexOfTexts(absl::Span<const std::string> texts);
}  // namespace stretto::engine
