// Checks of numbers on command lines, as functions that flag parsers take: the text given → "" or
// what is wrong with it ("VALUE: expected …"; the parser adds the flag's name). They read the text
// itself, so that what a number type would make of it (nan, infinity, a value rounded to 0 or cut
// to fit) isn't passed over.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

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
// One of these texts.
FlagCheck OneOf(std::vector<std::string> choices);
// Some text.
FlagCheck NotEmpty();

// Options that take a value refuse an empty one, as a shell makes it of a variable that isn't set;
// those named in `but` may have it. `App` is the flag parser's; for its commands and groups too.
template <class App>
void RefuseEmptyValues(App& app, const std::set<std::string>& but = {}) {
  for (auto* option : app.get_options()) {
    const bool takes_value = option->get_items_expected_max() > 0;
    if (takes_value && but.count(option->get_name()) == 0) option->check(NotEmpty());
  }
  for (auto* part : app.get_subcommands([](const App*) { return true; })) {
    RefuseEmptyValues(*part, but);
  }
}
}  // namespace stretto
