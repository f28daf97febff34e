// A set of texts, as a tree: what regular expressions and JSON Schemas are compiled to on their way
// to an automaton over bytes. Plain immutable values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace stretto::engine {
class Automaton;
struct LengthLimits;
struct Pattern;
using PatternPtr = std::shared_ptr<const Pattern>;

// Inclusive ranges of code points; after Normalize sorted, disjoint, and without surrogates.
struct CharSet {
  std::vector<std::pair<char32_t, char32_t>> ranges;

  void Add(char32_t first, char32_t last) { ranges.emplace_back(first, last); }
  void Add(const CharSet& other) {
    ranges.insert(ranges.end(), other.ranges.begin(), other.ranges.end());
  }
  void Normalize();
  CharSet Negated() const;  // of a normalized set
};

struct Pattern {
  enum class Kind {
    kBytes,      // one byte of [first, last]
    kChars,      // one character of a set, in UTF-8
    kConcat,     // the parts one after another; none: the empty text
    kAlternate,  // one of the parts; none: nothing at all
    kRepeat,     // parts[0], min to max times (max < 0: any number of times); between two of them
                 // parts[1], where there is one
    kList,       // some of the parts in their order, parts[0] (the separator) between them; those
                 // that are `required` can't be left out
    kAutomaton,  // what `automaton` matches
  };
  Kind kind = Kind::kConcat;
  uint8_t first = 0, last = 0;
  CharSet chars;
  std::vector<PatternPtr> parts;
  std::vector<bool> required;  // kList: of parts[1], parts[2], …
  int32_t min = 0, max = -1;
  std::shared_ptr<const Automaton> automaton;
  std::shared_ptr<const LengthLimits> lengths;  // kAutomaton: how long its matches may be, or null
  bool json = false;  // kAutomaton: its matches as they stand within the quotes of a JSON string
  std::string where;  // what it was made from, for messages: a JSON pointer; mostly empty
};

PatternPtr EmptyText();
PatternPtr Literal(absl::string_view bytes);
PatternPtr Chars(CharSet set);
// The same as a JSON string writes them: control characters, quotes and backslashes escaped.
PatternPtr JsonChars(const CharSet& set);
// How a JSON string writes an ASCII character that can't stand in it as it is; "" for others.
std::string JsonEscape(char32_t c);
PatternPtr Matches(std::shared_ptr<const Automaton> automaton);
PatternPtr JsonTextMatches(std::shared_ptr<const Automaton> automaton,
                           std::shared_ptr<const LengthLimits> lengths = nullptr);
PatternPtr Concat(std::vector<PatternPtr> parts);
PatternPtr Alternate(std::vector<PatternPtr> parts);
PatternPtr Repeat(PatternPtr part, int32_t min, int32_t max);
PatternPtr Optional(PatternPtr part);
// item (separator item)*, min to max items.
PatternPtr Separated(PatternPtr item, PatternPtr separator, int32_t min, int32_t max);
// The same texts; messages about what they need say `where`.
PatternPtr Placed(PatternPtr part, std::string where);
PatternPtr List(PatternPtr separator, std::vector<PatternPtr> items, std::vector<bool> required);

// The UTF-8 encodings of a range of code points as sequences of byte ranges.
using ByteRange = std::pair<uint8_t, uint8_t>;
std::vector<std::vector<ByteRange>> Utf8Ranges(char32_t first, char32_t last);
}  // namespace stretto::engine
