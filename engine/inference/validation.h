// Checks of requests before they enter the engine. Each refusal names the field, its value and what
// is expected.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "engine/inference/request.h"

namespace stretto::engine {
struct RequestLimits {
  int64_t vocab_size = 0;
  int64_t max_context = 0;      // tokens of prompt and completion together
  bool cache_is_short = false;  // it is the KV cache that allows no longer context
  bool has_text = false;        // the engine has a TextDecoder
};
inline constexpr size_t kMaxStopStrings = 32;
inline constexpr size_t kMaxStopStringBytes = 1024;
inline constexpr size_t kMaxStopIds = 1024;
inline constexpr size_t kMaxLogitBias = 4096;  // each costs every token of every sample a little

// An InvalidArgument about a field of Request or SamplingParams; the payload kFieldPayload names
// it, for callers that know the field by another name.
inline constexpr char kFieldPayload[] = "stretto.engine.field";
inline absl::Status RefuseField(absl::string_view field, absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kFieldPayload, absl::Cord(field));
  return status;
}

// InvalidArgument, or OK.
absl::Status ValidateRequest(const Request& request, const RequestLimits& limits);
}  // namespace stretto::engine
