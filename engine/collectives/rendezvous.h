// How ranks find one another. A group is a table: its name, a membership epoch, and the members in
// order of rank with the addresses at which they accept peers. Whoever coordinates a run may make
// the table and hand it out; without one, a RendezvousHost at a known address does.
//
// Fencing: an epoch is one life of a group. A group that lost a member, or is to have another one,
// is formed anew under a higher epoch; whoever comes with a lower one is refused with
// FAILED_PRECONDITION and the current epoch, by the host and by every peer.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/collectives/communicator.h"
#include "engine/collectives/socket.h"

namespace stretto::engine {
struct Registration {
  std::string group;
  int64_t epoch = 0;
  int rank = 0;
  int world_size = 0;
  std::string name;
  std::string address;  // where it accepts peers
};

// Gathers the members of one group after the other. A thread of its own; ends with the object, and
// whoever waits is then told so.
class RendezvousHost {
 public:
  explicit RendezvousHost(Listener listener);
  ~RendezvousHost();
  RendezvousHost(const RendezvousHost&) = delete;
  RendezvousHost& operator=(const RendezvousHost&) = delete;
  const std::string& address() const { return listener_.address(); }

 private:
  void Serve();

  Listener listener_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// Blocks until all members of the epoch have registered at `host`.
//   DEADLINE_EXCEEDED    names the ranks that did not come
//   FAILED_PRECONDITION  the epoch is over, or its group has been formed already
//   INVALID_ARGUMENT     rank, world size or name don't fit what others have registered
absl::StatusOr<GroupTable> Register(const std::string& host, const Registration& registration,
                                    absl::Duration timeout);
}  // namespace stretto::engine
