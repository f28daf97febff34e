// Encodes the deltas that generators ask for, beside the training, tensor by tensor, so that the
// first are on their way while the last are encoded: each that is asked for in a thread of its own,
// and in as many as the trainer has while it has nothing else to do. What nobody holds any more
// costs nothing. Thread-safe.
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
  // `store` outlives the encoder. `num_threads`: of a trainer that has nothing else to do.
  DeltaEncoder(const engine::WeightsStore* store, int num_threads)
      : store_(store), num_threads_(num_threads) {}
  ~DeltaEncoder();

  // The delta, of which tensors are still coming, maybe. FAILED_PRECONDITION: one of the versions
  // is not in the store, or the base is not the older one.
  absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>> Get(int64_t base_number,
                                                                    const std::string& base_hash,
                                                                    int64_t number,
                                                                    const std::string& hash);

  // Whether the trainer computes: deltas that are asked for meanwhile leave it its processors.
  void SetTrainerBusy(bool is_busy) { is_trainer_busy_ = is_busy; }

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
  const int num_threads_;
  std::atomic<bool> stopping_{false}, is_trainer_busy_{false};
  absl::Mutex mutex_;
  std::list<Job> jobs_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::services
