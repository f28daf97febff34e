// The one event of a process's end: requested once, waited for by many. Carries the reason, which
// decides the exit code. Thread-safe.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace stretto::services {
class StopSignal {
 public:
  // Later requests change nothing. OK: a wanted end; anything else: why the service can't go on.
  void Request(absl::Status reason = absl::OkStatus()) {
    absl::MutexLock lock(&mutex_);
    if (requested_) return;
    requested_ = true;
    reason_ = std::move(reason);
  }
  bool requested() const {
    absl::MutexLock lock(&mutex_);
    return requested_;
  }
  absl::Status reason() const {
    absl::MutexLock lock(&mutex_);
    return reason_;
  }
  // Blocks until the end is requested.
  void Wait() const {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&requested_));
  }
  // Blocks for at most `timeout_ms`; whether the end has been requested.
  bool WaitFor(int64_t timeout_ms) const {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&requested_), absl::Milliseconds(timeout_ms));
  }

 private:
  mutable absl::Mutex mutex_;
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status reason_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::services
