#include "engine/constrain/schema_unique.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/constrain/json_patterns.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr size_t kMaxValues = 64;
constexpr int kMaxDepth = 8;

bool Add(const Json& schema, const SchemaExclusion& exclusion, int depth,
         std::vector<Json>* values) {
  const Json& s = exclusion.Resolve(schema);
  if (depth > kMaxDepth || !s.is_object()) return false;
  const auto take = [&](const Json& value) {
    const bool is_new = std::find(values->begin(), values->end(), value) == values->end();
    if (is_new && HasType(value, s)) values->push_back(value);
  };
  if (s.contains("const")) {
    take(s["const"]);
  } else if (s.contains("enum")) {
    if (!s["enum"].is_array()) return false;
    for (const Json& value : s["enum"]) take(value);
  } else if (s.contains("anyOf") || s.contains("oneOf")) {
    const Json& list = s.contains("anyOf") ? s["anyOf"] : s["oneOf"];
    if (!list.is_array()) return false;
    for (const Json& one : list) {
      if (!Add(one, exclusion, depth + 1, values)) return false;
    }
  } else if (s.contains("type") && s["type"] == "boolean") {
    take(false);
    take(true);
  } else if (s.contains("type") && s["type"] == "null") {
    take(nullptr);
  } else {
    return false;
  }
  return values->size() <= kMaxValues;
}
}  // namespace

std::optional<std::vector<Json>> ListedValues(const Json& schema,
                                              const SchemaExclusion& exclusion) {
  std::vector<Json> values;
  if (!Add(schema, exclusion, 0, &values) || values.empty()) return std::nullopt;
  return values;
}

absl::StatusOr<PatternPtr> ArrayOfDifferent(const std::vector<Json>& values, int32_t min,
                                            int32_t max, StringAutomata* strings) {
  const auto size = static_cast<int32_t>(values.size());
  if (min > size) {
    return absl::InvalidArgumentError(
        absl::StrCat("minItems is ", min, ", but the items have ", size, " different values"));
  }
  std::vector<PatternPtr> items;
  items.reserve(values.size());
  for (const Json& value : values) {
    items.push_back(Literal(value.dump(-1, ' ', false, Json::error_handler_t::replace)));
  }
  PatternPtr any = Alternate(items);
  PatternPtr in_order = Concat(
      {Literal("["), List(Comma(), std::move(items), std::vector<bool>(values.size(), false)),
       Literal("]")});
  if (min == 0 && (max < 0 || max >= size)) return in_order;
  ASSIGN_OR_RETURN(const auto ordered, strings->Compile(in_order));
  ASSIGN_OR_RETURN(const auto counted,
                   strings->Compile(ArrayOf(std::move(any), min, max < 0 ? size : max)));
  ASSIGN_OR_RETURN(auto both, strings->Intersect(*ordered, *counted));
  return Matches(std::move(both));
}
}  // namespace stretto::engine
