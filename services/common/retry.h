// Repeating a call that another process could not take now. Only UNAVAILABLE and RESOURCE_EXHAUSTED
// are repeated (protos/stretto/v1/common.proto); everything else is an answer. Waits are
// exponential with full jitter, so that the members of a pool don't come back in step.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "base/philox.h"
#include "services/common/stop_signal.h"

namespace stretto::services {
struct RetryOptions {
  int64_t initial_wait_ms = 50;
  int64_t max_wait_ms = 2000;
  int64_t max_attempts = 0;  // 0: until it succeeds or the end is requested
};

bool IsRetryable(const absl::Status& status);

// The waits of one series of attempts. Not thread-safe.
class Backoff {
 public:
  Backoff(const RetryOptions& options, uint64_t seed) : options_(options), random_(seed) {}
  // Uniform in [bound/2, bound], where the bound doubles from initial_wait_ms to max_wait_ms.
  int64_t NextWaitMs();
  void Reset() { bound_ms_ = 0; }

 private:
  RetryOptions options_;
  PhiloxStream random_;
  int64_t bound_ms_ = 0;
};

// Calls `attempt` until it returns OK or something that is an answer, attempts are used up (the
// last status), or `stop` is requested (CANCELLED with the last status' message). Blocks.
absl::Status Retry(const RetryOptions& options, const StopSignal& stop,
                   const std::function<absl::Status()>& attempt);

// A seed that differs between processes; for jitter only, never for what a run computes.
uint64_t JitterSeed();
}  // namespace stretto::services
