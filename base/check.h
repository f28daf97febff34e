// CHECK-style assertions: for what only a bug in this program can cause. What the world may do (bad
// files, lost peers, full disks) is an absl::Status instead.
#pragma once

namespace stretto {
// Prints "file:line: check failed: condition message" to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const char* message = "");
}  // namespace stretto

#define STRETTO_CHECK(cond)                              \
  do {                                                   \
    if (!(cond)) [[unlikely]]                            \
      ::stretto::CheckFailed(__FILE__, __LINE__, #cond); \
  } while (0)
#define STRETTO_CHECK_MSG(cond, msg)                            \
  do {                                                          \
    if (!(cond)) [[unlikely]]                                   \
      ::stretto::CheckFailed(__FILE__, __LINE__, #cond, (msg)); \
  } while (0)
