#include "engine/constrain/json_schema.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_patterns.h"
#include "engine/constrain/json_strings.h"
#include "engine/constrain/lengths.h"
#include "engine/constrain/regex.h"
#include "engine/constrain/schema_exclusion.h"
#include "engine/constrain/schema_keywords.h"
#include "engine/constrain/schema_scalars.h"
#include "engine/constrain/schema_text.h"
#include "engine/constrain/schema_unique.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr int32_t kMaxCount = kMaxSchemaCount;

class SchemaParser {
 public:
  SchemaParser(const Json& root, int max_nesting, Work* work)
      : root_(root),
        max_nesting_(max_nesting),
        work_(*work),
        strings_(work),
        scalars_(&strings_, work),
        exclusion_(root, &strings_) {}
  bool is_recursive() const { return is_recursive_; }

  absl::StatusOr<PatternPtr> ParseRoot() {
    ++nesting_["#"];
    return Parse(root_, "#", /*depth=*/0);
  }

 private:
  // `where` is a JSON pointer, for messages.
  absl::StatusOr<PatternPtr> Parse(const Json& schema, const std::string& where, int depth) {
    if (depth > kMaxSchemaDepth) {
      return SchemaError(where, "is nested too deeply");
    }
    if (++num_schemas_ > kMaxSchemas) return SchemaError(where, "the schema is too large");
    if (schema == true) return AnyValue(kAnyValueDepth);
    if (!schema.is_object()) return SchemaError(where, "expected a schema (an object)");
    const Work::Place place(&work_, where);
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

  static std::string Dump(const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  // That `schema` has no keywords but these and annotations.
  static absl::Status CheckKeywords(const Json& schema, const std::string& where,
                                    const std::set<std::string>& known) {
    for (const auto& [key, value] : schema.items()) {
      if (known.count(key) || IsAnnotation(key)) continue;
      return SchemaError(JoinPointer(where, key), "this keyword isn't supported here");
    }
    return absl::OkStatus();
  }
  // A schema within itself is written out up to `max_nesting_` times; a value that would have to be
  // nested deeper can't be written.
  absl::StatusOr<PatternPtr> ParseRef(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"$ref"}));
    const Json& ref = schema["$ref"];
    const std::string path = ref.is_string() ? ref.get<std::string>() : "";
    const Json* target = FindRef(root_, path);
    if (target == nullptr) {
      return SchemaError(JoinPointer(where, "$ref"),
                         absl::StrCat("there is no ", Dump(ref),
                                      " (expected # or a place in this schema, as #/$defs/NAME)"));
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
      return SchemaError(JoinPointer(where, "enum"), "expected a list of at least one value");
    }
    std::vector<PatternPtr> parts;
    for (const Json& value : values) {
      if (HasType(value, schema)) parts.push_back(Literal(Dump(value)));
    }
    if (parts.empty()) return SchemaError(where, "no value of the enum has the type");
    return Alternate(std::move(parts));
  }
  absl::StatusOr<std::vector<PatternPtr>> ParseAlternatives(const Json& schema,
                                                            const std::string& key,
                                                            const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {key}));
    const Json& list = schema[key];
    const std::string here = JoinPointer(where, key);
    if (!list.is_array() || list.empty()) return SchemaError(here, "expected a list of schemas");
    std::vector<PatternPtr> parts;
    for (size_t i = 0; i < list.size(); ++i) {
      ASSIGN_OR_RETURN(PatternPtr part,
                       Parse(list[i], JoinPointer(here, absl::StrCat(i)), depth + 1));
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
    const std::string here = JoinPointer(where, "oneOf");
    if (list.size() > kMaxOneOf) {
      return SchemaError(here, absl::StrCat("expected up to ", kMaxOneOf, " alternatives"));
    }
    std::vector<std::vector<size_t>> overlaps(list.size());
    const Work::Place place(&work_, here);
    for (size_t i = 0; i < list.size(); ++i) {
      for (size_t j = i + 1; j < list.size(); ++j) {
        if (exclusion_.AreExclusive(list[i], list[j])) continue;
        RETURN_IF_ERROR(work_.Status());
        if (!IsString(list[i]) || !IsString(list[j])) {
          return SchemaError(here,
                             absl::StrCat("alternatives ", i, " and ", j,
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
    if (!left.ok()) return SchemaError(JoinPointer(here, absl::StrCat(i)), left.status().message());
    return Quoted(JsonTextMatches(*std::move(left)));
  }

  // Only of one schema, as generators of schemas write it.
  absl::StatusOr<PatternPtr> ParseAllOf(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"allOf"}));
    const Json& list = schema["allOf"];
    const std::string here = JoinPointer(where, "allOf");
    if (!list.is_array() || list.size() != 1)
      return SchemaError(here, "expected a list of one schema");
    return Parse(list[0], JoinPointer(here, "0"), depth + 1);
  }

  absl::StatusOr<PatternPtr> ParseTypes(const Json& schema, const std::string& where, int depth) {
    const auto it = schema.find("type");
    if (it == schema.end()) return ParseUntyped(schema, where, depth);
    if (it->is_string()) return ParseType(it->get<std::string>(), schema, where, depth);
    const std::string here = JoinPointer(where, "type");
    if (!it->is_array() || it->empty())
      return SchemaError(here, "expected a type or a list of types");
    RETURN_IF_ERROR(CheckKeywords(schema, where, AllKeywords()));
    // Of strings and numbers: the format is of one of them.
    const bool mixed = std::find(it->begin(), it->end(), "string") != it->end();
    std::vector<PatternPtr> parts;
    for (const Json& type : *it) {
      if (!type.is_string()) return SchemaError(here, "expected a type or a list of types");
      Json one = schema;
      const auto name = type.get<std::string>();
      // Keywords of other types say nothing about this one.
      for (const std::string& keyword : AllKeywords()) {
        if (keyword != "type" && !KeywordsOf(name).count(keyword)) one.erase(keyword);
      }
      if (one.contains("format") && mixed && (name == "string") == IsNumberFormat(one["format"])) {
        one.erase("format");
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
          return SchemaError(where, absl::StrCat("'", keyword, "' needs \"type\": \"", type, "\""));
        }
      }
    }
    RETURN_IF_ERROR(CheckKeywords(schema, where, {}));
    (void)depth;
    return AnyValue(kAnyValueDepth);
  }

  absl::StatusOr<PatternPtr> ParseType(const std::string& type, const Json& schema,
                                       const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, KeywordsOf(type)));
    if (type == "null") return Null();
    if (type == "boolean") return Boolean();
    if (type == "integer") return scalars_.ParseInteger(schema, where);
    if (type == "number") return scalars_.ParseNumber(schema, where);
    if (type == "string" && schema.contains("contentSchema")) {
      return ParseContent(schema, where, depth);
    }
    if (type == "string") return scalars_.ParseString(schema, where);
    if (type == "array") return ParseArray(schema, where, depth);
    if (type == "object") return ParseObject(schema, where, depth);
    return SchemaError(JoinPointer(where, "type"), "unknown type");
  }

  absl::StatusOr<PatternPtr> ParseArray(const Json& schema, const std::string& where, int depth) {
    ASSIGN_OR_RETURN(const int32_t min, SchemaCount(schema, where, "minItems", 0));
    ASSIGN_OR_RETURN(const int32_t max, SchemaCount(schema, where, "maxItems", -1));
    if (max >= 0 && max < min) return SchemaError(where, "maxItems is less than minItems");
    const auto unique = schema.find("uniqueItems");
    if (unique != schema.end() && *unique != false && (max < 0 || max > 1)) {
      return ParseUnique(schema, where, min, max);
    }
    if (schema.contains("prefixItems")) return ParseTuple(schema, where, depth, min, max);
    if (!schema.contains("items")) return ArrayOf(AnyValue(kAnyValueDepth), min, max);
    if (schema["items"] == false) {
      return min > 0 ? SchemaError(where, "items is false, and minItems isn't 0")
                     : absl::StatusOr<PatternPtr>(Literal("[]"));
    }
    ASSIGN_OR_RETURN(PatternPtr item,
                     Parse(schema["items"], JoinPointer(where, "items"), depth + 1));
    return ArrayOf(std::move(item), min, max);
  }

  absl::StatusOr<PatternPtr> ParseUnique(const Json& schema, const std::string& where, int32_t min,
                                         int32_t max) {
    const bool is_list = schema.contains("items") && !schema.contains("prefixItems");
    const auto values =
        is_list ? ListedValues(schema["items"], exclusion_) : std::optional<std::vector<Json>>();
    if (!values.has_value()) {
      return SchemaError(
          JoinPointer(where, "uniqueItems"),
          "isn't supported but of items with few listed values: an automaton can't remember the "
          "items before (leave it out, and drop what comes twice afterwards)");
    }
    auto array = ArrayOfDifferent(*values, min, max, &strings_);
    return array.ok() ? array : SchemaError(where, array.status().message());
  }

  // A string whose text is JSON with a schema of its own.
  absl::StatusOr<PatternPtr> ParseContent(const Json& schema, const std::string& where, int depth) {
    RETURN_IF_ERROR(CheckKeywords(schema, where, {"type", "contentSchema"}));
    if (schema.contains("contentEncoding") ||
        schema.value("contentMediaType", Json()) != "application/json") {
      return SchemaError(JoinPointer(where, "contentSchema"),
                         "expected contentMediaType: application/json beside it, and no "
                         "contentEncoding");
    }
    const std::string here = JoinPointer(where, "contentSchema");
    ASSIGN_OR_RETURN(const PatternPtr content, Parse(schema["contentSchema"], here, depth + 1));
    auto automaton = strings_.Compile(content);
    if (!automaton.ok()) return SchemaError(here, automaton.status().message());
    return Quoted(JsonTextMatches(*std::move(automaton)));
  }

  // The first items by their own schemas; more, where `items` describes them or minItems wants
  // them.
  absl::StatusOr<PatternPtr> ParseTuple(const Json& schema, const std::string& where, int depth,
                                        int32_t min, int32_t max) {
    const Json& prefix = schema["prefixItems"];
    const std::string here = JoinPointer(where, "prefixItems");
    if (!prefix.is_array() || prefix.empty())
      return SchemaError(here, "expected a list of schemas");
    const auto size = static_cast<int32_t>(prefix.size());
    const bool has_rest = schema.contains("items") && schema["items"] != false;
    PatternPtr rest = AnyValue(kAnyValueDepth);
    if (has_rest) {
      ASSIGN_OR_RETURN(rest, Parse(schema["items"], JoinPointer(where, "items"), depth + 1));
    } else if (schema.contains("items") && min > size) {
      return SchemaError(where, "items is false, and minItems is more than prefixItems has");
    }
    if (!has_rest) max = std::min(max < 0 ? kMaxCount : max, std::max(min, size));
    // From behind: what follows the first i items.
    PatternPtr tail = EmptyText();
    if (max < 0 || max > size) {
      tail = Repeat(Concat({Comma(), std::move(rest)}), std::max(min - size, 0),
                    max < 0 ? -1 : max - size);
    }
    for (int32_t i = size - 1; i >= 0; --i) {
      ASSIGN_OR_RETURN(PatternPtr item, Parse(prefix[static_cast<size_t>(i)],
                                              JoinPointer(here, absl::StrCat(i)), depth + 1));
      if (max >= 0 && i >= max) continue;
      tail = Concat({i == 0 ? EmptyText() : Comma(), std::move(item), std::move(tail)});
      if (i >= min) tail = Optional(std::move(tail));
    }
    return Concat({Literal("["), std::move(tail), Literal("]")});
  }

  absl::StatusOr<PatternPtr> ParseObject(const Json& schema, const std::string& where, int depth) {
    static const Json kNone = Json::object(), kNobody = Json::array();
    const Json& properties = schema.contains("properties") ? schema["properties"] : kNone;
    const Json& required = schema.contains("required") ? schema["required"] : kNobody;
    if (!properties.is_object())
      return SchemaError(JoinPointer(where, "properties"), "expected an object");
    if (!required.is_array())
      return SchemaError(JoinPointer(where, "required"), "expected a list of names");
    std::set<std::string> names;
    for (const Json& name : required) {
      if (!name.is_string() || !properties.contains(name.get<std::string>())) {
        return SchemaError(JoinPointer(where, "required"),
                           absl::StrCat(Dump(name), " isn't among the properties"));
      }
      names.insert(name.get<std::string>());
    }
    if (properties.empty()) return ParseMap(schema, where, depth);
    if (schema.contains("additionalProperties")) {
      const Json& more = schema["additionalProperties"];
      if (!more.is_boolean() && !more.is_object()) {
        return SchemaError(JoinPointer(where, "additionalProperties"),
                           "expected false, true or a schema");
      }
    }
    RETURN_IF_ERROR(CheckPropertyRules(schema, where, names.size()));
    std::vector<PatternPtr> members;
    std::vector<bool> is_required;
    for (const auto& [name, value] : properties.items()) {
      ASSIGN_OR_RETURN(
          PatternPtr pattern,
          Parse(value, JoinPointer(JoinPointer(where, "properties"), name), depth + 1));
      members.push_back(Concat({Literal(Dump(Json(name))), Colon(), std::move(pattern)}));
      is_required.push_back(names.count(name) > 0);
    }
    return Concat(
        {Literal("{"), List(Comma(), std::move(members), std::move(is_required)), Literal("}")});
  }

  // What may stand beside `properties`, of which no others are written.
  absl::Status CheckPropertyRules(const Json& schema, const std::string& where, size_t required) {
    for (const char* key : {"propertyNames", "patternProperties"}) {
      if (schema.contains(key)) {
        return SchemaError(JoinPointer(where, key), "isn't supported beside properties");
      }
    }
    const auto num_properties = static_cast<int32_t>(schema["properties"].size());
    ASSIGN_OR_RETURN(const int32_t min, SchemaCount(schema, where, "minProperties", 0));
    ASSIGN_OR_RETURN(const int32_t max,
                     SchemaCount(schema, where, "maxProperties", num_properties));
    if (static_cast<size_t>(min) > required) {
      return SchemaError(JoinPointer(where, "minProperties"),
                         "is more than are required: require as many by name");
    }
    if (max < num_properties) {
      return SchemaError(JoinPointer(where, "maxProperties"),
                         "isn't supported below the number of properties");
    }
    return absl::OkStatus();
  }

  // An object without `properties`: members with any names, or those that propertyNames describes.
  absl::StatusOr<PatternPtr> ParseMap(const Json& schema, const std::string& where, int depth) {
    ASSIGN_OR_RETURN(const int32_t min, SchemaCount(schema, where, "minProperties", 0));
    ASSIGN_OR_RETURN(const int32_t max, SchemaCount(schema, where, "maxProperties", -1));
    if (max >= 0 && max < min)
      return SchemaError(where, "maxProperties is less than minProperties");
    if (min > 1) {
      return SchemaError(
          JoinPointer(where, "minProperties"),
          "expected 0 or 1 without properties: an automaton can't remember the names "
          "before, and one that comes twice counts once");
    }
    if (schema.contains("patternProperties"))
      return ParsePatternMap(schema, where, depth, min, max);
    PatternPtr name = AnyString(0, -1);
    if (schema.contains("propertyNames")) {
      const std::string here = JoinPointer(where, "propertyNames");
      ASSIGN_OR_RETURN(name, ParseNames(schema["propertyNames"], here, depth + 1));
    }
    const auto it = schema.find("additionalProperties");
    const bool is_any = it == schema.end() || *it == true;
    // An empty `properties` names none, and then there are none.
    if ((is_any && schema.contains("properties")) || (!is_any && *it == false)) {
      return min == 0
                 ? absl::StatusOr<PatternPtr>(Literal("{}"))
                 : SchemaError(JoinPointer(where, "minProperties"), "the object has no properties");
    }
    if (is_any) return MapOf(std::move(name), AnyValue(kAnyValueDepth), min, max);
    ASSIGN_OR_RETURN(PatternPtr value,
                     Parse(*it, JoinPointer(where, "additionalProperties"), depth + 1));
    return MapOf(std::move(name), std::move(value), min, max);
  }
  // Only of one expression: values of names that two match would have to obey both.
  absl::StatusOr<PatternPtr> ParsePatternMap(const Json& schema, const std::string& where,
                                             int depth, int32_t min, int32_t max) {
    const Json& patterns = schema["patternProperties"];
    const std::string here = JoinPointer(where, "patternProperties");
    if (!patterns.is_object() || patterns.size() != 1 || schema.contains("propertyNames")) {
      return SchemaError(here,
                         "expected an object of one expression, without propertyNames beside it");
    }
    const std::string& expression = patterns.begin().key();
    ASSIGN_OR_RETURN(PatternPtr name,
                     scalars_.ParseString({{"type", "string"}, {"pattern", expression}}, here));
    ASSIGN_OR_RETURN(PatternPtr value,
                     Parse(*patterns.begin(), JoinPointer(here, expression), depth + 1));
    return MapOf(std::move(name), std::move(value), min, max);
  }
  absl::StatusOr<PatternPtr> ParseNames(const Json& schema, const std::string& where, int depth) {
    Json names = exclusion_.Resolve(schema);
    if (names.is_object() && names.contains("const")) names["enum"] = Json::array({names["const"]});
    if (names.is_object() && names.contains("enum") && names["enum"].is_array()) {
      for (const Json& name : names["enum"]) {
        if (!name.is_string()) return SchemaError(where, "names are strings");
      }
    } else if (names.is_object()) {
      if (!names.contains("type")) names["type"] = "string";
      if (names["type"] != "string") return SchemaError(where, "expected a schema of strings");
      return ParseType("string", names, where, depth);
    }
    return Parse(schema, where, depth);
  }

  const Json& root_;
  const int max_nesting_;
  std::map<std::string, int> nesting_;  // by $ref: how often what is parsed now is inside of it
  bool is_recursive_ = false;
  Work& work_;
  StringAutomata strings_;
  SchemaScalars scalars_;
  SchemaExclusion exclusion_;
  int num_schemas_ = 0;
};

}  // namespace

absl::StatusOr<PatternPtr> ParseJsonSchema(absl::string_view schema, int max_nesting,
                                           bool* is_recursive, Work* work) {
  ASSIGN_OR_RETURN(const Json root, ParseSchemaText(schema));
  Work own;
  if (work == nullptr) work = &own;
  SchemaParser parser(root, max_nesting, work);
  auto pattern = parser.ParseRoot();
  if (is_recursive != nullptr) *is_recursive = parser.is_recursive();
  // What else was found wrong then may be so only because something couldn't be built.
  RETURN_IF_ERROR(work->Status());
  return pattern;
}
}  // namespace stretto::engine
