// Checks of requests before they enter the engine. Each refusal names the field, its value and what
// is expected.
#pragma once

#include "absl/status/status.h"
#include "engine/inference/request.h"

namespace stretto::engine {
struct RequestLimits {
  int64_t vocab_size = 0;
  int64_t max_context = 0;  // tokens of prompt and completion together
  bool has_text = false;    // the engine has a TextDecoder
};
inline constexpr size_t kMaxStopStrings = 32;
inline constexpr size_t kMaxStopStringBytes = 1024;
inline constexpr size_t kMaxStopIds = 1024;

// InvalidArgument, or OK.
absl::Status ValidateRequest(const Request& request, const RequestLimits& limits);
}  // namespace stretto::engine
