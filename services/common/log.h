// Log lines for people: "2024-05-01T12:00:00.123Z I generator-0] message", one event a line, to
// stderr and optionally to a file. The level comes from a flag or from STRETTO_LOG (error, warning,
// info, debug). Thread-safe. The only file that includes the logging package is log.cc.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace stretto::services {
enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogOptions {
  std::string name;   // stands in every line: the member's name
  std::string level;  // empty: STRETTO_LOG, else "info"
  std::string file;   // beside stderr; empty: none. Its folder is made
};
// InvalidArgument: an unknown level (the message lists them). Before the first call lines go to
// stderr at level info.
absl::Status InitLogging(const LogOptions& options);

bool LogEnabled(LogLevel level);
// Newlines inside `message` become spaces, so that a line stays a line.
void Log(LogLevel level, absl::string_view message);

template <class... Parts>
void LogAt(LogLevel level, const Parts&... parts) {
  if (LogEnabled(level)) Log(level, absl::StrCat(parts...));
}
template <class... Parts>
void LogDebug(const Parts&... parts) {
  LogAt(LogLevel::kDebug, parts...);
}
template <class... Parts>
void LogInfo(const Parts&... parts) {
  LogAt(LogLevel::kInfo, parts...);
}
template <class... Parts>
void LogWarning(const Parts&... parts) {
  LogAt(LogLevel::kWarning, parts...);
}
template <class... Parts>
void LogError(const Parts&... parts) {
  LogAt(LogLevel::kError, parts...);
}
}  // namespace stretto::services
