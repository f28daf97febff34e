// The state that one rank is to write, as it was when the snapshot was taken, while training goes
// on. Masters and moments stay as they are through the next step's forward and backward passes, so
// they are read where they are (or decoded from there, or read from their files, a piece at a time)
// by the thread that writes them (ForRuns). When the next update comes
// first, the training thread copies what is not written yet, and from then on the copy is read:
// saves that no update overtakes, a run's last among them, take no memory. Once one has been
// overtaken there is memory for a copy of the rank's share, which is kept, and the thread that
// writes copies all of it before it begins (Copy), so that training doesn't wait. Where the host
// doesn't reach the device's memory, Take copies all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
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
  absl::Span<const float> values;     // the copy
  const float* live = nullptr;        // where they are in the state, if the host reaches them
  const StatePart* source = nullptr;  // or what reads them from there
};

// Calls `run` with elements [begin, begin + count) of a part, in order, a run after another.
using RunsOfPart = std::function<void(const SnapshotPart& part, int64_t begin, int64_t count,
                                      absl::FunctionRef<void(absl::Span<const float>)> run)>;

class StateSnapshot final : public StateReader {
 public:
  explicit StateSnapshot(Clock& clock) : clock_(clock) {}

  // Begins a snapshot of the engine's state, and of the critic's if there is one; the former one
  // is over. On the training thread.
  static void Take(const std::shared_ptr<StateSnapshot>& snapshot, TrainerEngine& engine,
                   TrainerEngine* critic = nullptr);
  // Copies what nobody has copied yet, and waits for what others are copying. Any thread.
  void Copy();
  // Whether Copy is to be called before the parts are read: there is memory for it.
  bool wants_copy() const { return has_copied_; }
  // As RunsOfPart: from the state as long as it stays as it is, then from the copy. A run is short;
  // an update waits for its end. What can't be read is in status(), and its runs are of no use.
  void ForRuns(const SnapshotPart& part, int64_t begin, int64_t count,
               absl::FunctionRef<void(absl::Span<const float>)> run) const;
  // Parts of this kind won't be read any more, so nobody has to copy them.
  void Release(StateTensor which) { released_[static_cast<size_t>(which)] = true; }
  // On the training thread.
  void FinishReading() override;

  // What reading the state has come to; OK where it is in memory.
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
  // Elements [begin, begin + count) of a part, in `room` unless they lie in memory.
  const float* Find(const SnapshotPart& part, int64_t begin, int64_t count,
                    std::vector<float>& room) const ABSL_SHARED_LOCKS_REQUIRED(live_mutex_);

  Clock& clock_;
  std::unique_ptr<float[]> memory_;
  int64_t capacity_ = 0, num_elements_ = 0;
  std::vector<StatePart> sources_;
  std::vector<SnapshotPart> parts_;
  std::vector<Piece> pieces_;
  std::atomic<bool> has_copied_{false};  // since the memory was allocated
  std::atomic<bool> released_[3] = {};
  mutable absl::Mutex live_mutex_;
  bool is_live_ ABSL_GUARDED_BY(live_mutex_) = false;  // the state is what it was at Take
  std::atomic<size_t> next_{0};
  std::atomic<double> blocked_seconds_{0};
  mutable absl::Mutex mutex_;
  size_t num_copied_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable absl::Status status_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::engine
