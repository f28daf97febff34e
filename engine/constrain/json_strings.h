// What a JSON Schema says about a string, as an automaton over the string's own text (not as JSON
// writes it): there every text has one form, so that rules can be joined and compared exactly.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/constrain/automaton.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::engine {
inline constexpr int32_t kMaxSchemaCount = 10'000;  // of items and characters

// The expression for a format, "" for one that isn't known. What it matches is of the format,
// though not all that is.
std::string FormatExpression(const std::string& format);
// Formats that any text has.
const std::set<std::string>& AnyTextFormats();
// All that are known, for messages.
std::string FormatNames();

class StringAutomata {
 public:
  explicit StringAutomata(Work* work) : work_(*work) { limits_.work = work; }

  // kIgnore: the strings that may obey the schema, whatever a validator makes of `format`: many
  // don't check it, and what is written is less than all that has a format.
  enum class Format { kApply, kIgnore };

  // Of a valid schema of type string: minLength, maxLength, pattern and format together.
  // InvalidArgument: an expression that can't be read, or no text obeys all; the work.
  // Each is built once.
  absl::StatusOr<std::shared_ptr<const Automaton>> Of(const nlohmann::ordered_json& schema,
                                                      Format format);
  // Of pattern and format alone; one of them is there.
  absl::StatusOr<std::shared_ptr<const Automaton>> WithoutLength(
      const nlohmann::ordered_json& schema);
  // As those of Automaton.
  absl::StatusOr<std::shared_ptr<const Automaton>> Intersect(const Automaton& a,
                                                             const Automaton& b);
  absl::StatusOr<std::shared_ptr<const Automaton>> Subtract(const Automaton& a, const Automaton& b);
  absl::StatusOr<std::shared_ptr<const Automaton>> Compile(const PatternPtr& pattern);

 private:
  absl::StatusOr<std::shared_ptr<const Automaton>> Known(const nlohmann::ordered_json& schema,
                                                         std::initializer_list<const char*> keys);
  absl::StatusOr<std::shared_ptr<const Automaton>> Build(const nlohmann::ordered_json& schema);

  Work& work_;
  AutomatonLimits limits_{.counters = false};
  absl::flat_hash_map<std::string, absl::StatusOr<std::shared_ptr<const Automaton>>>
      known_;  // by the rules' text
};
}  // namespace stretto::engine
