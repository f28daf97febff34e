// `multipleOf` of JSON Schemas: numbers as decimal texts that a decimal divides, exactly.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/constrain/json_strings.h"
#include "engine/constrain/pattern.h"

namespace stretto::engine {
// Those of `numbers` (decimals without exponent) that are multiples of `divisor`, as JSON writes
// it: integers where it is one, else with as many digits behind the point as it has.
// InvalidArgument: it isn't positive, or has too many digits; the work.
absl::StatusOr<PatternPtr> MultiplesAmong(const PatternPtr& numbers, const std::string& divisor,
                                          StringAutomata* strings);
// How many digits behind the point such multiples have; 0 where the divisor can't be read.
int FractionDigitsOf(const std::string& divisor);
}  // namespace stretto::engine
