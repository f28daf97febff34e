// JSON from outside, read so that an object has each key once: with two of them readers disagree on
// which one counts, and what the writer meant would be lost without a word.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::services {
// InvalidArgument: broken JSON or invalid UTF-8 (what is wrong and where), a key that comes twice
// in an object (which, and where: see base/json_keys.h), or a number that is out of range; that
// status has the payload kJsonFieldPayload, the first key on the way to the number.
inline constexpr char kJsonFieldPayload[] = "stretto.json.field";
absl::StatusOr<nlohmann::json> ParseUniqueJson(absl::string_view text);
}  // namespace stretto::services
