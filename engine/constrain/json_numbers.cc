#include "engine/constrain/json_numbers.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/constrain/regex.h"

namespace stretto::engine {
namespace {
// A pattern of this file's own.
PatternPtr Known(absl::string_view regex) {
  auto pattern = ParseRegex(regex, RegexMatch::kWhole);
  STRETTO_CHECK_MSG(pattern.ok(), std::string(pattern.status().message()).c_str());
  return *std::move(pattern);
}

// Digits of [first, last], `min` to `max` of them.
PatternPtr Digits(char first, char last, size_t min, size_t max) {
  CharSet set;
  set.Add(static_cast<char32_t>(first), static_cast<char32_t>(last));
  return Repeat(Chars(std::move(set)), static_cast<int32_t>(min), static_cast<int32_t>(max));
}
PatternPtr DigitOf(char first, char last, size_t count = 1) {
  return Digits(first, last, count, count);
}
PatternPtr From(char digit, PatternPtr more) {
  return Concat({DigitOf(digit, digit), std::move(more)});
}

bool AreAll(absl::string_view digits, char digit) {
  return digits.find_first_not_of(digit) == absl::string_view::npos;
}

// Numbers from `low` to `high`, two decimals of one length.
PatternPtr DigitsBetween(absl::string_view low, absl::string_view high) {
  if (AreAll(low, '0') && AreAll(high, '9')) return DigitOf('0', '9', low.size());
  const size_t rest = low.size() - 1;
  if (low[0] == high[0]) return From(low[0], DigitsBetween(low.substr(1), high.substr(1)));
  std::vector<PatternPtr> parts{
      From(low[0], DigitsBetween(low.substr(1), std::string(rest, '9'))),
      From(high[0], DigitsBetween(std::string(rest, '0'), high.substr(1)))};
  if (low[0] + 1 < high[0]) {
    parts.push_back(Concat({DigitOf(static_cast<char>(low[0] + 1), static_cast<char>(high[0] - 1)),
                            DigitOf('0', '9', rest)}));
  }
  return Alternate(std::move(parts));
}

// 0 <= low <= high.
PatternPtr NaturalsBetween(int64_t low, int64_t high) {
  std::vector<PatternPtr> parts;
  for (std::string text = absl::StrCat(low); text.size() <= absl::StrCat(high).size();
       text = "1" + std::string(text.size(), '0')) {
    const std::string longest(text.size(), '9');
    const bool is_last = text.size() == absl::StrCat(high).size();
    parts.push_back(DigitsBetween(text, is_last ? absl::StrCat(high) : longest));
  }
  return Alternate(std::move(parts));
}

// The digits behind a point: as many as `low` has, or fewer, which count as if zeros followed.
// Those that come to `low` or more, to `high` or less; without `empty` at least one.
PatternPtr FractionsFrom(absl::string_view low, bool empty) {
  if (AreAll(low, '0')) return Digits('0', '9', empty ? 0 : 1, low.size());
  std::vector<PatternPtr> parts{From(low[0], FractionsFrom(low.substr(1), true))};
  if (low[0] < '9') {
    parts.push_back(
        Concat({DigitOf(static_cast<char>(low[0] + 1), '9'), Digits('0', '9', 0, low.size() - 1)}));
  }
  return Alternate(std::move(parts));
}
PatternPtr FractionsTo(absl::string_view high, bool empty) {
  std::vector<PatternPtr> parts;
  if (empty) parts.push_back(EmptyText());
  if (!high.empty()) {
    parts.push_back(From(high[0], FractionsTo(high.substr(1), true)));
    if (high[0] > '0') {
      parts.push_back(Concat(
          {DigitOf('0', static_cast<char>(high[0] - 1)), Digits('0', '9', 0, high.size() - 1)}));
    }
  }
  return Alternate(std::move(parts));
}
PatternPtr FractionsBetween(absl::string_view low, absl::string_view high, bool empty) {
  if (AreAll(low, '0')) return FractionsTo(high, empty);
  if (AreAll(high, '9')) return FractionsFrom(low, empty);
  if (low[0] == high[0]) {
    return From(low[0], FractionsBetween(low.substr(1), high.substr(1), true));
  }
  std::vector<PatternPtr> parts{From(low[0], FractionsFrom(low.substr(1), true)),
                                From(high[0], FractionsTo(high.substr(1), true))};
  if (low[0] + 1 < high[0]) {
    parts.push_back(Concat({DigitOf(static_cast<char>(low[0] + 1), static_cast<char>(high[0] - 1)),
                            Digits('0', '9', 0, low.size() - 1)}));
  }
  return Alternate(std::move(parts));
}

// A point and such digits, or neither, where 0 lies within.
PatternPtr PointAndFraction(const std::string& low, const std::string& high) {
  PatternPtr fraction = Concat({Literal("."), FractionsBetween(low, high, /*empty=*/false)});
  return AreAll(low, '0') ? Optional(std::move(fraction)) : fraction;
}

int64_t PowerOfTen(int digits) {
  int64_t power = 1;
  for (int i = 0; i < digits; ++i) power *= 10;
  return power;
}

// Magnitudes from low to high, in units of 10^-digits. 0 <= low <= high.
PatternPtr MagnitudesBetween(int64_t low, int64_t high, int digits) {
  const int64_t one = PowerOfTen(digits);
  const auto fraction = [digits](int64_t value) {
    const std::string text = absl::StrCat(value);
    return std::string(static_cast<size_t>(digits) - text.size(), '0') + text;
  };
  const std::string none(static_cast<size_t>(digits), '0'), all(static_cast<size_t>(digits), '9');
  const int64_t first = low / one, last = high / one;
  const auto with = [&](int64_t whole, const std::string& from, const std::string& to) {
    return Concat({Literal(absl::StrCat(whole)), PointAndFraction(from, to)});
  };
  if (first == last) return with(first, fraction(low % one), fraction(high % one));
  std::vector<PatternPtr> parts{with(first, fraction(low % one), all),
                                with(last, none, fraction(high % one))};
  if (first + 1 < last) {
    parts.push_back(Concat({NaturalsBetween(first + 1, last - 1), PointAndFraction(none, all)}));
  }
  return Alternate(std::move(parts));
}

// A decimal as a sign, its digits without zeros around them, and the power of ten of the last.
struct Decimal {
  bool negative = false;
  std::string digits;  // empty: 0
  int64_t exponent = 0;
};
Decimal ReadDecimal(absl::string_view text) {
  Decimal d;
  const size_t e = std::min(text.find_first_of("eE"), text.size());
  if (e < text.size()) {
    absl::string_view exponent = text.substr(e + 1);
    if (!exponent.empty() && exponent[0] == '+') exponent.remove_prefix(1);
    (void)absl::SimpleAtoi(exponent, &d.exponent);
  }
  bool behind_point = false;
  for (const char c : text.substr(0, e)) {
    if (c == '-') d.negative = true;
    if (c == '.') behind_point = true;
    if (c < '0' || c > '9') continue;
    d.digits += c;
    if (behind_point) --d.exponent;
  }
  d.digits.erase(0, std::min(d.digits.find_first_not_of('0'), d.digits.size()));
  while (!d.digits.empty() && d.digits.back() == '0') {
    d.digits.pop_back();
    ++d.exponent;
  }
  if (d.digits.empty()) d = {};
  return d;
}

// How many digits stand behind the point.
int FractionDigits(const Decimal& d) {
  return static_cast<int>(std::clamp<int64_t>(-d.exponent, 0, 1000));
}

// In units of 10^-digits, which FractionDigits(d) doesn't exceed; cut to ±limit.
int64_t Scaled(const Decimal& d, int digits, int64_t limit) {
  int64_t value = 0;
  for (const char c : d.digits) {
    if (value > limit) break;
    value = value * 10 + (c - '0');
  }
  for (int64_t i = 0; i < d.exponent + digits && value != 0 && value <= limit; ++i) value *= 10;
  value = std::min(value, limit + 1);
  return d.negative ? -value : value;
}

// Both in one unit; none where that would take too many digits.
std::optional<std::pair<int64_t, int64_t>> InOneUnit(const std::string& a, const std::string& b) {
  const Decimal x = ReadDecimal(a), y = ReadDecimal(b);
  const int digits = std::max(FractionDigits(x), FractionDigits(y));
  constexpr int64_t kLimit = int64_t{99'999'999} * 1'000'000'000;
  const int64_t low = Scaled(x, digits, kLimit), high = Scaled(y, digits, kLimit);
  if (std::abs(low) > kLimit || std::abs(high) > kLimit) return std::nullopt;
  return std::pair(low, high);
}

// Whether what is up to `high` can't be `low` or more.
bool IsBelow(const NumberBound& high, const NumberBound& low) {
  if (high.text.empty() || low.text.empty()) return false;
  const auto both = InOneUnit(high.text, low.text);
  if (!both.has_value()) return false;
  return both->first < both->second ||
         (both->first == both->second && (high.exclusive || low.exclusive));
}
}  // namespace

PatternPtr AnyInteger() { return Known("-?(?:0|[1-9][0-9]{0,15})"); }
PatternPtr AnyNumber() {
  return Known("-?(?:0|[1-9][0-9]{0,15})(?:\\.[0-9]{1,16})?(?:[eE][+-]?[0-9]{1,2})?");
}
PatternPtr DecimalsOf(int fraction_digits) {
  return Known(absl::StrCat("-?(?:0|[1-9][0-9]{0,", kMaxBoundedDigits - fraction_digits - 1,
                            "})(?:\\.[0-9]{1,", fraction_digits, "})?"));
}

PatternPtr IntegersBetween(int64_t low, int64_t high) {
  std::vector<PatternPtr> parts;
  if (high >= 0) parts.push_back(NaturalsBetween(std::max<int64_t>(low, 0), high));
  if (low < 0) {
    parts.push_back(Concat({Literal("-"), NaturalsBetween(std::max<int64_t>(-high, 1), -low)}));
  }
  return Alternate(std::move(parts));
}

std::optional<ShortDecimal> ReadShortDecimal(const std::string& text, int32_t max_digits,
                                             int max_exponent) {
  const Decimal d = ReadDecimal(text);
  ShortDecimal result;
  if (d.negative || !absl::SimpleAtoi(d.digits, &result.digits)) return std::nullopt;
  if (result.digits > max_digits || std::abs(d.exponent) > max_exponent) return std::nullopt;
  result.exponent = static_cast<int>(d.exponent);
  return result;
}

absl::StatusOr<PatternPtr> NumbersBetween(const NumberBound& low, const NumberBound& high,
                                          int min_fraction_digits) {
  const Decimal from = ReadDecimal(low.text), to = ReadDecimal(high.text);
  const int digits = std::max({min_fraction_digits, FractionDigits(from), FractionDigits(to)});
  if (digits >= kMaxBoundedDigits) {
    return absl::InvalidArgumentError(absl::StrCat("expected bounds of less than ",
                                                   kMaxBoundedDigits, " digits behind the point"));
  }
  const int64_t largest = PowerOfTen(kMaxBoundedDigits) - 1;
  const auto bound = [&](const NumberBound& b, const Decimal& d, int64_t inwards) {
    if (b.text.empty()) return -inwards * largest;
    return Scaled(d, digits, largest) + (b.exclusive ? inwards : 0);
  };
  const int64_t first = std::max(bound(low, from, 1), -largest),
                last = std::min(bound(high, to, -1), largest);
  if (first > last) {
    return absl::InvalidArgumentError(absl::StrCat("no number of ", kMaxBoundedDigits - digits,
                                                   " digits before and ", digits,
                                                   " behind the point lies between the bounds"));
  }
  std::vector<PatternPtr> parts;
  if (last >= 0) parts.push_back(MagnitudesBetween(std::max<int64_t>(first, 0), last, digits));
  if (first < 0) {
    parts.push_back(
        Concat({Literal("-"), MagnitudesBetween(std::max<int64_t>(-last, 1), -first, digits)}));
  }
  return Alternate(std::move(parts));
}

bool AreApart(const NumberBounds& a, const NumberBounds& b) {
  return IsBelow(a.high, b.low) || IsBelow(b.high, a.low);
}
bool IsOutside(const std::string& number, const NumberBounds& bounds) {
  const NumberBound itself{number, false};
  return IsBelow(bounds.high, itself) || IsBelow(itself, bounds.low);
}
}  // namespace stretto::engine
