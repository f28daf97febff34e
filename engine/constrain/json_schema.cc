#include "engine/constrain/json_schema.h"

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/constrain/regex.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr int32_t kMaxCount = 10'000;  // of items and characters
constexpr int kMaxIntegerDigits = 16;
constexpr int64_t kMaxInteger = 9'999'999'999'999'999;
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
PatternPtr Null() { return Literal("null"); }
PatternPtr Boolean() { return Alternate({Literal("true"), Literal("false")}); }
PatternPtr Integer() { return Known("-?(?:0|[1-9][0-9]{0,15})"); }
PatternPtr Number() {
  return Known("-?(?:0|[1-9][0-9]{0,15})(?:\\.[0-9]{1,16})?(?:[eE][+-]?[0-9]{1,2})?");
}
// One digit of [first, last], or `count` of them.
PatternPtr DigitOf(char first, char last, size_t count = 1) {
  CharSet set;
  set.Add(static_cast<char32_t>(first), static_cast<char32_t>(last));
  return Repeat(Chars(std::move(set)), static_cast<int32_t>(count), static_cast<int32_t>(count));
}
// Numbers from `low` to `high`, two decimals of one length.
PatternPtr DigitsBetween(absl::string_view low, absl::string_view high) {
  if (low == std::string(low.size(), '0') && high == std::string(high.size(), '9')) {
    return DigitOf('0', '9', low.size());
  }
  const size_t rest = low.size() - 1;
  const auto from = [](char digit, PatternPtr more) {
    return Concat({DigitOf(digit, digit), std::move(more)});
  };
  if (low[0] == high[0]) return from(low[0], DigitsBetween(low.substr(1), high.substr(1)));
  std::vector<PatternPtr> parts{
      from(low[0], DigitsBetween(low.substr(1), std::string(rest, '9'))),
      from(high[0], DigitsBetween(std::string(rest, '0'), high.substr(1)))};
  if (low[0] + 1 < high[0]) {
    parts.push_back(Concat({DigitOf(static_cast<char>(low[0] + 1), static_cast<char>(high[0] - 1)),
                            DigitOf('0', '9', rest)}));
  }
  return Alternate(std::move(parts));
}
// 0 <= low <= high.
PatternPtr NaturalsBetween(int64_t low, int64_t high) {
  std::vector<PatternPtr> parts;
  for (std::string text = absl::StrCat(low); text.size() <= absl::StrCat(high).size();
       text = "1" + std::string(text.size(), '0')) {
    const std::string longest(text.size(), '9');
    const bool is_last = text.size() == absl::StrCat(high).size();
    parts.push_back(DigitsBetween(text, is_last ? absl::StrCat(high) : longest));
  }
  return Alternate(std::move(parts));
}
// low <= high.
PatternPtr IntegersBetween(int64_t low, int64_t high) {
  std::vector<PatternPtr> parts;
  if (high >= 0) parts.push_back(NaturalsBetween(std::max<int64_t>(low, 0), high));
  if (low < 0) {
    parts.push_back(Concat({Literal("-"), NaturalsBetween(std::max<int64_t>(-high, 1), -low)}));
  }
  return Alternate(std::move(parts));
}
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
  std::vector<PatternPtr> kinds{String(0, -1), Number(), Boolean(), Null()};
  if (depth > 0) {
    const PatternPtr inner = AnyValue(depth - 1);
    kinds.push_back(ArrayOf(inner, 0, -1));
    kinds.push_back(MapOf(inner));
  }
  return Alternate(std::move(kinds));
}

class SchemaParser {
 public:
  explicit SchemaParser(const Json& root) : root_(root) {}

  // `where` is a JSON pointer, for messages.
  absl::StatusOr<PatternPtr> Parse(const Json& schema, const std::string& where, int depth) {
    if (depth > kMaxSchemaDepth) {
      return Error(where, "is nested too deeply (recursive $refs aren't supported)");
    }
    if (++num_schemas_ > kMaxSchemas) return Error(where, "the schema is too large");
    if (schema == true) return AnyValue(kAnyValueDepth);
    if (!schema.is_object()) return Error(where, "expected a schema (an object)");
    if (schema.contains("$ref")) return ParseRef(schema, where, depth);
    if (schema.contains("const") || schema.contains("enum")) return ParseEnum(schema, where);
    if (schema.contains("anyOf")) return ParseAnyOf(schema, where, depth);
    if (schema.contains("allOf")) return ParseAllOf(schema, where, depth);
    return ParseTypes(schema, where, depth);
  }

 private:
  static constexpr int kMaxSchemas = 5000;

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

  absl::StatusOr<PatternPtr> ParseRef(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"$ref"}));
    const Json& ref = schema["$ref"];
    const std::string path = ref.is_string() ? ref.get<std::string>() : "";
    for (const std::string prefix : {"#/$defs/", "#/definitions/"}) {
      if (path.rfind(prefix, 0) != 0) continue;
      const std::string section = prefix.substr(2, prefix.size() - 3);
      const std::string name = path.substr(prefix.size());
      const auto it = root_.find(section);
      if (it != root_.end() && it->is_object() && it->contains(name)) {
        return Parse((*it)[name], path, depth + 1);
      }
    }
    return Error(Join(where, "$ref"),
                 absl::StrCat("there is no ", Dump(ref), " (expected #/$defs/NAME)"));
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
  // Whether the value has the schema's `type`, where there is one.
  static bool HasType(const Json& value, const Json& schema) {
    const auto type = schema.find("type");
    if (type == schema.end()) return true;
    const auto is = [&value](const Json& name) {
      return name == value.type_name() || (name == "integer" && value.is_number_integer());
    };
    return type->is_array() ? std::any_of(type->begin(), type->end(), is) : is(*type);
  }

  absl::StatusOr<PatternPtr> ParseAnyOf(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"anyOf"}));
    const Json& list = schema["anyOf"];
    const std::string here = Join(where, "anyOf");
    if (!list.is_array() || list.empty()) return Error(here, "expected a list of schemas");
    std::vector<PatternPtr> parts;
    for (size_t i = 0; i < list.size(); ++i) {
      ASSIGN_OR_RETURN(PatternPtr part, Parse(list[i], Join(here, absl::StrCat(i)), depth + 1));
      parts.push_back(std::move(part));
    }
    return Alternate(std::move(parts));
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
    for (const char* type : {"object", "array", "string", "integer"}) {
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
    if (type == "integer") {
      return {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
    }
    return {"type"};
  }
  static std::set<std::string> AllKeywords() {
    std::set<std::string> all;
    for (const char* type : {"object", "array", "string", "integer"}) all.merge(KeywordsOf(type));
    return all;
  }

  absl::StatusOr<PatternPtr> ParseType(const std::string& type, const Json& schema,
                                       const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, KeywordsOf(type)));
    if (type == "null") return Null();
    if (type == "boolean") return Boolean();
    if (type == "integer") return ParseInteger(schema, where);
    if (type == "number") return Number();
    if (type == "string") return ParseString(schema, where);
    if (type == "array") return ParseArray(schema, where, depth);
    if (type == "object") return ParseObject(schema, where, depth);
    return Error(Join(where, "type"), "unknown type");
  }

  absl::StatusOr<PatternPtr> ParseInteger(const Json& schema, const std::string& where) {
    int64_t low = -kMaxInteger, high = kMaxInteger;
    bool any = false;
    for (const auto& [key, value] : schema.items()) {
      if (key == "type" || Annotations().count(key)) continue;
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
    if (!any) return Integer();
    if (low > high) return Error(where, "the minimum is above the maximum");
    return IntegersBetween(low, high);
  }

  absl::StatusOr<PatternPtr> ParseString(const Json& schema, const std::string& where) {
    ASSIGN_OR_RETURN(const int32_t min, Count(schema, where, "minLength", 0));
    ASSIGN_OR_RETURN(const int32_t max, Count(schema, where, "maxLength", -1));
    const bool has_length = schema.contains("minLength") || schema.contains("maxLength");
    if (max >= 0 && max < min) return Error(where, "maxLength is less than minLength");
    const bool has_pattern = schema.contains("pattern"), has_format = schema.contains("format");
    if (has_pattern + has_format + has_length > 1) {
      return Error(where, "only one of length, pattern and format is supported");
    }
    if (has_format) return ParseFormat(schema["format"], Join(where, "format"));
    if (!has_pattern) return String(min, max);
    const std::string here = Join(where, "pattern");
    if (!schema["pattern"].is_string()) return Error(here, "expected a regular expression");
    auto inside = ParseRegex(schema["pattern"].get<std::string>(), RegexMatch::kSearch,
                             RegexText::kJsonString);
    if (!inside.ok()) return Error(here, inside.status().message());
    return Quoted(*std::move(inside));
  }

  static absl::StatusOr<PatternPtr> ParseFormat(const Json& format, const std::string& where) {
    const std::string date = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])";
    const std::string time =
        "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    if (format == "date") return Quoted(Known(date));
    if (format == "time") return Quoted(Known(time));
    if (format == "date-time") return Quoted(Known(date + "T" + time));
    if (format == "uuid") {
      return Quoted(Known("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"));
    }
    return Error(where, "only date, time, date-time and uuid are supported");
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

absl::StatusOr<PatternPtr> ParseJsonSchema(absl::string_view schema) {
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
  return SchemaParser(root).Parse(root, "#", /*depth=*/0);
}
}  // namespace stretto::engine
