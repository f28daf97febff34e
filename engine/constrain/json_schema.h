// JSON Schemas as patterns: the texts that a schema allows, in one canonical form each.
//
// Read: type (one or a list of string, number, integer, boolean, null, object, array), enum, const,
// anyOf, allOf (of one schema), properties, required, additionalProperties, items, minItems,
// maxItems, minLength, maxLength, minimum and maximum of integers (exclusive ones too), pattern,
// format (date, time, date-time, uuid), $ref into $defs or definitions (not recursive). Annotations
// (title, description, default, examples, $schema, …) change nothing. Anything else is
// InvalidArgument that names keyword and place: a keyword that were passed over would promise what
// isn't kept.
//
// What is written is narrower than what the schema allows, so it always validates:
//  - properties stand in the order of the schema, each once; an object with `properties` has no
//    others, whatever additionalProperties says;
//  - one space or none after ':' and ','; no other white space;
//  - numbers have up to 16 digits before and after the point and an exponent of up to 2 digits;
//  - a value of any type, where the schema says nothing, is nested up to kAnyValueDepth deep.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/constrain/pattern.h"

namespace stretto::engine {
inline constexpr size_t kMaxSchemaBytes = 64 << 10;
inline constexpr int kMaxSchemaDepth = 32;  // schemas within schemas, $ref included
inline constexpr int kAnyValueDepth = 3;

absl::StatusOr<PatternPtr> ParseJsonSchema(absl::string_view schema);
// Any JSON object.
PatternPtr AnyJsonObject();
}  // namespace stretto::engine
