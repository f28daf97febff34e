// The Communicator of every transport: over TCP, or with payloads through NCCL. Every rank
// exchanges one frame with every other in each collective ("direct" algorithms), so a rank pays
// what the ring algorithms pay,
//   AllGather, ReduceScatter (N−1)/N·M · AllReduce 2(N−1)/N·M · Broadcast M from the root,
// with one hop instead of N−1, each rank sees for itself who is silent, and sums can be added in
// the order of a tree. A thread of its own runs the operations, so the caller computes meanwhile.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/collectives/communicator.h"
#include "engine/collectives/rendezvous.h"
#include "engine/collectives/socket.h"

namespace stretto::engine {
struct CommunicatorOptions {
  absl::Duration timeout = absl::Seconds(60);          // of an operation, once it is its turn
  absl::Duration connect_timeout = absl::Seconds(60);  // of the group's making
  // Asked a few times a second while the group is made: true ends that with CANCELLED.
  std::function<bool()> is_cancelled = nullptr;
  // What carries payloads; null: the TCP connections that the group is made with.
  FrameCarrier carrier = nullptr;
};

// Takes rank `rank` of `group`, whose member accepts peers at `listener`. Blocks until every rank
// is connected to every other. FAILED_PRECONDITION: the epoch is over. DEADLINE_EXCEEDED or
// UNAVAILABLE names a rank that can't be reached.
absl::StatusOr<std::unique_ptr<Communicator>> ConnectGroup(Listener listener,
                                                           const GroupTable& group, int rank,
                                                           const CommunicatorOptions& options);

// A group that needs nobody else.
absl::StatusOr<std::unique_ptr<Communicator>> GroupOfOne(const std::string& name);

// Opens a listener at `registration.address` (host, or host:port), registers at the rendezvous
// (host:port) and connects.
absl::StatusOr<std::unique_ptr<Communicator>> JoinGroup(const std::string& rendezvous,
                                                        Registration registration,
                                                        const CommunicatorOptions& options);
}  // namespace stretto::engine
