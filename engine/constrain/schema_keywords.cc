#include "engine/constrain/schema_keywords.h"

#include <map>

#include "absl/strings/match.h"

namespace stretto::engine {
namespace {
using Names = std::set<std::string>;
const std::map<std::string, Names>& ByType() {
  static const Names number = {
      "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"};
  static const auto* names = new std::map<std::string, Names>{
      {"object",
       {"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties",
        "propertyNames", "patternProperties", "unevaluatedProperties"}},
      {"array", {"type", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"}},
      {"string", {"type", "minLength", "maxLength", "pattern", "format", "contentSchema"}},
      {"integer", number},
      {"number", number}};
  return *names;
}
}  // namespace

bool IsAnnotation(const std::string& keyword) {
  // The last three: what a string's text holds, and OpenAPI's hint which alternative is meant.
  static const auto* names =
      new Names{"title", "description", "default",          "examples",        "$schema",
                "$id",   "$comment",    "deprecated",       "readOnly",        "writeOnly",
                "$defs", "definitions", "contentMediaType", "contentEncoding", "discriminator"};
  return names->count(keyword) > 0 || absl::StartsWith(keyword, "x-");
}

const Names& KeywordsOf(const std::string& type) {
  static const auto* none = new Names{"type"};
  const auto it = ByType().find(type);
  return it == ByType().end() ? *none : it->second;
}

const Names& AllKeywords() {
  static const Names* all = [] {
    auto* names = new Names;
    for (const auto& [type, keywords] : ByType()) names->insert(keywords.begin(), keywords.end());
    return names;
  }();
  return *all;
}
}  // namespace stretto::engine
