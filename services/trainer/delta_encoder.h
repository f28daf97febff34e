// Encodes the deltas that generators ask for, beside the training: one thread for each that is
// asked for, tensor by tensor, so that the first are on their way while the last are encoded. What
// nobody holds any more costs nothing. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/weights/growing_tensors.h"
#include "engine/weights/store.h"

namespace stretto::services {
class DeltaEncoder {
 public:
  // `store` outlives the encoder.
  explicit DeltaEncoder(const engine::WeightsStore* store) : store_(store) {}
  ~DeltaEncoder();

  // The delta, of which tensors are still coming, maybe. FAILED_PRECONDITION: one of the versions
  // is not in the store, or the base is not the older one.
  absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>> Get(int64_t base_number,
                                                                    const std::string& base_hash,
                                                                    int64_t number,
                                                                    const std::string& hash);

 private:
  using Version = std::shared_ptr<const engine::WeightsVersion>;
  struct Job {
    int64_t base_number = 0, number = 0;
    std::string base_hash, hash;
    std::shared_ptr<engine::GrowingTensors> delta;
    std::atomic<bool> is_over{false};
    std::thread thread;
  };
  void Run(Job& job, const Version& base, const Version& next) const;
  void DropOld() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const engine::WeightsStore* store_;
  std::atomic<bool> stopping_{false};
  absl::Mutex mutex_;
  std::list<Job> jobs_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::services
