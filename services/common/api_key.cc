#include "services/common/api_key.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/status.h"

namespace stretto::services {
namespace {
absl::Status CheckKey(absl::string_view key, const std::string& where) {
  const bool fits =
      std::all_of(key.begin(), key.end(), [](char c) { return absl::ascii_isgraph(c); });
  if (!key.empty() && fits) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      where, ": an API key is ", key.empty() ? "empty" : "not of visible ASCII alone"));
}

// 1 if they are equal; looks at every byte of `given` whatever it finds.
uint32_t IsEqual(absl::string_view given, absl::string_view key) {
  uint32_t difference = given.size() == key.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<uint8_t>(given[i]) ^ static_cast<uint8_t>(key[i % key.size()]);
  }
  return difference == 0 ? 1 : 0;
}
}  // namespace

absl::StatusOr<ApiKeys> ApiKeys::Read(const ApiKeySources& sources) {
  ApiKeys keys;
  for (const std::string& key : sources.given) {
    RETURN_IF_ERROR(CheckKey(key, "--api-key"));
    keys.keys_.push_back(key);
  }
  const char* value =
      sources.environment_key.empty() ? nullptr : std::getenv(sources.environment_key.c_str());
  if (value != nullptr) {
    RETURN_IF_ERROR(CheckKey(value, sources.environment_key));
    keys.keys_.emplace_back(value);
  }
  if (sources.file.empty()) return keys;
  auto text = Files::Real().ReadAll(sources.file);
  if (!text.ok()) return Annotate(text.status(), "--api-key-file");
  const size_t before = keys.keys_.size();
  int64_t number = 0;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    RETURN_IF_ERROR(CheckKey(line, absl::StrCat(sources.file, ":", number)));
    keys.keys_.emplace_back(line);
  }
  if (keys.keys_.size() == before) {
    return absl::InvalidArgumentError(absl::StrCat("--api-key-file ", sources.file, ": no keys"));
  }
  return keys;
}

bool ApiKeys::Allow(absl::string_view authorization) const {
  if (keys_.empty()) return true;
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return false;
  const absl::string_view given = absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
  uint32_t allowed = 0;
  for (const std::string& key : keys_) allowed |= IsEqual(given, key);
  return allowed != 0;
}
}  // namespace stretto::services
