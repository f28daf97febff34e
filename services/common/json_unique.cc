#include "services/common/json_unique.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/json_keys.h"
#include "base/printable.h"
#include "nlohmann/json.hpp"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr size_t kMaxReasonBytes = 300, kMaxKeyBytes = 64;

// What the parser says, without its own numbering of errors.
std::string Reason(const std::string& what) {
  const size_t end = what.find("] ");
  return Printable(end == std::string::npos ? what : what.substr(end + 2), kMaxReasonBytes);
}
}  // namespace

absl::StatusOr<Json> ParseUniqueJson(absl::string_view text) {
  RepeatedKey<Json> repeated;
  try {
    Json json = Json::parse(text.begin(), text.end(),
                            [&repeated](int, Json::parse_event_t event, const Json& value) {
                              return repeated.See(event, value);
                            });
    if (!repeated.found()) return json;
    const std::string place = Printable(repeated.place(), kMaxReasonBytes);
    return absl::InvalidArgumentError(
        absl::StrCat("the key '", Printable(repeated.key(), kMaxKeyBytes), "' comes twice",
                     place.empty() ? "" : " in ", place));
  } catch (const Json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("not valid JSON in UTF-8: ", Reason(e.what())));
  }
}
}  // namespace stretto::services
