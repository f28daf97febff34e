// Fencing (protos/stretto/v1/common.proto): which run and which epoch this member was given, and
// whether a caller may still speak to it. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace stretto::services {
class Fence {
 public:
  void Set(std::string run_id, uint64_t epoch) {
    absl::MutexLock lock(&mutex_);
    run_id_ = std::move(run_id);
    epoch_ = epoch;
  }
  // OK for tools (epoch 0), and for callers that know this member's run and epoch;
  // FAILED_PRECONDITION with the current epoch for others. UNAVAILABLE for a later epoch: the
  // coordinator has given it already, its answer is on the way to this member.
  absl::Status Check(absl::string_view run_id, uint64_t epoch) const {
    if (epoch == 0) return absl::OkStatus();
    absl::MutexLock lock(&mutex_);
    if (!run_id.empty() && !run_id_.empty() && run_id != run_id_) {
      return absl::FailedPreconditionError(
          absl::StrCat("this member belongs to run '", run_id_, "', not '", run_id, "'"));
    }
    if (epoch > epoch_) {
      return absl::UnavailableError(
          absl::StrCat("epoch ", epoch, " has not reached this member; its epoch is ", epoch_));
    }
    if (epoch != epoch_) {
      return absl::FailedPreconditionError(
          absl::StrCat("epoch ", epoch, " is not this member's; its epoch is ", epoch_));
    }
    return absl::OkStatus();
  }
  uint64_t epoch() const {
    absl::MutexLock lock(&mutex_);
    return epoch_;
  }
  std::string run_id() const {
    absl::MutexLock lock(&mutex_);
    return run_id_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string run_id_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
};
}  // namespace stretto::services
