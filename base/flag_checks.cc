#include "base/flag_checks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace stretto {
FlagCheck NumberIn(const NumberRange& range) {
  return [range](const std::string& text) -> std::string {
    double value = 0;
    const bool is_number = absl::SimpleAtod(text, &value) && std::isfinite(value);
    const bool in_range =
        (range.without_low ? value > range.low : value >= range.low) && value <= range.high;
    // What underflows is no 0 that somebody has written.
    const std::string digits = text.substr(0, text.find_first_of("eE"));
    const bool is_zero = value == 0 && digits.find_first_of("123456789") == std::string::npos;
    if (is_number && (in_range || (range.or_zero && is_zero))) return "";
    return absl::StrCat(text, ": expected ", range.or_zero ? "0 or " : "", "a number ",
                        range.without_low ? "above " : "from ", range.low,
                        range.without_low ? " and up to " : " to ", range.high);
  };
}

FlagCheck IntegerIn(int64_t low, int64_t high) {
  return [low, high](const std::string& text) -> std::string {
    int64_t value = 0;
    if (absl::SimpleAtoi(text, &value) && value >= low && value <= high) return "";
    return absl::StrCat(text, ": expected an integer from ", low, " to ", high);
  };
}

FlagCheck OneOf(std::vector<std::string> choices) {
  return [choices = std::move(choices)](const std::string& text) -> std::string {
    if (std::find(choices.begin(), choices.end(), text) != choices.end()) return "";
    std::string list = choices.front();
    for (size_t i = 1; i < choices.size(); ++i) {
      absl::StrAppend(&list, i + 1 == choices.size() ? " or " : ", ", choices[i]);
    }
    return absl::StrCat(text.empty() ? "an empty text" : text, ": expected ", list);
  };
}

FlagCheck NotEmpty() {
  return [](const std::string& text) -> std::string {
    return text.empty() ? "expected a value, found an empty text" : "";
  };
}
}  // namespace stretto
