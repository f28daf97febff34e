#include "engine/constrain/schema_scalars.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_patterns.h"
#include "engine/constrain/lengths.h"
#include "engine/constrain/regex.h"
#include "engine/constrain/schema_exclusion.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr int32_t kMaxDivisor = 500;
}  // namespace

absl::Status SchemaError(const std::string& where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
}
std::string JoinPointer(const std::string& where, const std::string& key) {
  return absl::StrCat(where, "/", key);
}

const std::set<std::string>& SchemaAnnotations() {
  // The last three: what a string's text holds, and OpenAPI's hint which alternative is meant.
  static const auto* names = new std::set<std::string>{
      "title", "description", "default",          "examples",        "$schema",
      "$id",   "$comment",    "deprecated",       "readOnly",        "writeOnly",
      "$defs", "definitions", "contentMediaType", "contentEncoding", "discriminator"};
  return *names;
}

absl::StatusOr<int32_t> SchemaCount(const Json& schema, const std::string& where, const char* key,
                                    int32_t otherwise) {
  const auto it = schema.find(key);
  if (it == schema.end()) return otherwise;
  if (it->is_number_integer() && *it >= 0 && *it <= kMaxSchemaCount) return it->get<int32_t>();
  return SchemaError(JoinPointer(where, key),
                     absl::StrCat("expected an integer from 0 to ", kMaxSchemaCount));
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseInteger(const Json& schema,
                                                       const std::string& where) {
  int64_t low = -kMaxInteger, high = kMaxInteger;
  bool any = false;
  for (const auto& [key, value] : schema.items()) {
    if (key == "type" || key == "multipleOf" || SchemaAnnotations().count(key)) continue;
    any = true;
    // A comparison of an unsigned value with a negative one would wrap around.
    const bool large =
        value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kMaxInteger);
    if (!value.is_number_integer() || large || value.get<int64_t>() < -kMaxInteger ||
        value.get<int64_t>() > kMaxInteger) {
      return SchemaError(JoinPointer(where, key), absl::StrCat("expected an integer of at most ",
                                                               kMaxIntegerDigits, " digits"));
    }
    const auto bound = value.get<int64_t>();
    if (key == "minimum") low = std::max(low, bound);
    if (key == "exclusiveMinimum") low = std::max(low, bound + 1);
    if (key == "maximum") high = std::min(high, bound);
    if (key == "exclusiveMaximum") high = std::min(high, bound - 1);
  }
  if (low > high) return SchemaError(where, "the minimum is above the maximum");
  PatternPtr integers = any ? IntegersBetween(low, high) : AnyInteger();
  return schema.contains("multipleOf") ? ParseMultiples(schema, std::move(integers), where)
                                       : integers;
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseMultiples(const Json& schema, PatternPtr integers,
                                                         const std::string& where) {
  const Json& divisor = schema["multipleOf"];
  const std::string here = JoinPointer(where, "multipleOf");
  if (!divisor.is_number_integer() || divisor < 1 || divisor > kMaxDivisor) {
    return SchemaError(here, absl::StrCat("expected an integer from 1 to ", kMaxDivisor));
  }
  auto automaton = strings_.Compile(integers);
  if (automaton.ok()) {
    const Automaton multiples = Automaton::MultiplesOf(divisor.get<int32_t>());
    automaton = strings_.Intersect(**automaton, multiples);
  }
  if (!automaton.ok()) return SchemaError(here, automaton.status().message());
  return Matches(*std::move(automaton));
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseNumber(const Json& schema,
                                                      const std::string& where) {
  if (schema.contains("multipleOf")) {
    return SchemaError(JoinPointer(where, "multipleOf"), "is supported of integers only");
  }
  bool any = false;
  for (const auto& [key, value] : schema.items()) {
    if (key == "type" || SchemaAnnotations().count(key)) continue;
    any = true;
    if (!value.is_number()) return SchemaError(JoinPointer(where, key), "expected a number");
  }
  if (!any) return AnyNumber();
  const NumberBounds bounds = BoundsOf(schema);
  auto numbers = NumbersBetween(bounds.low, bounds.high);
  if (!numbers.ok()) return SchemaError(where, numbers.status().message());
  return numbers;
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseString(const Json& schema,
                                                      const std::string& where) {
  ASSIGN_OR_RETURN(const int32_t min, SchemaCount(schema, where, "minLength", 0));
  ASSIGN_OR_RETURN(const int32_t max, SchemaCount(schema, where, "maxLength", -1));
  const bool has_length = schema.contains("minLength") || schema.contains("maxLength");
  if (max >= 0 && max < min) return SchemaError(where, "maxLength is less than minLength");
  const bool has_pattern = schema.contains("pattern");
  bool has_format = schema.contains("format");
  if (has_format) {
    const std::string format =
        schema["format"].is_string() ? schema["format"].get<std::string>() : "";
    const bool is_any = AnyTextFormats().count(format) > 0;
    if (!is_any && FormatExpression(format).empty()) {
      return SchemaError(JoinPointer(where, "format"), "expected one of " + FormatNames());
    }
    has_format = !is_any;
  }
  const std::string here = JoinPointer(where, "pattern");
  if (has_pattern && !schema["pattern"].is_string()) {
    return SchemaError(here, "expected a regular expression");
  }
  if (!has_pattern && !has_format) return AnyString(min, max);
  if (has_pattern) {
    auto inside = ParseRegex(schema["pattern"].get<std::string>(), RegexMatch::kSearch,
                             RegexText::kJsonString, &work_);
    if (!inside.ok()) return SchemaError(here, inside.status().message());
    if (!has_format && !has_length) return Quoted(*std::move(inside));
  } else if (!has_length) {
    return Quoted(KnownRegex(FormatExpression(schema["format"].get<std::string>())));
  }
  auto automaton = strings_.WithoutLength(schema);
  if (!automaton.ok()) return SchemaError(where, automaton.status().message());
  auto lengths = LengthLimits::Of(**automaton, min, max, &work_);
  if (lengths == nullptr)
    return SchemaError(where, "takes too long to build: limit its length less");
  if (!lengths->IsPossible((*automaton)->start(), 0)) {
    return SchemaError(where, "no text obeys length, pattern and format together");
  }
  return Quoted(JsonTextMatches(*std::move(automaton), std::move(lengths)));
}

}  // namespace stretto::engine
