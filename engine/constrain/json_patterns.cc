#include "engine/constrain/json_patterns.h"

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_schema.h"
#include "engine/constrain/regex.h"

namespace stretto::engine {
namespace {
PatternPtr StringChar() {
  return KnownRegex(
      "[^\"\\\\\\x00-\\x1F]|\\\\(?:[\"\\\\/bfnrt]|u(?:[0-9A-CE-Fa-ce-f][0-9A-Fa-f]{3}|[Dd][0-7]"
      "[0-9A-Fa-f]{2}))");
}
}  // namespace

PatternPtr KnownRegex(absl::string_view regex) {
  auto pattern = ParseRegex(regex, RegexMatch::kWhole);
  STRETTO_CHECK_MSG(pattern.ok(), std::string(pattern.status().message()).c_str());
  return *std::move(pattern);
}

PatternPtr Comma() { return KnownRegex(", ?"); }
PatternPtr Colon() { return KnownRegex(": ?"); }
PatternPtr Nothing() { return Alternate({}); }
PatternPtr Null() { return Literal("null"); }
PatternPtr Boolean() { return Alternate({Literal("true"), Literal("false")}); }
PatternPtr Quoted(PatternPtr inside) {
  return Concat({Literal("\""), std::move(inside), Literal("\"")});
}
PatternPtr AnyString(int32_t min, int32_t max) { return Quoted(Repeat(StringChar(), min, max)); }

PatternPtr ArrayOf(PatternPtr item, int32_t min, int32_t max) {
  return Concat({Literal("["), Separated(std::move(item), Comma(), min, max), Literal("]")});
}
PatternPtr MapOf(PatternPtr name, PatternPtr value, int32_t min, int32_t max) {
  PatternPtr member = Concat({std::move(name), Colon(), std::move(value)});
  return Concat({Literal("{"), Separated(std::move(member), Comma(), min, max), Literal("}")});
}
PatternPtr AnyValue(int depth) {
  std::vector<PatternPtr> kinds{AnyString(0, -1), AnyNumber(), Boolean(), Null()};
  if (depth > 0) {
    const PatternPtr inner = AnyValue(depth - 1);
    kinds.push_back(ArrayOf(inner, 0, -1));
    kinds.push_back(MapOf(AnyString(0, -1), inner, 0, -1));
  }
  return Alternate(std::move(kinds));
}
PatternPtr AnyJsonObject() { return MapOf(AnyString(0, -1), AnyValue(kAnyValueDepth), 0, -1); }
}  // namespace stretto::engine
