#include "engine/constrain/pattern.h"

#include <algorithm>

#include "base/check.h"

namespace stretto::engine {
namespace {
constexpr char32_t kLastCodePoint = 0x10FFFF;

std::shared_ptr<Pattern> Make(Pattern::Kind kind, std::vector<PatternPtr> parts = {}) {
  auto pattern = std::make_shared<Pattern>();
  pattern->kind = kind;
  pattern->parts = std::move(parts);
  return pattern;
}

bool IsEmptyText(const PatternPtr& p) {
  return p->kind == Pattern::Kind::kConcat && p->parts.empty();
}

std::vector<uint8_t> Encode(char32_t c) {
  const auto byte = [](char32_t bits) { return static_cast<uint8_t>(bits); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xC0 | c >> 6), byte(0x80 | (c & 0x3F))};
  if (c < 0x10000) {
    return {byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F))};
  }
  return {byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 0x3F)), byte(0x80 | (c >> 6 & 0x3F)),
          byte(0x80 | (c & 0x3F))};
}
}  // namespace

void CharSet::Normalize() {
  std::sort(ranges.begin(), ranges.end());
  std::vector<std::pair<char32_t, char32_t>> merged;
  for (const auto& [first, last] : ranges) {
    if (!merged.empty() && first <= merged.back().second + 1) {
      merged.back().second = std::max(merged.back().second, last);
    } else {
      merged.emplace_back(first, last);
    }
  }
  ranges.clear();
  for (const auto& [first, last] : merged) {
    if (first < 0xD800) ranges.emplace_back(first, std::min<char32_t>(last, 0xD7FF));
    if (last > 0xDFFF) ranges.emplace_back(std::max<char32_t>(first, 0xE000), last);
  }
}

CharSet CharSet::Negated() const {
  CharSet result;
  char32_t next = 0;
  for (const auto& [first, last] : ranges) {
    if (first > next) result.Add(next, first - 1);
    next = last + 1;
  }
  if (next <= kLastCodePoint) result.Add(next, kLastCodePoint);
  result.Normalize();
  return result;
}

PatternPtr EmptyText() { return Make(Pattern::Kind::kConcat); }

PatternPtr Literal(absl::string_view bytes) {
  std::vector<PatternPtr> parts;
  for (const char c : bytes) {
    auto byte = Make(Pattern::Kind::kBytes);
    byte->first = byte->last = static_cast<uint8_t>(c);
    parts.push_back(std::move(byte));
  }
  return Concat(std::move(parts));
}

PatternPtr Chars(CharSet set) {
  auto pattern = Make(Pattern::Kind::kChars);
  pattern->chars = std::move(set);
  return pattern;
}

std::string JsonEscape(char32_t c) {
  switch (c) {
    case '"':
      return "\\\"";
    case '\\':
      return "\\\\";
    case '\b':
      return "\\b";
    case '\f':
      return "\\f";
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default: {
      if (c >= 0x20) return "";
      constexpr char kDigits[] = "0123456789abcdef";
      return std::string("\\u00") + kDigits[c >> 4] + kDigits[c & 15];
    }
  }
}

PatternPtr JsonChars(const CharSet& set) {
  CharSet plain;
  std::vector<PatternPtr> parts;
  for (const auto& [first, last] : set.ranges) {
    for (char32_t c = first; c <= std::min<char32_t>(last, 0x7F); ++c) {
      const std::string escape = JsonEscape(c);
      if (escape.empty()) {
        plain.Add(c, c);
      } else {
        parts.push_back(Literal(escape));
      }
    }
    if (last >= 0x80) plain.Add(std::max<char32_t>(first, 0x80), last);
  }
  plain.Normalize();
  if (!plain.ranges.empty()) parts.push_back(Chars(std::move(plain)));
  return Alternate(std::move(parts));
}

PatternPtr Matches(std::shared_ptr<const Automaton> automaton) {
  auto pattern = Make(Pattern::Kind::kAutomaton);
  pattern->automaton = std::move(automaton);
  return pattern;
}
PatternPtr JsonTextMatches(std::shared_ptr<const Automaton> automaton,
                           std::shared_ptr<const LengthLimits> lengths) {
  auto pattern = Make(Pattern::Kind::kAutomaton);
  pattern->automaton = std::move(automaton);
  pattern->lengths = std::move(lengths);
  pattern->json = true;
  return pattern;
}

PatternPtr Concat(std::vector<PatternPtr> parts) {
  parts.erase(std::remove_if(parts.begin(), parts.end(), IsEmptyText), parts.end());
  if (parts.size() == 1) return parts[0];
  return Make(Pattern::Kind::kConcat, std::move(parts));
}

PatternPtr Alternate(std::vector<PatternPtr> parts) {
  if (parts.size() == 1) return parts[0];
  return Make(Pattern::Kind::kAlternate, std::move(parts));
}

PatternPtr Repeat(PatternPtr part, int32_t min, int32_t max) {
  STRETTO_CHECK(min >= 0 && (max < 0 || max >= min));
  if (max == 0 || IsEmptyText(part)) return EmptyText();
  auto pattern = Make(Pattern::Kind::kRepeat, {std::move(part)});
  pattern->min = min;
  pattern->max = max;
  return pattern;
}

PatternPtr Optional(PatternPtr part) { return Repeat(std::move(part), 0, 1); }

PatternPtr Separated(PatternPtr item, PatternPtr separator, int32_t min, int32_t max) {
  if (max == 0) return EmptyText();
  auto list = Make(Pattern::Kind::kRepeat, {std::move(item), std::move(separator)});
  list->min = std::max(min, 1);
  list->max = max;
  return min == 0 ? Optional(std::move(list)) : list;
}

PatternPtr Placed(PatternPtr part, std::string where) {
  auto pattern = Make(Pattern::Kind::kConcat, {std::move(part)});
  pattern->where = std::move(where);
  return pattern;
}

PatternPtr List(PatternPtr separator, std::vector<PatternPtr> items, std::vector<bool> required) {
  STRETTO_CHECK(items.size() == required.size());
  items.insert(items.begin(), std::move(separator));
  auto pattern = Make(Pattern::Kind::kList, std::move(items));
  pattern->required = std::move(required);
  return pattern;
}

// Cuts the range where the number of bytes changes, and then where a trailing part of the bytes
// doesn't run through all of its values.
std::vector<std::vector<ByteRange>> Utf8Ranges(char32_t first, char32_t last) {
  for (const char32_t limit : {0x7F, 0x7FF, 0xFFFF}) {
    if (first > limit || last <= limit) continue;
    auto ranges = Utf8Ranges(first, limit);
    for (auto& range : Utf8Ranges(limit + 1, last)) ranges.push_back(std::move(range));
    return ranges;
  }
  const std::vector<uint8_t> low = Encode(first), high = Encode(last);
  for (size_t tail = 1; tail < low.size(); ++tail) {
    const char32_t mask = (char32_t{1} << (6 * tail)) - 1;
    if ((first & ~mask) == (last & ~mask)) continue;
    char32_t cut = 0;  // the last of the first part
    if ((first & mask) != 0) {
      cut = first | mask;
    } else if ((last & mask) != mask) {
      cut = (last & ~mask) - 1;
    } else {
      continue;
    }
    auto ranges = Utf8Ranges(first, cut);
    for (auto& range : Utf8Ranges(cut + 1, last)) ranges.push_back(std::move(range));
    return ranges;
  }
  std::vector<ByteRange> bytes;
  for (size_t i = 0; i < low.size(); ++i) bytes.emplace_back(low[i], high[i]);
  return {bytes};
}
}  // namespace stretto::engine
