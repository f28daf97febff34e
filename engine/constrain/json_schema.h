// JSON Schemas as patterns: the texts that a schema allows, in one canonical form each.
//
// docs/json-schema.md has the keywords. Annotations (title, description, default, examples, …)
// change nothing. Any other keyword is InvalidArgument that names it and its place: one that were
// passed over would promise what isn't kept.
//
// The alternatives of oneOf must exclude each other for certain (schema_exclusion.h); only from
// strings what others match is taken away.
//
// What is written is narrower than what the schema allows, so it always validates:
//  - properties stand in the order of the schema, each once; an object with `properties` has no
//    others, whatever additionalProperties says;
//  - one space or none after ':' and ','; no other white space;
//  - numbers have up to 16 digits before and after the point and an exponent of up to 2 digits;
//    with bounds up to 15 digits in all and no exponent;
//  - a value of any type, where the schema says nothing, is nested up to kAnyValueDepth deep;
//  - a $ref is inside of itself up to kMaxRefNesting times; where that is too large for an
//    automaton, kLeastRefNesting times.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/constrain/pattern.h"
#include "engine/constrain/work.h"

namespace stretto::engine {
inline constexpr int kMaxSchemaDepth = 64;  // schemas within schemas, $ref included
inline constexpr int kAnyValueDepth = 3;
inline constexpr int kMaxRefNesting = 5, kLeastRefNesting = 2;

// `is_recursive` says, also after an error, whether a $ref was met inside of itself; may be null.
// `work`: what is left for it, null: what one compilation may cost. Cancelled: it is.
absl::StatusOr<PatternPtr> ParseJsonSchema(absl::string_view schema,
                                           int max_nesting = kMaxRefNesting,
                                           bool* is_recursive = nullptr, Work* work = nullptr);
}  // namespace stretto::engine
