// Checks of numbers on command lines, as functions that flag parsers take: the text given → "" or
// what is wrong with it ("VALUE: expected …"; the parser adds the flag's name). They read the text
// itself, so that what a number type would make of it (nan, infinity, a value rounded to 0 or cut
// to fit) isn't passed over.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace stretto {
using FlagCheck = std::function<std::string(const std::string& text)>;

struct NumberRange {
  double low = 0, high = 0;
  bool without_low = false;  // above `low`, not at it
  bool or_zero = false;      // 0 is allowed as well
};
// A finite number in the range.
FlagCheck NumberIn(const NumberRange& range);
// A decimal integer from `low` to `high`.
FlagCheck IntegerIn(int64_t low, int64_t high);
}  // namespace stretto
