// JSON Schemas of strings and numbers as patterns, and what messages about schemas are made of.
#pragma once

#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/constrain/json_strings.h"
#include "engine/constrain/pattern.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::engine {
// `where` is a JSON pointer.
absl::Status SchemaError(const std::string& where, absl::string_view what);
std::string JoinPointer(const std::string& where, const std::string& key);
// A keyword that is a number of items or characters.
absl::StatusOr<int32_t> SchemaCount(const nlohmann::ordered_json& schema, const std::string& where,
                                    const char* key, int32_t otherwise);

// Whether a `format` says something about numbers, not about strings.
bool IsNumberFormat(const nlohmann::ordered_json& format);

class SchemaScalars {
 public:
  SchemaScalars(StringAutomata* strings, Work* work) : strings_(*strings), work_(*work) {}

  // Of schemas of the type, which have no keywords but its own.
  absl::StatusOr<PatternPtr> ParseInteger(const nlohmann::ordered_json& schema,
                                          const std::string& where);
  absl::StatusOr<PatternPtr> ParseNumber(const nlohmann::ordered_json& schema,
                                         const std::string& where);
  absl::StatusOr<PatternPtr> ParseString(const nlohmann::ordered_json& schema,
                                         const std::string& where);

 private:
  absl::StatusOr<PatternPtr> ParseMultiples(const nlohmann::ordered_json& schema,
                                            const PatternPtr& numbers, const std::string& where);

  StringAutomata& strings_;
  Work& work_;
};
}  // namespace stretto::engine
