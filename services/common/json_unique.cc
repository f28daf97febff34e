#include "services/common/json_unique.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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

// Sees each key as it is parsed; `twice` is the first one that came twice.
class KeyWatcher {
 public:
  bool See(Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start) {
      open_.emplace_back();
    } else if (event == Event::object_end) {
      open_.pop_back();
    } else if (event == Event::key && twice_.empty()) {
      const auto& key = value.get_ref<const std::string&>();
      if (!open_.back().insert(key).second) {
        twice_ = absl::StrCat("the key '", Printable(key, kMaxKeyBytes), "' comes twice");
      }
    }
    return true;
  }
  const std::string& twice() const { return twice_; }

 private:
  std::vector<std::set<std::string>> open_;  // keys of the objects around
  std::string twice_;
};
}  // namespace

absl::StatusOr<Json> ParseUniqueJson(absl::string_view text) {
  KeyWatcher watcher;
  try {
    Json json = Json::parse(text.begin(), text.end(),
                            [&watcher](int, Json::parse_event_t event, const Json& value) {
                              return watcher.See(event, value);
                            });
    if (!watcher.twice().empty()) return absl::InvalidArgumentError(watcher.twice());
    return json;
  } catch (const Json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("not valid JSON in UTF-8: ", Reason(e.what())));
  }
}
}  // namespace stretto::services
