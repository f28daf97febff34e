// Numbers as JSON writes them, between bounds: patterns of their decimal texts, compared exactly.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/constrain/pattern.h"

namespace stretto::engine {
inline constexpr int kMaxIntegerDigits = 16;
inline constexpr int64_t kMaxInteger = 9'999'999'999'999'999;
// Of numbers with bounds. Texts of up to 15 digits are read as different doubles, so that a reader
// finds them on the same side of the bounds.
inline constexpr int kMaxBoundedDigits = 15, kMinFractionDigits = 4;

PatternPtr AnyInteger();
PatternPtr AnyNumber();
// low <= high; both of at most kMaxIntegerDigits digits.
PatternPtr IntegersBetween(int64_t low, int64_t high);

// Of kMaxBoundedDigits digits at most, up to so many behind the point (1 or more).
PatternPtr DecimalsOf(int fraction_digits);

// A bound of a number, as JSON writes it. `text` empty: none.
struct NumberBound {
  std::string text;
  bool exclusive = false;
};
// Numbers without exponent, of kMaxBoundedDigits digits: those behind the point as many as the
// bounds have, at least `min_fraction_digits` (1 or more). InvalidArgument: the bounds need more
// digits, or nothing lies between them.
absl::StatusOr<PatternPtr> NumbersBetween(const NumberBound& low, const NumberBound& high,
                                          int min_fraction_digits = kMinFractionDigits);

// A positive decimal: digits · 10^exponent, the last digit not 0.
struct ShortDecimal {
  int32_t digits = 0;
  int exponent = 0;
};
// As JSON writes it. None: it isn't positive, or digits or exponent are more than the limits.
std::optional<ShortDecimal> ReadShortDecimal(const std::string& text, int32_t max_digits,
                                             int max_exponent);

// Whether no number lies within both pairs of bounds; false where that isn't certain.
struct NumberBounds {
  NumberBound low, high;
};
bool AreApart(const NumberBounds& a, const NumberBounds& b);
// Whether the number, as JSON writes it, lies outside of the bounds; false where that isn't
// certain.
bool IsOutside(const std::string& number, const NumberBounds& bounds);
}  // namespace stretto::engine
