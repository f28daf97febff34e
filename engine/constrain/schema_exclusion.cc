#include "engine/constrain/schema_exclusion.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
using Json = nlohmann::ordered_json;
namespace {
constexpr int kMaxDepth = 12;  // schemas within schemas; deeper nothing is certain

enum Type : unsigned {
  kNull = 1,
  kBoolean = 2,
  kWhole = 4,
  kFraction = 8,
  kString = 16,
  kArray = 32,
  kObject = 64,
  kAll = 127
};

unsigned TypeOfName(const Json& name) {
  if (name == "null") return kNull;
  if (name == "boolean") return kBoolean;
  if (name == "integer") return kWhole;
  if (name == "number") return kWhole | kFraction;
  if (name == "string") return kString;
  if (name == "array") return kArray;
  return name == "object" ? kObject : kAll;
}
unsigned TypeOfValue(const Json& value) {
  if (value.is_null()) return kNull;
  if (value.is_boolean()) return kBoolean;
  if (value.is_string()) return kString;
  if (value.is_array()) return kArray;
  if (value.is_object()) return kObject;
  const double number = value.get<double>();
  return number == std::floor(number) ? kWhole : kFraction;
}

// The listed values of enum or const; null: none are listed.
const Json* ListOf(const Json& schema, Json* one) {
  if (schema.contains("enum")) return &schema["enum"];
  if (!schema.contains("const")) return nullptr;
  *one = Json::array({schema["const"]});
  return one;
}
const Json* AlternativesOf(const Json& schema) {
  for (const char* key : {"anyOf", "oneOf"}) {
    if (schema.contains(key) && schema[key].is_array()) return &schema[key];
  }
  return nullptr;
}

int64_t CountOf(const Json& schema, const char* key, int64_t otherwise) {
  const auto it = schema.find(key);
  return it != schema.end() && it->is_number_integer() ? it->get<int64_t>() : otherwise;
}
const Json* PropertyOf(const Json& schema, const std::string& name) {
  const auto properties = schema.find("properties");
  if (properties == schema.end() || !properties->is_object()) return nullptr;
  const auto it = properties->find(name);
  return it == properties->end() ? nullptr : &*it;
}
bool ForbidsOthers(const Json& schema) {
  return schema.contains("additionalProperties") && schema["additionalProperties"] == false;
}
std::string NumberText(const Json& schema, const char* key) {
  return schema.contains(key) && schema[key].is_number() ? schema[key].dump() : "";
}
// The tighter one of a bound and an exclusive bound. The texts give back the doubles they are of.
NumberBound Tighter(const std::string& inclusive, const std::string& exclusive, double inwards) {
  double a = 0, b = 0;
  if (exclusive.empty()) return {inclusive, false};
  if (inclusive.empty() || (absl::SimpleAtod(inclusive, &a) && absl::SimpleAtod(exclusive, &b) &&
                            b * inwards >= a * inwards)) {
    return {exclusive, true};
  }
  return {inclusive, false};
}
}  // namespace

const Json* FindRef(const Json& root, const std::string& path) {
  if (path.empty() || path[0] != '#') return nullptr;
  const Json* at = &root;
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part == "#") continue;
    const std::string name = absl::StrReplaceAll(part, {{"~1", "/"}, {"~0", "~"}, {"%25", "%"}});
    size_t index = 0;
    if (at->is_object() && at->contains(name)) {
      at = &(*at)[name];
    } else if (at->is_array() && absl::SimpleAtoi(name, &index) && index < at->size()) {
      at = &(*at)[index];
    } else {
      return nullptr;
    }
  }
  return at;
}

NumberBounds BoundsOf(const Json& schema) {
  return {Tighter(NumberText(schema, "minimum"), NumberText(schema, "exclusiveMinimum"), 1),
          Tighter(NumberText(schema, "maximum"), NumberText(schema, "exclusiveMaximum"), -1)};
}

bool HasType(const Json& value, const Json& schema) {
  const auto type = schema.find("type");
  if (type == schema.end()) return true;
  const auto is = [&value](const Json& name) {
    return name.is_string() && TypeOfName(name) != kAll &&
           (TypeOfName(name) & TypeOfValue(value)) != 0;
  };
  return type->is_array() ? std::any_of(type->begin(), type->end(), is) : is(*type);
}

const Json& SchemaExclusion::Resolve(const Json& schema) const {
  const Json* at = &schema;
  for (int i = 0; i < kMaxDepth && at->is_object(); ++i) {
    if (at->contains("$ref") && (*at)["$ref"].is_string()) {
      const Json* target = FindRef(root_, (*at)["$ref"].get<std::string>());
      if (target == nullptr) return *at;
      at = target;
    } else if (at->contains("allOf") && (*at)["allOf"].is_array() && (*at)["allOf"].size() == 1) {
      at = &(*at)["allOf"][0];
    } else {
      break;
    }
  }
  return *at;
}

unsigned SchemaExclusion::TypesOf(const Json& unresolved, int depth) const {
  const Json& schema = Resolve(unresolved);
  if (!schema.is_object() || depth > kMaxDepth || IsTired()) return kAll;
  if (schema.contains("$ref")) return kAll;
  unsigned types = 0;
  Json one;
  if (const Json* list = ListOf(schema, &one)) {
    for (const Json& value : *list) types |= HasType(value, schema) ? TypeOfValue(value) : 0u;
    return types;
  }
  if (const Json* alternatives = AlternativesOf(schema)) {
    for (const Json& alternative : *alternatives) types |= TypesOf(alternative, depth + 1);
    return types;
  }
  const auto type = schema.find("type");
  if (type == schema.end()) return kAll;
  if (!type->is_array()) return TypeOfName(*type);
  for (const Json& name : *type) types |= TypeOfName(name);
  return types;
}

bool SchemaExclusion::AreExclusive(const Json& first, const Json& second, int depth) const {
  const Json &a = Resolve(first), &b = Resolve(second);
  const unsigned common = TypesOf(a, depth) & TypesOf(b, depth);
  if (common == 0) return true;
  if (depth > kMaxDepth || !a.is_object() || !b.is_object() || IsTired()) return false;
  for (const auto& [x, y] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    Json one;
    if (const Json* list = ListOf(*x, &one)) {
      return std::all_of(list->begin(), list->end(), [&, x = x, y = y](const Json& value) {
        return !HasType(value, *x) || Excludes(*y, value, depth + 1);
      });
    }
  }
  for (const auto& [x, y] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    if (const Json* alternatives = AlternativesOf(*x)) {
      return std::all_of(
          alternatives->begin(), alternatives->end(),
          [&, y = y](const Json& schema) { return AreExclusive(schema, *y, depth + 1); });
    }
  }
  if (a.contains("$ref") || b.contains("$ref")) return false;
  // Each type that both have must be told apart by itself.
  if ((common & (kNull | kBoolean)) != 0) return false;
  if ((common & (kWhole | kFraction)) != 0 && !AreApart(BoundsOf(a), BoundsOf(b))) return false;
  if ((common & kString) != 0 && !AreStringsExclusive(a, b)) return false;
  if ((common & kArray) != 0 && !AreArraysExclusive(a, b, depth)) return false;
  return (common & kObject) == 0 || RequiresWhatExcludes(a, b, depth) ||
         RequiresWhatExcludes(b, a, depth);
}

bool SchemaExclusion::AreStringsExclusive(const Json& a, const Json& b) const {
  const auto x = strings_.Of(a, StringAutomata::Format::kIgnore);
  const auto y = strings_.Of(b, StringAutomata::Format::kIgnore);
  return x.ok() && y.ok() && absl::IsNotFound(strings_.Intersect(**x, **y).status());
}

bool SchemaExclusion::AreArraysExclusive(const Json& a, const Json& b, int depth) const {
  const int64_t min_a = CountOf(a, "minItems", 0), min_b = CountOf(b, "minItems", 0);
  if (min_a > CountOf(b, "maxItems", INT64_MAX) || min_b > CountOf(a, "maxItems", INT64_MAX)) {
    return true;
  }
  return std::max(min_a, min_b) > 0 && a.contains("items") && b.contains("items") &&
         AreExclusive(a["items"], b["items"], depth + 1);
}

// Whether `a` requires a property that no object of `b` has, or has with a value of `a`'s.
bool SchemaExclusion::RequiresWhatExcludes(const Json& a, const Json& b, int depth) const {
  if (!a.contains("required") || !a["required"].is_array()) return false;
  for (const Json& entry : a["required"]) {
    if (!entry.is_string()) continue;
    const auto name = entry.get<std::string>();
    const Json *in_a = PropertyOf(a, name), *in_b = PropertyOf(b, name);
    if (in_b == nullptr && ForbidsOthers(b)) return true;
    if (in_a != nullptr && in_b != nullptr && AreExclusive(*in_a, *in_b, depth + 1)) return true;
  }
  return false;
}

bool SchemaExclusion::Excludes(const Json& unresolved, const Json& value, int depth) const {
  const Json& schema = Resolve(unresolved);
  if ((TypesOf(schema, depth) & TypeOfValue(value)) == 0) return true;
  if (!schema.is_object() || depth > kMaxDepth || schema.contains("$ref")) return false;
  if (IsTired(1 + (schema.contains("enum") ? schema["enum"].size() : 0))) return false;
  Json one;
  if (const Json* list = ListOf(schema, &one)) {
    return std::none_of(list->begin(), list->end(), [&](const Json& listed) {
      return listed == value && HasType(listed, schema);
    });
  }
  if (const Json* alternatives = AlternativesOf(schema)) {
    return std::all_of(alternatives->begin(), alternatives->end(), [&](const Json& alternative) {
      return Excludes(alternative, value, depth + 1);
    });
  }
  if (value.is_number()) {
    const int64_t divisor = CountOf(schema, "multipleOf", 0);
    const bool is_small = value.is_number_integer() && std::fabs(value.get<double>()) < 9e15;
    if (is_small && divisor > 0 && value.get<int64_t>() % divisor != 0) {
      return true;
    }
    return IsOutside(value.dump(), BoundsOf(schema));
  }
  if (value.is_string()) {
    const auto automaton = strings_.Of(schema, StringAutomata::Format::kIgnore);
    return automaton.ok() && !(*automaton)->Matches(value.get<std::string>());
  }
  return ExcludesMembers(schema, value, depth);
}

bool SchemaExclusion::ExcludesMembers(const Json& schema, const Json& value, int depth) const {
  if (value.is_array()) {
    const auto size = static_cast<int64_t>(value.size());
    if (size < CountOf(schema, "minItems", 0) || size > CountOf(schema, "maxItems", INT64_MAX)) {
      return true;
    }
    return schema.contains("items") &&
           std::any_of(value.begin(), value.end(), [&](const Json& item) {
             return Excludes(schema["items"], item, depth + 1);
           });
  }
  if (!value.is_object()) return false;
  if (schema.contains("required") && schema["required"].is_array()) {
    for (const Json& name : schema["required"]) {
      if (name.is_string() && !value.contains(name.get<std::string>())) return true;
    }
  }
  for (const auto& [name, member] : value.items()) {
    const Json* property = PropertyOf(schema, name);
    if (property == nullptr ? ForbidsOthers(schema) : Excludes(*property, member, depth + 1)) {
      return true;
    }
  }
  return false;
}
}  // namespace stretto::engine
