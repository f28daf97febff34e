#include "services/common/retry.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace stretto::services {
bool IsRetryable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status);
}

int64_t Backoff::NextWaitMs() {
  bound_ms_ = bound_ms_ == 0 ? options_.initial_wait_ms : bound_ms_ * 2;
  bound_ms_ = std::clamp<int64_t>(bound_ms_, 1, std::max<int64_t>(1, options_.max_wait_ms));
  const int64_t half = bound_ms_ / 2;
  return half + static_cast<int64_t>(random_.Below(static_cast<uint64_t>(bound_ms_ - half) + 1));
}

absl::Status Retry(const RetryOptions& options, const StopSignal& stop,
                   const std::function<absl::Status()>& attempt) {
  Backoff backoff(options, JitterSeed());
  for (int64_t i = 1;; ++i) {
    absl::Status status = attempt();
    if (!IsRetryable(status)) return status;
    if (options.max_attempts > 0 && i >= options.max_attempts) return status;
    if (stop.WaitFor(backoff.NextWaitMs())) {
      return absl::CancelledError(absl::StrCat("stopping; last answer: ", status.message()));
    }
  }
}

uint64_t JitterSeed() {
  return static_cast<uint64_t>(Clock::Real().NowNs()) ^ (static_cast<uint64_t>(getpid()) << 40);
}
}  // namespace stretto::services
