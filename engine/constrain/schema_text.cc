#include "engine/constrain/schema_text.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;
constexpr int kMaxJsonDepth = 200;

// Whether brackets outside of strings are nested deeper than `max_depth`. What reads the text later
// calls itself for each.
bool IsDeeper(absl::string_view json, int max_depth) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if ((c == '{' || c == '[') && ++depth > max_depth) return true;
    if (c == '}' || c == ']') --depth;
  }
  return false;
}

// Sees each key as it is parsed.
class KeyWatcher {
 public:
  void See(Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start) {
      open_.emplace_back();
    } else if (event == Event::object_end) {
      open_.pop_back();
    } else if (event == Event::key && twice_.empty()) {
      Object& object = open_.back();
      object.key = value.get<std::string>();
      if (object.keys.insert(object.key).second) return;
      twice_ = "#";
      for (size_t i = 0; i + 1 < open_.size(); ++i) absl::StrAppend(&twice_, "/", open_[i].key);
      absl::StrAppend(&twice_, ": the key '", object.key, "' comes twice");
    }
  }
  // Where a key came twice, and which; empty: none did.
  const std::string& twice() const { return twice_; }

 private:
  struct Object {
    std::set<std::string> keys;
    std::string key;  // the last one
  };
  std::vector<Object> open_;
  std::string twice_;
};
}  // namespace

absl::StatusOr<Json> ParseSchemaText(absl::string_view text) {
  if (text.size() > kMaxSchemaBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schema has ", text.size(), " bytes: expected up to ", kMaxSchemaBytes));
  }
  if (IsDeeper(text, kMaxJsonDepth)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schema's JSON is nested more than ", kMaxJsonDepth, " levels deep"));
  }
  KeyWatcher watcher;
  Json root;
  try {
    root = Json::parse(text.begin(), text.end(),
                       [&watcher](int, Json::parse_event_t event, const Json& value) {
                         watcher.See(event, value);
                         return true;
                       });
  } catch (const Json::exception& e) {
    const std::string what = e.what();
    const size_t begin = what.find("] ");
    return absl::InvalidArgumentError(absl::StrCat(
        "the schema isn't JSON: ", begin == std::string::npos ? what : what.substr(begin + 2)));
  }
  if (!watcher.twice().empty()) return absl::InvalidArgumentError(watcher.twice());
  return root;
}
}  // namespace stretto::engine
