// The pieces of JSON's syntax that schemas are written with, in one canonical form each.
#pragma once

#include "absl/strings/string_view.h"
#include "engine/constrain/pattern.h"

namespace stretto::engine {
// Of an expression of this project's own.
PatternPtr KnownRegex(absl::string_view regex);

PatternPtr Comma();
PatternPtr Colon();
PatternPtr Nothing();  // not even the empty text
PatternPtr Null();
PatternPtr Boolean();
PatternPtr Quoted(PatternPtr inside);
// Any string of min to max characters, also escaped ones; no lone surrogates.
PatternPtr AnyString(int32_t min, int32_t max);
PatternPtr ArrayOf(PatternPtr item, int32_t min, int32_t max);
// `min` is 0 or 1: a name may come twice, and counts once.
PatternPtr MapOf(PatternPtr name, PatternPtr value, int32_t min, int32_t max);
// A value with up to `depth` objects and lists within one another.
PatternPtr AnyValue(int depth);
// Any JSON object.
PatternPtr AnyJsonObject();
}  // namespace stretto::engine
