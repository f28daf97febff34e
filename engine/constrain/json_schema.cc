#include "engine/constrain/json_schema.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_strings.h"
#include "engine/constrain/lengths.h"
#include "engine/constrain/regex.h"
#include "engine/constrain/schema_exclusion.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr int32_t kMaxCount = kMaxSchemaCount;
constexpr int32_t kMaxDivisor = 500;
constexpr int kMaxJsonDepth = 200;  // of the schema's own text

const std::set<std::string>& Annotations() {
  static const auto* names = new std::set<std::string>{
      "title",    "description", "default",  "examples",  "$schema", "$id",
      "$comment", "deprecated",  "readOnly", "writeOnly", "$defs",   "definitions"};
  return *names;
}

// A pattern of this file's own.
PatternPtr Known(absl::string_view regex) {
  auto pattern = ParseRegex(regex, RegexMatch::kWhole);
  STRETTO_CHECK_MSG(pattern.ok(), std::string(pattern.status().message()).c_str());
  return *std::move(pattern);
}

PatternPtr Comma() { return Known(", ?"); }
PatternPtr Colon() { return Known(": ?"); }
PatternPtr Nothing() { return Alternate({}); }
PatternPtr Null() { return Literal("null"); }
PatternPtr Boolean() { return Alternate({Literal("true"), Literal("false")}); }
PatternPtr Quoted(PatternPtr inside) {
  return Concat({Literal("\""), std::move(inside), Literal("\"")});
}
// Any character of a string, also written as an escape; no lone surrogates.
PatternPtr StringChar() {
  return Known(
      "[^\"\\\\\\x00-\\x1F]|\\\\(?:[\"\\\\/bfnrt]|u(?:[0-9A-CE-Fa-ce-f][0-9A-Fa-f]{3}|[Dd][0-7]"
      "[0-9A-Fa-f]{2}))");
}
PatternPtr String(int32_t min, int32_t max) { return Quoted(Repeat(StringChar(), min, max)); }

PatternPtr ArrayOf(PatternPtr item, int32_t min, int32_t max) {
  return Concat({Literal("["), Separated(std::move(item), Comma(), min, max), Literal("]")});
}
PatternPtr MapOf(PatternPtr value) {
  PatternPtr member = Concat({String(0, -1), Colon(), std::move(value)});
  return Concat({Literal("{"), Separated(std::move(member), Comma(), 0, -1), Literal("}")});
}
// A value with up to `depth` objects and lists within one another.
PatternPtr AnyValue(int depth) {
  std::vector<PatternPtr> kinds{String(0, -1), AnyNumber(), Boolean(), Null()};
  if (depth > 0) {
    const PatternPtr inner = AnyValue(depth - 1);
    kinds.push_back(ArrayOf(inner, 0, -1));
    kinds.push_back(MapOf(inner));
  }
  return Alternate(std::move(kinds));
}

class SchemaParser {
 public:
  SchemaParser(const Json& root, int max_nesting)
      : root_(root), max_nesting_(max_nesting), exclusion_(root, &strings_) {}
  bool is_recursive() const { return is_recursive_; }

  absl::StatusOr<PatternPtr> ParseRoot() {
    ++nesting_["#"];
    return Parse(root_, "#", /*depth=*/0);
  }

 private:
  // `where` is a JSON pointer, for messages.
  absl::StatusOr<PatternPtr> Parse(const Json& schema, const std::string& where, int depth) {
    if (depth > kMaxSchemaDepth) {
      return Error(where, "is nested too deeply");
    }
    if (++num_schemas_ > kMaxSchemas) return Error(where, "the schema is too large");
    if (schema == true) return AnyValue(kAnyValueDepth);
    if (!schema.is_object()) return Error(where, "expected a schema (an object)");
    ASSIGN_OR_RETURN(PatternPtr pattern, ParseObjectSchema(schema, where, depth));
    return Placed(std::move(pattern), where);
  }
  absl::StatusOr<PatternPtr> ParseObjectSchema(const Json& schema, const std::string& where,
                                               int depth) {
    if (schema.contains("$ref")) return ParseRef(schema, where, depth);
    if (schema.contains("const") || schema.contains("enum")) return ParseEnum(schema, where);
    if (schema.contains("anyOf")) return ParseAnyOf(schema, where, depth);
    if (schema.contains("oneOf")) return ParseOneOf(schema, where, depth);
    if (schema.contains("allOf")) return ParseAllOf(schema, where, depth);
    return ParseTypes(schema, where, depth);
  }

  static constexpr int kMaxSchemas = 5000;
  static constexpr size_t kMaxOneOf = 64;

  static absl::Status Error(const std::string& where, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
  }
  static std::string Join(const std::string& where, const std::string& key) {
    return absl::StrCat(where, "/", key);
  }
  static std::string Dump(const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  // That `schema` has no keywords but these and annotations.
  static absl::Status CheckKeywords(const Json& schema, const std::string& where,
                                    const std::set<std::string>& known) {
    for (const auto& [key, value] : schema.items()) {
      if (known.count(key) || Annotations().count(key)) continue;
      return Error(Join(where, key), "this keyword isn't supported here");
    }
    return absl::OkStatus();
  }
  static absl::StatusOr<int32_t> Count(const Json& schema, const std::string& where,
                                       const char* key, int32_t otherwise) {
    const auto it = schema.find(key);
    if (it == schema.end()) return otherwise;
    if (it->is_number_integer() && *it >= 0 && *it <= kMaxCount) return it->get<int32_t>();
    return Error(Join(where, key), absl::StrCat("expected an integer from 0 to ", kMaxCount));
  }

  // A schema within itself is written out up to `max_nesting_` times; a value that would have to be
  // nested deeper can't be written.
  absl::StatusOr<PatternPtr> ParseRef(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"$ref"}));
    const Json& ref = schema["$ref"];
    const std::string path = ref.is_string() ? ref.get<std::string>() : "";
    const Json* target = FindRef(root_, path);
    if (target == nullptr) {
      return Error(Join(where, "$ref"),
                   absl::StrCat("there is no ", Dump(ref), " (expected # or #/$defs/NAME)"));
    }
    int& nesting = nesting_[path];
    is_recursive_ |= nesting > 0;
    if (nesting > max_nesting_) return Nothing();
    ++nesting;
    auto pattern = Parse(*target, path, depth + 1);
    --nesting_[path];
    return pattern;
  }

  absl::StatusOr<PatternPtr> ParseEnum(const Json& schema, const std::string& where) {
    const bool is_const = schema.contains("const");
    RETURN_IF_ERROR(CheckKeywords(schema, where, {is_const ? "const" : "enum", "type"}));
    const Json values = is_const ? Json::array({schema["const"]}) : schema["enum"];
    if (!values.is_array() || values.empty()) {
      return Error(Join(where, "enum"), "expected a list of at least one value");
    }
    std::vector<PatternPtr> parts;
    for (const Json& value : values) {
      if (HasType(value, schema)) parts.push_back(Literal(Dump(value)));
    }
    if (parts.empty()) return Error(where, "no value of the enum has the type");
    return Alternate(std::move(parts));
  }
  absl::StatusOr<std::vector<PatternPtr>> ParseAlternatives(const Json& schema,
                                                            const std::string& key,
                                                            const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {key}));
    const Json& list = schema[key];
    const std::string here = Join(where, key);
    if (!list.is_array() || list.empty()) return Error(here, "expected a list of schemas");
    std::vector<PatternPtr> parts;
    for (size_t i = 0; i < list.size(); ++i) {
      ASSIGN_OR_RETURN(PatternPtr part, Parse(list[i], Join(here, absl::StrCat(i)), depth + 1));
      parts.push_back(std::move(part));
    }
    return parts;
  }

  absl::StatusOr<PatternPtr> ParseAnyOf(const Json& schema, const std::string& where, int depth) {
    ASSIGN_OR_RETURN(auto parts, ParseAlternatives(schema, "anyOf", where, depth));
    return Alternate(std::move(parts));
  }

  // Of alternatives that exclude each other the same as anyOf. From strings that don't, what others
  // may match is taken away.
  absl::StatusOr<PatternPtr> ParseOneOf(const Json& schema, const std::string& where, int depth) {
    ASSIGN_OR_RETURN(auto parts, ParseAlternatives(schema, "oneOf", where, depth));
    const Json& list = schema["oneOf"];
    const std::string here = Join(where, "oneOf");
    if (list.size() > kMaxOneOf) {
      return Error(here, absl::StrCat("expected up to ", kMaxOneOf, " alternatives"));
    }
    std::vector<std::vector<size_t>> overlaps(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      for (size_t j = i + 1; j < list.size(); ++j) {
        if (exclusion_.AreExclusive(list[i], list[j])) continue;
        if (!IsString(list[i]) || !IsString(list[j])) {
          return Error(here, absl::StrCat("alternatives ", i, " and ", j,
                                          " can't be told apart: let them differ in type, or in "
                                          "the const of a property that both require"));
        }
        overlaps[i].push_back(j);
        overlaps[j].push_back(i);
      }
    }
    for (size_t i = 0; i < list.size(); ++i) {
      if (overlaps[i].empty()) continue;
      ASSIGN_OR_RETURN(parts[i], StringsOfOne(list, i, overlaps[i], here));
    }
    return Alternate(std::move(parts));
  }
  bool IsString(const Json& schema) const {
    const Json& resolved = exclusion_.Resolve(schema);
    return resolved.is_object() && resolved.contains("type") && resolved["type"] == "string" &&
           !resolved.contains("enum") && !resolved.contains("const");
  }
  absl::StatusOr<PatternPtr> StringsOfOne(const Json& list, size_t i,
                                          const std::vector<size_t>& others,
                                          const std::string& here) {
    using Format = StringAutomata::Format;
    auto left = strings_.Of(exclusion_.Resolve(list[i]), Format::kApply);
    for (const size_t j : others) {
      if (!left.ok()) break;
      auto other = strings_.Of(exclusion_.Resolve(list[j]), Format::kIgnore);
      left = other.ok() ? strings_.Subtract(**left, **other) : other.status();
    }
    if (absl::IsNotFound(left.status())) return Nothing();
    if (!left.ok()) return Error(Join(here, absl::StrCat(i)), left.status().message());
    return Quoted(JsonTextMatches(*std::move(left)));
  }

  // Only of one schema, as generators of schemas write it.
  absl::StatusOr<PatternPtr> ParseAllOf(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"allOf"}));
    const Json& list = schema["allOf"];
    const std::string here = Join(where, "allOf");
    if (!list.is_array() || list.size() != 1) return Error(here, "expected a list of one schema");
    return Parse(list[0], Join(here, "0"), depth + 1);
  }

  absl::StatusOr<PatternPtr> ParseTypes(const Json& schema, const std::string& where, int depth) {
    const auto it = schema.find("type");
    if (it == schema.end()) return ParseUntyped(schema, where, depth);
    if (it->is_string()) return ParseType(it->get<std::string>(), schema, where, depth);
    const std::string here = Join(where, "type");
    if (!it->is_array() || it->empty()) return Error(here, "expected a type or a list of types");
    RETURN_IF_ERROR(CheckKeywords(schema, where, AllKeywords()));
    std::vector<PatternPtr> parts;
    for (const Json& type : *it) {
      if (!type.is_string()) return Error(here, "expected a type or a list of types");
      Json one = schema;
      const auto name = type.get<std::string>();
      // Keywords of other types say nothing about this one.
      for (const std::string& keyword : AllKeywords()) {
        if (keyword != "type" && !KeywordsOf(name).count(keyword)) one.erase(keyword);
      }
      ASSIGN_OR_RETURN(PatternPtr part, ParseType(name, one, where, depth));
      parts.push_back(std::move(part));
    }
    return Alternate(std::move(parts));
  }

  absl::StatusOr<PatternPtr> ParseUntyped(const Json& schema, const std::string& where, int depth) {
    for (const char* type : {"object", "array", "string", "integer", "number"}) {
      for (const std::string& keyword : KeywordsOf(type)) {
        if (keyword != "type" && schema.contains(keyword)) {
          return Error(where, absl::StrCat("'", keyword, "' needs \"type\": \"", type, "\""));
        }
      }
    }
    RETURN_IF_ERROR(CheckKeywords(schema, where, {}));
    (void)depth;
    return AnyValue(kAnyValueDepth);
  }

  static std::set<std::string> KeywordsOf(const std::string& type) {
    if (type == "object") return {"type", "properties", "required", "additionalProperties"};
    if (type == "array") return {"type", "items", "minItems", "maxItems"};
    if (type == "string") return {"type", "minLength", "maxLength", "pattern", "format"};
    if (type == "integer" || type == "number") {
      return {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
    }
    return {"type"};
  }
  static std::set<std::string> AllKeywords() {
    std::set<std::string> all;
    for (const char* type : {"object", "array", "string", "integer", "number"})
      all.merge(KeywordsOf(type));
    return all;
  }

  absl::StatusOr<PatternPtr> ParseType(const std::string& type, const Json& schema,
                                       const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, KeywordsOf(type)));
    if (type == "null") return Null();
    if (type == "boolean") return Boolean();
    if (type == "integer") return ParseInteger(schema, where);
    if (type == "number") return ParseNumber(schema, where);
    if (type == "string") return ParseString(schema, where);
    if (type == "array") return ParseArray(schema, where, depth);
    if (type == "object") return ParseObject(schema, where, depth);
    return Error(Join(where, "type"), "unknown type");
  }

  absl::StatusOr<PatternPtr> ParseInteger(const Json& schema, const std::string& where) {
    int64_t low = -kMaxInteger, high = kMaxInteger;
    bool any = false;
    for (const auto& [key, value] : schema.items()) {
      if (key == "type" || key == "multipleOf" || Annotations().count(key)) continue;
      any = true;
      // A comparison of an unsigned value with a negative one would wrap around.
      const bool large =
          value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kMaxInteger);
      if (!value.is_number_integer() || large || value.get<int64_t>() < -kMaxInteger ||
          value.get<int64_t>() > kMaxInteger) {
        return Error(Join(where, key),
                     absl::StrCat("expected an integer of at most ", kMaxIntegerDigits, " digits"));
      }
      const auto bound = value.get<int64_t>();
      if (key == "minimum") low = std::max(low, bound);
      if (key == "exclusiveMinimum") low = std::max(low, bound + 1);
      if (key == "maximum") high = std::min(high, bound);
      if (key == "exclusiveMaximum") high = std::min(high, bound - 1);
    }
    if (low > high) return Error(where, "the minimum is above the maximum");
    PatternPtr integers = any ? IntegersBetween(low, high) : AnyInteger();
    return schema.contains("multipleOf") ? ParseMultiples(schema, std::move(integers), where)
                                         : integers;
  }

  absl::StatusOr<PatternPtr> ParseMultiples(const Json& schema, PatternPtr integers,
                                            const std::string& where) {
    const Json& divisor = schema["multipleOf"];
    const std::string here = Join(where, "multipleOf");
    if (!divisor.is_number_integer() || divisor < 1 || divisor > kMaxDivisor) {
      return Error(here, absl::StrCat("expected an integer from 1 to ", kMaxDivisor));
    }
    auto automaton = strings_.Compile(integers);
    if (automaton.ok()) {
      const Automaton multiples = Automaton::MultiplesOf(divisor.get<int32_t>());
      automaton = strings_.Intersect(**automaton, multiples);
    }
    if (!automaton.ok()) return Error(here, automaton.status().message());
    return Matches(*std::move(automaton));
  }

  absl::StatusOr<PatternPtr> ParseNumber(const Json& schema, const std::string& where) {
    if (schema.contains("multipleOf")) {
      return Error(Join(where, "multipleOf"), "is supported of integers only");
    }
    bool any = false;
    for (const auto& [key, value] : schema.items()) {
      if (key == "type" || Annotations().count(key)) continue;
      any = true;
      if (!value.is_number()) return Error(Join(where, key), "expected a number");
    }
    if (!any) return AnyNumber();
    const NumberBounds bounds = BoundsOf(schema);
    auto numbers = NumbersBetween(bounds.low, bounds.high);
    if (!numbers.ok()) return Error(where, numbers.status().message());
    return numbers;
  }

  absl::StatusOr<PatternPtr> ParseString(const Json& schema, const std::string& where) {
    ASSIGN_OR_RETURN(const int32_t min, Count(schema, where, "minLength", 0));
    ASSIGN_OR_RETURN(const int32_t max, Count(schema, where, "maxLength", -1));
    const bool has_length = schema.contains("minLength") || schema.contains("maxLength");
    if (max >= 0 && max < min) return Error(where, "maxLength is less than minLength");
    const bool has_pattern = schema.contains("pattern"), has_format = schema.contains("format");
    if (has_format && (!schema["format"].is_string() ||
                       FormatExpression(schema["format"].get<std::string>()).empty())) {
      return Error(Join(where, "format"),
                   "only date, time, date-time, uuid, email and ipv4 are supported");
    }
    const std::string here = Join(where, "pattern");
    if (has_pattern && !schema["pattern"].is_string()) {
      return Error(here, "expected a regular expression");
    }
    if (!has_pattern && !has_format) return String(min, max);
    if (has_pattern) {
      auto inside = ParseRegex(schema["pattern"].get<std::string>(), RegexMatch::kSearch,
                               RegexText::kJsonString);
      if (!inside.ok()) return Error(here, inside.status().message());
      if (!has_format && !has_length) return Quoted(*std::move(inside));
    } else if (!has_length) {
      return Quoted(Known(FormatExpression(schema["format"].get<std::string>())));
    }
    auto automaton = strings_.WithoutLength(schema);
    if (!automaton.ok()) return Error(where, automaton.status().message());
    auto lengths = LengthLimits::Of(**automaton, min, max);
    if (lengths == nullptr) return Error(where, "takes too long to build: limit its length less");
    if (!lengths->IsPossible((*automaton)->start(), 0)) {
      return Error(where, "no text obeys length, pattern and format together");
    }
    return Quoted(JsonTextMatches(*std::move(automaton), std::move(lengths)));
  }

  absl::StatusOr<PatternPtr> ParseArray(const Json& schema, const std::string& where, int depth) {
    ASSIGN_OR_RETURN(const int32_t min, Count(schema, where, "minItems", 0));
    ASSIGN_OR_RETURN(const int32_t max, Count(schema, where, "maxItems", -1));
    if (max >= 0 && max < min) return Error(where, "maxItems is less than minItems");
    if (!schema.contains("items")) return ArrayOf(AnyValue(kAnyValueDepth), min, max);
    ASSIGN_OR_RETURN(PatternPtr item, Parse(schema["items"], Join(where, "items"), depth + 1));
    return ArrayOf(std::move(item), min, max);
  }

  absl::StatusOr<PatternPtr> ParseObject(const Json& schema, const std::string& where, int depth) {
    static const Json kNone = Json::object(), kNobody = Json::array();
    const Json& properties = schema.contains("properties") ? schema["properties"] : kNone;
    const Json& required = schema.contains("required") ? schema["required"] : kNobody;
    if (!properties.is_object()) return Error(Join(where, "properties"), "expected an object");
    if (!required.is_array()) return Error(Join(where, "required"), "expected a list of names");
    std::set<std::string> names;
    for (const Json& name : required) {
      if (!name.is_string() || !properties.contains(name.get<std::string>())) {
        return Error(Join(where, "required"),
                     absl::StrCat(Dump(name), " isn't among the properties"));
      }
      names.insert(name.get<std::string>());
    }
    if (properties.empty()) return ParseMap(schema, where, depth);
    if (schema.contains("additionalProperties")) {
      const Json& more = schema["additionalProperties"];
      if (!more.is_boolean() && !more.is_object()) {
        return Error(Join(where, "additionalProperties"), "expected false, true or a schema");
      }
    }
    std::vector<PatternPtr> members;
    std::vector<bool> is_required;
    for (const auto& [name, value] : properties.items()) {
      ASSIGN_OR_RETURN(PatternPtr pattern,
                       Parse(value, Join(Join(where, "properties"), name), depth + 1));
      members.push_back(Concat({Literal(Dump(Json(name))), Colon(), std::move(pattern)}));
      is_required.push_back(names.count(name) > 0);
    }
    return Concat(
        {Literal("{"), List(Comma(), std::move(members), std::move(is_required)), Literal("}")});
  }

  // An object without `properties`: any members, with values of additionalProperties.
  absl::StatusOr<PatternPtr> ParseMap(const Json& schema, const std::string& where, int depth) {
    const auto it = schema.find("additionalProperties");
    if (it == schema.end() || *it == true) {
      // An empty `properties` names none, and then there are none.
      if (schema.contains("properties")) return Literal("{}");
      return MapOf(AnyValue(kAnyValueDepth));
    }
    if (*it == false) return Literal("{}");
    ASSIGN_OR_RETURN(PatternPtr value, Parse(*it, Join(where, "additionalProperties"), depth + 1));
    return MapOf(std::move(value));
  }

  const Json& root_;
  const int max_nesting_;
  std::map<std::string, int> nesting_;  // by $ref: how often what is parsed now is inside of it
  bool is_recursive_ = false;
  StringAutomata strings_;
  SchemaExclusion exclusion_;
  int num_schemas_ = 0;
};

// Whether brackets outside of strings are nested deeper than `max_depth`. What reads the text later
// calls itself for each.
bool IsDeeper(absl::string_view json, int max_depth) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if ((c == '{' || c == '[') && ++depth > max_depth) return true;
    if (c == '}' || c == ']') --depth;
  }
  return false;
}
}  // namespace

PatternPtr AnyJsonObject() { return MapOf(AnyValue(kAnyValueDepth)); }

absl::StatusOr<PatternPtr> ParseJsonSchema(absl::string_view schema, int max_nesting,
                                           bool* is_recursive) {
  if (schema.size() > kMaxSchemaBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schema has ", schema.size(), " bytes: expected up to ", kMaxSchemaBytes));
  }
  if (IsDeeper(schema, kMaxJsonDepth)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schema's JSON is nested more than ", kMaxJsonDepth, " levels deep"));
  }
  Json root;
  try {
    root = Json::parse(schema);
  } catch (const Json::exception& e) {
    const std::string what = e.what();
    const size_t begin = what.find("] ");
    return absl::InvalidArgumentError(absl::StrCat(
        "the schema isn't JSON: ", begin == std::string::npos ? what : what.substr(begin + 2)));
  }
  SchemaParser parser(root, max_nesting);
  auto pattern = parser.ParseRoot();
  if (is_recursive != nullptr) *is_recursive = parser.is_recursive();
  return pattern;
}
}  // namespace stretto::engine
