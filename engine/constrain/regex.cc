#include "engine/constrain/regex.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/constrain/automaton.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {
CharSet SetOf(std::vector<std::pair<char32_t, char32_t>> ranges) {
  CharSet set;
  set.ranges = std::move(ranges);
  set.Normalize();
  return set;
}
CharSet Digits() { return SetOf({{'0', '9'}}); }
CharSet Words() { return SetOf({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}); }
CharSet Spaces() { return SetOf({{'\t', '\r'}, {' ', ' '}}); }
CharSet AnyButLineBreak() { return SetOf({{'\n', '\n'}, {'\r', '\r'}}).Negated(); }
CharSet AnyChar() { return CharSet().Negated(); }

bool IsDigit(char32_t c) { return c >= '0' && c <= '9'; }

int HexValue(char32_t c) {
  if (IsDigit(c)) return static_cast<int>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<int>(c - 'a' + 10);
  if (c >= 'A' && c <= 'F') return static_cast<int>(c - 'A' + 10);
  return -1;
}

class RegexParser {
 public:
  RegexParser(std::vector<char32_t> text, RegexMatch match, RegexText kind, Work* work)
      : text_(std::move(text)), match_(match), kind_(kind), work_(work) {}

  absl::StatusOr<PatternPtr> Parse() {
    if (IsLookAhead(Peek() == '^' ? 1 : 0)) return ParseLookAheads();
    ASSIGN_OR_RETURN(PatternPtr pattern, ParseAlternatives(/*depth=*/0));
    if (at_ < text_.size()) return Error("unmatched ')'");
    return pattern;
  }

 private:
  using Conditions = std::vector<std::pair<bool, PatternPtr>>;  // look-ahead: wanted or not

  // An atom before its quantifier: a set of characters, or something else.
  struct ClassItem {
    CharSet set;
    char32_t single = 0;
    bool is_single = false;
  };

  bool AtEnd() const { return at_ >= text_.size(); }
  char32_t Peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : 0;
  }
  bool Take(char32_t c) {
    if (AtEnd() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  absl::Status Error(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("at character ", at_ + 1, ": ", what));
  }
  PatternPtr Set(CharSet set) const {
    set.Normalize();
    return kind_ == RegexText::kPlain ? Chars(std::move(set)) : JsonChars(set);
  }
  PatternPtr Anything() const { return Repeat(Set(AnyChar()), 0, -1); }

  bool IsLookAhead(size_t ahead) const {
    return Peek(ahead) == '(' && Peek(ahead + 1) == '?' &&
           (Peek(ahead + 2) == '=' || Peek(ahead + 2) == '!');
  }

  // What the rest matches and each look-ahead lets through: as automata, of the text itself.
  absl::StatusOr<PatternPtr> ParseLookAheads() {
    if (!Take('^') && match_ == RegexMatch::kSearch) {
      return Error("look-ahead is supported behind '^' alone");
    }
    const RegexText kind = kind_;
    kind_ = RegexText::kPlain;
    ASSIGN_OR_RETURN(const Conditions conditions, ParseConditions());
    anchored_ = true;
    ASSIGN_OR_RETURN(PatternPtr rest, ParseAlternatives(/*depth=*/0));
    if (num_alternatives_ > 1) return Error("beside look-ahead, '|' must stand in a group");
    if (at_ < text_.size()) return Error("unmatched ')'");
    auto all = Obeying(*rest, conditions, kind);
    if (absl::IsNotFound(all.status())) {
      return absl::InvalidArgumentError("no text matches it and its look-aheads");
    }
    return all;
  }
  absl::StatusOr<Conditions> ParseConditions() {
    Conditions conditions;
    while (IsLookAhead(0)) {
      const bool wanted = Peek(2) == '=';
      at_ += 3;
      ASSIGN_OR_RETURN(PatternPtr condition, ParseLookedAt());
      conditions.emplace_back(wanted, std::move(condition));
    }
    return conditions;
  }
  // What `rest` matches and each condition lets through, as text of the kind. NotFound: nothing.
  absl::StatusOr<PatternPtr> Obeying(const Pattern& rest, const Conditions& conditions,
                                     RegexText kind) const {
    const AutomatonLimits limits{.max_steps = int64_t{4} << 20, .counters = false, .work = work_};
    absl::StatusOr<Automaton> all = Automaton::Compile(rest, limits);
    for (const auto& [wanted, condition] : conditions) {
      if (!all.ok()) break;
      const auto other = Automaton::Compile(*condition, limits);
      if (!other.ok()) return other.status();
      all = wanted ? Automaton::Intersect(*all, *other, limits)
                   : Automaton::Subtract(*all, *other, limits);
    }
    if (!all.ok()) return all.status();
    auto shared = std::make_shared<const Automaton>(*std::move(all));
    return kind == RegexText::kPlain ? Matches(std::move(shared))
                                     : JsonTextMatches(std::move(shared));
  }

  // Whether a group begins here that nothing but the end follows, with look-ahead at the beginning
  // of an alternative: as both see the same text, the rest, it can be joined with what follows it.
  bool IsLookingTail() const {
    bool in_class = false, looks = false;
    int level = 0;
    for (size_t i = 0; at_ + i < text_.size(); ++i) {
      const char32_t c = Peek(i);
      if (c == '\\') {
        ++i;
      } else if (in_class || c == '[') {
        in_class = c != ']';
      } else if (c == '(') {
        const bool is_plain = Peek(i + 1) == '?' && Peek(i + 2) == ':';
        if (++level == 1) looks |= IsLookAhead(i + (is_plain ? 3 : 1));
      } else if (c == '|' && level == 1) {
        looks |= IsLookAhead(i + 1);
      } else if (c == ')' && --level == 0) {
        const size_t end = at_ + i + 1;
        return looks && (end == text_.size() || (end + 1 == text_.size() && text_[end] == '$'));
      }
    }
    return false;
  }
  absl::StatusOr<PatternPtr> ParseLookingTail() {
    const RegexText kind = kind_;
    kind_ = RegexText::kPlain;
    has_tail_ = true;
    ++at_;
    if (Peek() == '?' && Peek(1) == ':') at_ += 2;
    std::vector<PatternPtr> alternatives;
    do {
      ASSIGN_OR_RETURN(const Conditions conditions, ParseConditions());
      ASSIGN_OR_RETURN(PatternPtr rest, ParseConcat(/*depth=*/0));
      const bool to_end = Take('$') || text_.back() == '$' || match_ == RegexMatch::kWhole;
      if (!to_end) rest = Concat({std::move(rest), Anything()});
      auto all = Obeying(*rest, conditions, kind);
      if (absl::IsNotFound(all.status())) continue;
      if (!all.ok()) return all.status();
      alternatives.push_back(*std::move(all));
    } while (Take('|'));
    if (!Take(')')) return Error("expected the end of the group");
    kind_ = kind;
    return Alternate(std::move(alternatives));
  }

  // Up to the end of the look-ahead: whole texts that begin with it.
  absl::StatusOr<PatternPtr> ParseLookedAt() {
    std::vector<PatternPtr> alternatives;
    do {
      Take('^');  // says nothing more
      ASSIGN_OR_RETURN(PatternPtr part, ParseConcat(/*depth=*/0));
      alternatives.push_back(Take('$') ? std::move(part) : Concat({std::move(part), Anything()}));
    } while (Take('|'));
    if (!Take(')')) return Error("expected the end of the look-ahead");
    return Alternate(std::move(alternatives));
  }

  // Anchors belong to the alternatives of the whole expression; elsewhere they would mean more than
  // their place.
  absl::StatusOr<PatternPtr> ParseAlternatives(int depth) {
    std::vector<PatternPtr> alternatives;
    do {
      const bool from_start = depth == 0 && (anchored_ || Take('^'));
      ASSIGN_OR_RETURN(PatternPtr part, ParseConcat(depth));
      const bool to_end = depth == 0 && (Take('$') || has_tail_);
      if (to_end && !AtEnd() && Peek() != '|') return Error("'$' that isn't at the end");
      if (match_ == RegexMatch::kSearch && depth == 0) {
        std::vector<PatternPtr> parts{std::move(part)};
        if (!from_start) parts.insert(parts.begin(), Anything());
        if (!to_end) parts.push_back(Anything());
        part = Concat(std::move(parts));
      }
      alternatives.push_back(std::move(part));
    } while (Take('|'));
    if (depth == 0) num_alternatives_ = alternatives.size();
    return Alternate(std::move(alternatives));
  }

  absl::StatusOr<PatternPtr> ParseConcat(int depth) {
    std::vector<PatternPtr> parts;
    while (!AtEnd() && Peek() != '|' && Peek() != ')') {
      if (Peek() == '$' && depth == 0) break;
      if (Peek() == '(' && depth == 0 && !has_tail_ && IsLookingTail()) {
        ASSIGN_OR_RETURN(parts.emplace_back(), ParseLookingTail());
        continue;
      }
      ASSIGN_OR_RETURN(PatternPtr part, ParseRepeated(depth));
      parts.push_back(std::move(part));
    }
    return Concat(std::move(parts));
  }

  absl::StatusOr<PatternPtr> ParseRepeated(int depth) {
    ASSIGN_OR_RETURN(PatternPtr part, ParseAtom(depth));
    int32_t min = 0, max = 0;
    ASSIGN_OR_RETURN(bool repeated, TakeQuantifier(&min, &max));
    if (!repeated) return part;
    Take('?');  // lazy: the same texts
    if (Peek() == '+' && !AtEnd()) return Error("possessive quantifiers aren't supported");
    int32_t more_min = 0, more_max = 0;
    const size_t second = at_;
    ASSIGN_OR_RETURN(repeated, TakeQuantifier(&more_min, &more_max));
    if (repeated) {
      at_ = second;
      return Error("a quantifier follows a quantifier");
    }
    return Repeat(std::move(part), min, max);
  }

  absl::StatusOr<bool> TakeQuantifier(int32_t* min, int32_t* max) {
    *min = 0;
    *max = -1;
    if (Take('*')) return true;
    if (Take('+')) {
      *min = 1;
      return true;
    }
    if (Take('?')) {
      *max = 1;
      return true;
    }
    if (AtEnd() || Peek() != '{') return false;
    const size_t begin = at_++;
    const bool has_min = IsDigit(Peek());
    ASSIGN_OR_RETURN(*min, TakeNumber());
    *max = *min;
    if (Take(',')) {
      *max = -1;
      if (IsDigit(Peek())) {
        ASSIGN_OR_RETURN(*max, TakeNumber());
      }
    }
    if (!has_min || !Take('}')) {
      at_ = begin;
      return Error("expected a quantifier {m}, {m,} or {m,n} (a literal brace is \\{)");
    }
    if (*max >= 0 && *max < *min) return Error("the quantifier's numbers are out of order");
    return true;
  }

  absl::StatusOr<int32_t> TakeNumber() {
    int32_t number = 0;
    while (IsDigit(Peek()) && !AtEnd()) {
      number = number * 10 + static_cast<int32_t>(text_[at_++] - '0');
      if (number > kMaxRepeat) return Error(absl::StrCat("repeats more than ", kMaxRepeat));
    }
    return number;
  }

  absl::StatusOr<PatternPtr> ParseAtom(int depth) {
    const char32_t c = Peek();
    switch (c) {
      case '(':
        return ParseGroup(depth);
      case '[':
        return ParseClass();
      case '.':
        ++at_;
        return Set(AnyButLineBreak());
      case '\\': {
        ASSIGN_OR_RETURN(const ClassItem item, ParseEscape(/*in_class=*/false));
        return Set(item.set);
      }
      case '*':
      case '+':
      case '?':
        return Error("a quantifier without anything before it");
      case '{':
        return Error("a literal brace is \\{");
      case '^':
        return Error("'^' that isn't at the beginning");
      case '$':
        return Error("'$' that isn't at the end");
      default:
        ++at_;
        return Set(SetOf({{c, c}}));
    }
  }

  absl::StatusOr<PatternPtr> ParseGroup(int depth) {
    if (depth >= kMaxRegexDepth) return Error("groups are nested too deeply");
    const size_t begin = at_++;
    if (Take('?')) {
      if (Take('P')) {  // a named group, Python's way
        if (!Take('<')) return Error("this kind of group isn't supported");
        while (!AtEnd() && Peek() != '>') ++at_;
        if (!Take('>')) return Error("the group's name doesn't end");
      } else if (Peek() == '<' && Peek(1) != '=' && Peek(1) != '!') {
        while (!AtEnd() && Peek() != '>') ++at_;
        if (!Take('>')) return Error("the group's name doesn't end");
      } else if (!Take(':')) {
        return Error(
            "look-around (but at the beginning) and flags aren't supported, only (…), (?:…) and "
            "(?<name>…)");
      }
    }
    ASSIGN_OR_RETURN(PatternPtr pattern, ParseAlternatives(depth + 1));
    if (Take(')')) return pattern;
    at_ = begin;
    return Error("this group doesn't end");
  }

  absl::StatusOr<PatternPtr> ParseClass() {
    const size_t begin = at_++;
    const bool negated = Take('^');
    CharSet set;
    bool first = true;
    while (first || Peek() != ']') {
      if (AtEnd()) {
        at_ = begin;
        return Error("this class doesn't end");
      }
      first = false;
      ASSIGN_OR_RETURN(const ClassItem item, ParseClassItem());
      if (item.is_single && Peek() == '-' && Peek(1) != ']' && at_ + 1 < text_.size()) {
        ++at_;
        ASSIGN_OR_RETURN(const ClassItem last, ParseClassItem());
        if (!last.is_single || last.single < item.single) return Error("the range is out of order");
        set.Add(item.single, last.single);
      } else {
        set.Add(item.set);
      }
    }
    ++at_;
    set.Normalize();
    if (negated) set = set.Negated();
    if (set.ranges.empty()) return Error("the class is empty");
    return Set(std::move(set));
  }

  absl::StatusOr<ClassItem> ParseClassItem() {
    if (Peek() == '\\') return ParseEscape(/*in_class=*/true);
    if (Peek() == '[' && Peek(1) == ':') return Error("POSIX classes aren't supported");
    return Single(text_[at_++]);
  }

  static ClassItem Single(char32_t c) { return {SetOf({{c, c}}), c, true}; }

  absl::StatusOr<ClassItem> ParseEscape(bool in_class) {
    ++at_;
    if (AtEnd()) return Error("a backslash at the end");
    const char32_t c = text_[at_++];
    switch (c) {
      case 'd':
        return ClassItem{Digits()};
      case 'D':
        return ClassItem{Digits().Negated()};
      case 'w':
        return ClassItem{Words()};
      case 'W':
        return ClassItem{Words().Negated()};
      case 's':
        return ClassItem{Spaces()};
      case 'S':
        return ClassItem{Spaces().Negated()};
      case 'n':
        return Single('\n');
      case 't':
        return Single('\t');
      case 'r':
        return Single('\r');
      case 'f':
        return Single('\f');
      case 'v':
        return Single('\v');
      case '0':
        if (!IsDigit(Peek())) return Single(0);
        break;
      case 'b':
        if (in_class) return Single('\b');
        break;
      case 'x':
        return ParseHex(2);
      case 'u':
        if (Take('{')) return ParseBracedHex();
        return ParseHex(4);
      default:
        break;
    }
    const bool is_word = IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!is_word) return Single(c);
    --at_;
    return Error(IsDigit(c) ? "back references aren't supported" : "this escape isn't supported");
  }

  absl::StatusOr<ClassItem> ParseHex(int num_digits) {
    char32_t value = 0;
    for (int i = 0; i < num_digits; ++i) {
      const int digit = HexValue(Peek());
      if (digit < 0 || AtEnd()) return Error("expected a hexadecimal digit");
      value = value * 16 + static_cast<char32_t>(digit);
      ++at_;
    }
    return Checked(value);
  }
  absl::StatusOr<ClassItem> ParseBracedHex() {
    char32_t value = 0;
    while (HexValue(Peek()) >= 0 && !AtEnd() && value <= 0x10FFFF) {
      value = value * 16 + static_cast<char32_t>(HexValue(text_[at_++]));
    }
    if (!Take('}')) return Error("expected hexadecimal digits and '}'");
    return Checked(value);
  }
  absl::StatusOr<ClassItem> Checked(char32_t value) const {
    if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
      return Error("not a Unicode character");
    }
    return Single(value);
  }

  const std::vector<char32_t> text_;
  const RegexMatch match_;
  RegexText kind_;
  Work* const work_;  // may be null
  size_t at_ = 0;
  bool anchored_ = false;  // what is parsed begins at the text's beginning
  bool has_tail_ = false;  // the last group was joined with its look-ahead, up to the end
  size_t num_alternatives_ = 0;
};
}  // namespace

absl::StatusOr<PatternPtr> ParseRegex(absl::string_view expression, RegexMatch match,
                                      RegexText text, Work* work) {
  if (expression.size() > kMaxRegexBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", expression.size(), " bytes: expected up to ", kMaxRegexBytes));
  }
  if (!IsValidUtf8(expression)) return absl::InvalidArgumentError("isn't valid UTF-8");
  std::vector<char32_t> characters;
  for (size_t at = 0; at < expression.size();) {
    characters.push_back(NextCodePoint(expression, &at));
  }
  return RegexParser(std::move(characters), match, text, work).Parse();
}

std::string RegexOfTexts(absl::Span<const std::string> texts) {
  std::string expression;
  for (size_t i = 0; i < texts.size(); ++i) {
    if (i > 0) expression += '|';
    for (const char c : texts[i]) {
      if (absl::ascii_ispunct(static_cast<unsigned char>(c))) expression += '\\';
      expression += c;
    }
  }
  return expression;
}
}  // namespace stretto::engine
