#include "engine/constrain/schema_scalars.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/json_keys.h"
#include "base/status.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_patterns.h"
#include "engine/constrain/lengths.h"
#include "engine/constrain/regex.h"
#include "engine/constrain/schema_exclusion.h"
#include "engine/constrain/schema_multiples.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;

std::string TextOf(const Json& json) { return json.is_string() ? json.get<std::string>() : ""; }

// What OpenAPI and generators of schemas from typed languages say about an integer.
struct IntegerFormat {
  const char* name;
  int64_t low, high;
};
const std::vector<IntegerFormat>& IntegerFormats() {
  static const auto* formats = new std::vector<IntegerFormat>{{"int8", -128, 127},
                                                              {"int16", -32768, 32767},
                                                              {"int32", INT32_MIN, INT32_MAX},
                                                              {"int64", -kMaxInteger, kMaxInteger},
                                                              {"uint8", 0, 255},
                                                              {"uint16", 0, 65535},
                                                              {"uint32", 0, UINT32_MAX},
                                                              {"uint64", 0, kMaxInteger}};
  return *formats;
}
const IntegerFormat* FindIntegerFormat(const Json& name) {
  for (const IntegerFormat& format : IntegerFormats()) {
    if (TextOf(name) == format.name) return &format;
  }
  return nullptr;
}
std::string IntegerFormatNames() {
  return absl::StrJoin(IntegerFormats(), ", ", [](std::string* out, const IntegerFormat& format) {
    absl::StrAppend(out, format.name);
  });
}
// Of numbers; what is written has digits that any of them can have.
const std::set<std::string>& NumberFormats() {
  static const auto* names = new std::set<std::string>{"float", "double", "time-delta"};
  return *names;
}
}  // namespace

absl::Status SchemaError(const std::string& where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
}
std::string JoinPointer(const std::string& where, const std::string& key) {
  return JoinJsonPointer(where, key);
}

absl::StatusOr<int32_t> SchemaCount(const Json& schema, const std::string& where, const char* key,
                                    int32_t otherwise) {
  const auto it = schema.find(key);
  if (it == schema.end()) return otherwise;
  if (it->is_number_integer() && *it >= 0 && *it <= kMaxSchemaCount) return it->get<int32_t>();
  return SchemaError(JoinPointer(where, key),
                     absl::StrCat("expected an integer from 0 to ", kMaxSchemaCount));
}

bool IsNumberFormat(const Json& format) {
  return FindIntegerFormat(format) != nullptr || NumberFormats().count(TextOf(format)) > 0;
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseInteger(const Json& schema,
                                                       const std::string& where) {
  int64_t low = -kMaxInteger, high = kMaxInteger;
  bool any = false;
  for (const char* key : {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}) {
    const auto value = schema.find(key);
    if (value == schema.end()) continue;
    any = true;
    // A comparison of an unsigned value with a negative one would wrap around.
    const bool large =
        value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(kMaxInteger);
    if (!value->is_number_integer() || large || value->get<int64_t>() < -kMaxInteger ||
        value->get<int64_t>() > kMaxInteger) {
      return SchemaError(JoinPointer(where, key), absl::StrCat("expected an integer of at most ",
                                                               kMaxIntegerDigits, " digits"));
    }
    const auto bound = value->get<int64_t>();
    if (key == absl::string_view("minimum")) low = std::max(low, bound);
    if (key == absl::string_view("exclusiveMinimum")) low = std::max(low, bound + 1);
    if (key == absl::string_view("maximum")) high = std::min(high, bound);
    if (key == absl::string_view("exclusiveMaximum")) high = std::min(high, bound - 1);
  }
  if (schema.contains("format")) {
    const IntegerFormat* format = FindIntegerFormat(schema["format"]);
    if (format == nullptr) {
      return SchemaError(JoinPointer(where, "format"),
                         "of integers: expected " + IntegerFormatNames());
    }
    any = true;
    low = std::max(low, format->low);
    high = std::min(high, format->high);
  }
  if (low > high) return SchemaError(where, "the minimum is above the maximum");
  PatternPtr integers = any ? IntegersBetween(low, high) : AnyInteger();
  if (!schema.contains("multipleOf")) return integers;
  if (!schema["multipleOf"].is_number_integer()) {
    return SchemaError(JoinPointer(where, "multipleOf"), "of integers: expected an integer");
  }
  return ParseMultiples(schema, integers, where);
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseMultiples(const Json& schema,
                                                         const PatternPtr& numbers,
                                                         const std::string& where) {
  auto multiples = MultiplesAmong(numbers, schema["multipleOf"].dump(), &strings_);
  if (absl::IsNotFound(multiples.status())) {
    return SchemaError(JoinPointer(where, "multipleOf"), "no multiple lies between the bounds");
  }
  if (!multiples.ok()) {
    return SchemaError(JoinPointer(where, "multipleOf"), multiples.status().message());
  }
  return multiples;
}

absl::StatusOr<PatternPtr> SchemaScalars::ParseNumber(const Json& schema,
                                                      const std::string& where) {
  bool any = false;
  for (const char* key : {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}) {
    if (!schema.contains(key)) continue;
    any = true;
    if (!schema[key].is_number()) return SchemaError(JoinPointer(where, key), "expected a number");
  }
  if (schema.contains("format") && NumberFormats().count(TextOf(schema["format"])) == 0) {
    return SchemaError(JoinPointer(where, "format"),
                       "of numbers: expected " + absl::StrJoin(NumberFormats(), ", "));
  }
  const auto divisor = schema.find("multipleOf");
  if (divisor == schema.end() && !any) return AnyNumber();
  int digits = kMinFractionDigits;
  if (divisor != schema.end()) {
    if (!divisor->is_number()) {
      return SchemaError(JoinPointer(where, "multipleOf"), "expected a number");
    }
    digits = std::max(1, FractionDigitsOf(divisor->dump()));
  }
  if (!any) return ParseMultiples(schema, DecimalsOf(digits), where);
  const NumberBounds bounds = BoundsOf(schema);
  auto numbers = NumbersBetween(bounds.low, bounds.high, digits);
  if (!numbers.ok()) return SchemaError(where, numbers.status().message());
  return divisor == schema.end() ? numbers : ParseMultiples(schema, *numbers, where);
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
