// The text of a JSON Schema as JSON: within limits of size and nesting, and each key once.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::engine {
inline constexpr size_t kMaxSchemaBytes = 64 << 10;

// InvalidArgument: too large, nested too deeply, broken JSON, or a key that comes twice in an
// object, with its place: readers disagree on which of the two counts.
absl::StatusOr<nlohmann::ordered_json> ParseSchemaText(absl::string_view text);
}  // namespace stretto::engine
