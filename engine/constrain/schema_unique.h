// `uniqueItems` of JSON Schemas, where the items have few values: an automaton can't remember which
// items came before, but it can write them in one order, each at most once.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/constrain/json_strings.h"
#include "engine/constrain/pattern.h"
#include "engine/constrain/schema_exclusion.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::engine {
// The different values that obey the schema, in its order: of const, enum, boolean, null and
// alternatives of these; none where they aren't listed so, or are too many.
std::optional<std::vector<nlohmann::ordered_json>> ListedValues(
    const nlohmann::ordered_json& schema, const SchemaExclusion& exclusion);

// Arrays of `min` to `max` (below 0: any number) of the values in their order, none of them twice.
// InvalidArgument: there aren't as many; the work.
absl::StatusOr<PatternPtr> ArrayOfDifferent(const std::vector<nlohmann::ordered_json>& values,
                                            int32_t min, int32_t max, StringAutomata* strings);
}  // namespace stretto::engine
