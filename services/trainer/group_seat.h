// A rank's seat in the trainers' groups, one after the other (docs/parallel-training.md): where its
// peers will reach it, and the group it is in. Epochs only grow: what belongs to an older one is
// refused. Thread-safe; knows no gRPC.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "engine/collectives/direct_communicator.h"

namespace stretto::services {
class GroupSeat {
 public:
  // Peers are accepted at an address of this machine ("127.0.0.1", "0.0.0.0"). `carrier`: what a
  // group's payloads go through; null: TCP.
  explicit GroupSeat(std::string bind, engine::FrameCarrier carrier = nullptr)
      : bind_(std::move(bind)), carrier_(std::move(carrier)) {}

  // The host under which others reach this process, if not the address it listens at.
  void SetHost(std::string host);

  // Ends the group this rank is in (whatever it exchanges returns CANCELLED, here and there) and
  // gives the address ("host:port") at which the next one's peers are accepted. Repeating it for
  // the same epoch gives the same answer until that group has been joined. FAILED_PRECONDITION: the
  // epoch is an older one. Doesn't wait for anybody.
  absl::StatusOr<std::string> Prepare(uint64_t epoch);

  // Takes rank `rank` of the group that was prepared. Blocks until all are connected.
  // FAILED_PRECONDITION: another epoch was prepared.
  absl::StatusOr<std::shared_ptr<engine::Communicator>> Join(const engine::GroupTable& table,
                                                             int rank, absl::Duration timeout);

  // Ends the group this rank is in, for good: this process ends.
  void Leave();

 private:
  const std::string bind_;
  const engine::FrameCarrier carrier_;
  absl::Mutex mutex_;
  std::string host_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::optional<engine::Listener> listener_ ABSL_GUARDED_BY(mutex_);  // of epoch_
  std::string address_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<engine::Communicator> group_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::services
