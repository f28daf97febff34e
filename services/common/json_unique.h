// JSON from outside, read so that an object has each key once: with two of them readers disagree on
// which one counts, and what the writer meant would be lost without a word.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::services {
// InvalidArgument: broken JSON or invalid UTF-8 (what is wrong and where), or a key that comes
// twice in an object (which, and where: see base/json_keys.h).
absl::StatusOr<nlohmann::json> ParseUniqueJson(absl::string_view text);
}  // namespace stretto::services
