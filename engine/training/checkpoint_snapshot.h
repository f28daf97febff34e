// A copy in memory of the state that one rank is to write, made while training goes on: masters and
// moments stay as they are through the next step's forward and backward passes, so they are copied
// meanwhile by the thread that writes them. When the next update comes first, the training thread
// copies what is left. Where the host doesn't reach the device's memory, Take copies all of it.
//
// The memory is kept for the next snapshot: one copy of the rank's share of masters and moments.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "engine/training/checkpoint_manifest.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine {
// What a snapshot holds of a tensor.
struct SnapshotPart {
  StateTensor which = StateTensor::kMaster;
  std::string name;
  std::vector<int64_t> shape;  // of the whole tensor
  TensorBox box;
  int64_t begin = 0;
  absl::Span<const float> values;
};

class StateSnapshot final : public StateReader {
 public:
  explicit StateSnapshot(Clock& clock) : clock_(clock) {}

  // Begins a snapshot of the engine's state, and of the critic's if there is one; the former one
  // is over. On the training thread.
  static void Take(const std::shared_ptr<StateSnapshot>& snapshot, TrainerEngine& engine,
                   TrainerEngine* critic = nullptr);
  // Copies what nobody has copied yet, and waits for what others are copying. Any thread.
  void Copy();
  // On the training thread.
  void FinishReading() override;

  // What reading the state came to; OK where it is in memory.
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  // Whole after Copy.
  const std::vector<SnapshotPart>& parts() const { return parts_; }
  size_t bytes() const { return static_cast<size_t>(num_elements_) * sizeof(float); }
  // Of the training thread, in FinishReading, since Take.
  double blocked_seconds() const { return blocked_seconds_.load(); }

 private:
  struct Piece {
    const float* from;  // null: `part` is read, from `first` on
    float* to;
    int64_t count;
    const StatePart* part;
    int64_t first;
  };
  void AddPart(const StatePart& part, absl::string_view prefix, float* to, TrainerEngine& engine);

  Clock& clock_;
  std::unique_ptr<float[]> memory_;
  int64_t capacity_ = 0, num_elements_ = 0;
  std::vector<StatePart> sources_;
  std::vector<SnapshotPart> parts_;
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<double> blocked_seconds_{0};
  mutable absl::Mutex mutex_;
  size_t num_copied_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::engine
