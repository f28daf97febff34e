// Encodes the deltas to a new version beside the training: one thread, one job, the newest version
// wins. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "engine/weights/store.h"

namespace stretto::services {
class DeltaEncoder {
 public:
  // `store` outlives the encoder.
  explicit DeltaEncoder(engine::WeightsStore* store);
  ~DeltaEncoder();

  // Deltas from every older version of the store to `version` are wanted, the newest base first.
  void Encode(std::shared_ptr<const engine::WeightsVersion> version);
  // Blocks until the deltas to this version are there, or it is no longer being encoded, or
  // `timeout_ms` have passed.
  void WaitFor(int64_t number, int64_t timeout_ms);

 private:
  void Run();

  engine::WeightsStore* store_;
  absl::Mutex mutex_;
  std::shared_ptr<const engine::WeightsVersion> wanted_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const engine::WeightsVersion> working_on_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};
}  // namespace stretto::services
