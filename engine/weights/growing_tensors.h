// The tensors of a transfer while they come in, one after the other and without holes: written by
// one receiver, read by any number of others from the first byte on, so that whoever receives can
// pass on what it has so far. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/weights/version.h"

namespace stretto::engine {
// Bytes from `offset` of tensor `tensor` on; `last` is the tensor's end.
struct TensorPiece {
  size_t tensor = 0, offset = 0;
  std::string data;
  bool last = false;
};

class GrowingTensors {
 public:
  // Tensor i has at most limits[i] bytes; exactly so many when `exact`.
  GrowingTensors(std::vector<int64_t> limits, bool exact);
  // All of them are here.
  explicit GrowingTensors(std::vector<SharedBytes> tensors);

  // The next piece: DATA_LOSS for one that isn't where the last has ended, or is too long.
  absl::Status Add(size_t tensor, size_t offset, absl::string_view data, bool last);
  // The next tensor as a whole; must not follow a piece of one.
  void AddTensor(SharedBytes tensor);
  // Nothing more comes: readers are given `status` once they have read what is here.
  void Fail(const absl::Status& status);
  // Where the next piece begins.
  TensorPiece End() const;
  uint64_t bytes_added() const;
  // All tensors; DATA_LOSS while some are missing.
  absl::StatusOr<std::vector<SharedBytes>> Tensors() const;

  // Tensor i once it is whole; the failure if it will never be.
  absl::StatusOr<SharedBytes> AwaitTensor(size_t i) const;

  enum class Found { kPiece, kNothingYet, kEnd };
  // The bytes that follow `piece`, at most `max_bytes`, replace it; before the first call it is
  // where reading begins, with no data. Waits for at most `timeout`. DATA_LOSS: there is no such
  // place.
  absl::StatusOr<Found> Next(TensorPiece& piece, size_t max_bytes, absl::Duration timeout) const;

 private:
  bool HasMore(size_t tensor, size_t offset) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<int64_t> limits_;
  const bool exact_;
  mutable absl::Mutex mutex_;
  std::vector<SharedBytes> done_ ABSL_GUARDED_BY(mutex_);
  Bytes current_ ABSL_GUARDED_BY(mutex_);  // of tensor done_.size()
  uint64_t bytes_added_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::engine
