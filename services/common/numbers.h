// Numbers in free text, as people and models write them: "1,234", "-5", "−5" (U+2212), "3.50",
// "2e-3". Pure functions.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/optional.h"

namespace stretto::services {
struct NumberInText {
  // [sign] digits [. digits] [e [sign] digits], without thousands separators, sign '-' or nothing.
  std::string text;
  size_t begin = 0, end = 0;  // bytes in the text
};

// All numbers from left to right. A sign belongs to a number only where no digit, letter or ')'
// stands right before it ("10-5" holds 10 and 5). Commas are thousands separators where they part
// groups of exactly three digits; a point or an exponent belongs to it only if digits follow.
std::vector<NumberInText> FindNumbers(absl::string_view text);

// The text, apart from white space around it, if it is one number and nothing else.
absl::optional<std::string> OnlyNumber(absl::string_view text);

// "007" → "7", "-0" → "0", "5.00" → "5", "2e3" → "2000"; nothing for a number that is not integral
// or has more than 4000 digits. Exact at any size.
absl::optional<std::string> CanonicalInteger(absl::string_view number);
}  // namespace stretto::services
