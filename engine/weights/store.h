// The newest few versions that a process holds, and the deltas between them. Thread-safe; what it
// returns is immutable and stays valid after it has been dropped here.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/weights/delta.h"
#include "engine/weights/version.h"

namespace stretto::engine {
class WeightsStore {
 public:
  // Keeps `max_versions` >= 1 versions and the deltas between them.
  explicit WeightsStore(int max_versions) : max_versions_(max_versions) {}

  // Becomes the newest; the oldest goes when there are too many. A version that is here already
  // (number and hash) stays; one of the same or a later number with another hash is replaced: the
  // owner went back and took another way.
  void Put(std::shared_ptr<const WeightsVersion> version);
  // Lets the oldest go where the next would make them too many.
  void MakeRoom();
  // Ignored when one of its ends is no longer here.
  void PutDelta(std::shared_ptr<const VersionDelta> delta);

  // NOT_FOUND names the versions that are here. An empty hash matches any.
  absl::StatusOr<std::shared_ptr<const WeightsVersion>> Get(int64_t number,
                                                            const std::string& hash) const;
  absl::StatusOr<std::shared_ptr<const WeightsVersion>> Newest() const;
  // FAILED_PRECONDITION when it isn't here.
  absl::StatusOr<std::shared_ptr<const VersionDelta>> GetDelta(int64_t base_number,
                                                               const std::string& base_hash,
                                                               int64_t number,
                                                               const std::string& hash) const;
  // All deltas that lead to this version.
  std::vector<std::shared_ptr<const VersionDelta>> DeltasTo(const WeightsVersion& version) const;
  // Oldest first.
  std::vector<std::shared_ptr<const WeightsVersion>> Versions() const;

 private:
  bool Has(int64_t number, const std::string& hash) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropOrphans() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int max_versions_;
  mutable absl::Mutex mutex_;
  std::deque<std::shared_ptr<const WeightsVersion>> versions_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const VersionDelta>> deltas_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::engine
