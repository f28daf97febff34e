#include "services/common/numbers.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace stretto::services {
namespace {
constexpr absl::string_view kUnicodeMinus = "\xe2\x88\x92";
constexpr int64_t kMaxDigits = 4000;

bool IsDigit(absl::string_view text, size_t i) {
  return i < text.size() && absl::ascii_isdigit(static_cast<unsigned char>(text[i]));
}

size_t DigitsFrom(absl::string_view text, size_t i) {
  size_t end = i;
  while (IsDigit(text, end)) ++end;
  return end;
}

// Digits with thousands separators from `i` on: where they end.
size_t IntegerPart(absl::string_view text, size_t i) {
  size_t end = DigitsFrom(text, i);
  if (end - i > 3) return end;
  while (end < text.size() && text[end] == ',' && DigitsFrom(text, end + 1) == end + 4) end += 4;
  return end;
}

size_t ExponentFrom(absl::string_view text, size_t i) {
  if (i >= text.size() || (text[i] != 'e' && text[i] != 'E')) return i;
  size_t digits = i + 1;
  if (digits < text.size() && (text[digits] == '+' || text[digits] == '-')) ++digits;
  const size_t end = DigitsFrom(text, digits);
  return end > digits ? end : i;
}

// Where the sign before a number that begins at `i` begins; `i` itself if it has none.
size_t SignBefore(absl::string_view text, size_t i, bool* negative) {
  size_t sign = i;
  *negative = false;
  const absl::string_view before = text.substr(0, i);
  if (absl::EndsWith(before, kUnicodeMinus)) {
    sign = i - kUnicodeMinus.size();
    *negative = true;
  } else if (absl::EndsWith(before, "-") || absl::EndsWith(before, "+")) {
    sign = i - 1;
    *negative = text[sign] == '-';
  }
  if (sign == i || sign == 0) return sign;
  const auto previous = static_cast<unsigned char>(text[sign - 1]);
  if (absl::ascii_isalnum(previous) || previous == ')') {
    *negative = false;
    return i;
  }
  return sign;
}
}  // namespace

std::vector<NumberInText> FindNumbers(absl::string_view text) {
  std::vector<NumberInText> numbers;
  size_t i = 0;
  while (i < text.size()) {
    const bool begins_with_point = text[i] == '.' && IsDigit(text, i + 1);
    if (!IsDigit(text, i) && !begins_with_point) {
      ++i;
      continue;
    }
    NumberInText number;
    bool negative = false;
    number.begin = SignBefore(text, i, &negative);
    if (negative) number.text = "-";
    size_t end = IntegerPart(text, i);
    for (const char c : text.substr(i, end - i)) {
      if (c != ',') number.text += c;
    }
    if (begins_with_point) number.text += '0';
    if (end < text.size() && text[end] == '.' && IsDigit(text, end + 1)) {
      const size_t fraction = DigitsFrom(text, end + 1);
      number.text.append(text.data() + end, fraction - end);
      end = fraction;
    }
    const size_t exponent = ExponentFrom(text, end);
    number.text.append(text.data() + end, exponent - end);
    number.end = exponent;
    numbers.push_back(number);
    i = number.end;
  }
  return numbers;
}

absl::optional<std::string> OnlyNumber(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  const std::vector<NumberInText> numbers = FindNumbers(text);
  if (numbers.size() != 1 || numbers[0].begin != 0 || numbers[0].end != text.size()) {
    return absl::nullopt;
  }
  return numbers[0].text;
}

absl::optional<std::string> CanonicalInteger(absl::string_view number) {
  const bool negative = absl::ConsumePrefix(&number, "-");
  int64_t exponent = 0;
  const size_t e = number.find_first_of("eE");
  if (e != absl::string_view::npos) {
    if (!absl::SimpleAtoi(number.substr(e + 1), &exponent)) return absl::nullopt;
    if (exponent > kMaxDigits || exponent < -kMaxDigits) return absl::nullopt;
    number = number.substr(0, e);
  }
  std::string digits;
  int64_t num_fraction = 0;
  bool in_fraction = false;
  for (const char c : number) {
    if (c == '.') {
      in_fraction = true;
      continue;
    }
    digits += c;
    num_fraction += in_fraction ? 1 : 0;
  }
  // The value is digits · 10^(exponent − num_fraction).
  int64_t shift = exponent - num_fraction;
  while (shift < 0 && !digits.empty() && digits.back() == '0') {
    digits.pop_back();
    ++shift;
  }
  digits.erase(0, digits.find_first_not_of('0'));
  if (digits.empty()) return std::string("0");
  if (shift < 0) return absl::nullopt;
  digits.append(static_cast<size_t>(shift), '0');
  if (static_cast<int64_t>(digits.size()) > kMaxDigits) return absl::nullopt;
  return negative ? "-" + digits : digits;
}
}  // namespace stretto::services
