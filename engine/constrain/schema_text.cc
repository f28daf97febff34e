#include "engine/constrain/schema_text.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/json_keys.h"
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
  RepeatedKey<Json> repeated;
  Json root;
  try {
    root = Json::parse(text.begin(), text.end(),
                       [&repeated](int, Json::parse_event_t event, const Json& value) {
                         return repeated.See(event, value);
                       });
  } catch (const Json::exception& e) {
    const std::string what = e.what();
    const size_t begin = what.find("] ");
    return absl::InvalidArgumentError(absl::StrCat(
        "the schema isn't JSON: ", begin == std::string::npos ? what : what.substr(begin + 2)));
  }
  if (repeated.found()) {
    return absl::InvalidArgumentError(
        absl::StrCat("#", repeated.place(), ": the key '", repeated.key(), "' comes twice"));
  }
  return root;
}
}  // namespace stretto::engine
