// Whether JSON Schemas exclude each other: what `oneOf` asks for. Answers are about values, not
// about the texts that constrained output would write, which are fewer.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_strings.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::engine {
// The schema that a $ref means, or null: `#` and a JSON pointer into the schema itself.
const nlohmann::ordered_json* FindRef(const nlohmann::ordered_json& root, const std::string& path);

// Of an integer or a number: minimum, exclusiveMinimum, maximum, exclusiveMaximum.
NumberBounds BoundsOf(const nlohmann::ordered_json& schema);

// Whether the value has the schema's `type`, where there is one.
bool HasType(const nlohmann::ordered_json& value, const nlohmann::ordered_json& schema);

class SchemaExclusion {
 public:
  // Both outlive this.
  SchemaExclusion(const nlohmann::ordered_json& root, StringAutomata* strings)
      : root_(root), strings_(*strings) {}

  // Whether it is certain that no value obeys both schemas. Certain are: types without a common
  // one; numbers by their bounds; strings by length and pattern; listed values; arrays by
  // their number of items, or an item that must be there; objects by a property that one requires
  // and the other forbids or describes otherwise; and alternatives of which all are.
  bool AreExclusive(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b,
                    int depth = 0) const;
  // Whether it is certain that the value doesn't obey the schema.
  bool Excludes(const nlohmann::ordered_json& schema, const nlohmann::ordered_json& value,
                int depth = 0) const;
  // Without $ref and allOf around it; the schema itself where they lead nowhere.
  const nlohmann::ordered_json& Resolve(const nlohmann::ordered_json& schema) const;

 private:
  unsigned TypesOf(const nlohmann::ordered_json& schema, int depth) const;
  bool AreStringsExclusive(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b) const;
  bool AreArraysExclusive(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b,
                          int depth) const;
  bool RequiresWhatExcludes(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b,
                            int depth) const;
  bool ExcludesMembers(const nlohmann::ordered_json& schema, const nlohmann::ordered_json& value,
                       int depth) const;

  // Whether more has been looked at than such a question is worth; then nothing is certain.
  bool IsTired(size_t steps = 1) const { return (num_steps_ += steps) > kMaxSteps; }

  static constexpr size_t kMaxSteps = 200'000;
  const nlohmann::ordered_json& root_;
  StringAutomata& strings_;
  mutable size_t num_steps_ = 0;
};
}  // namespace stretto::engine
