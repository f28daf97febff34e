// A member's side of the membership (coordinator.proto): registers, renews the lease, registers
// again when its epoch is old or the coordinator has come back, leaves at the end.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/common/fence.h"
#include "services/common/stop_signal.h"
#include "stretto/v1/common.pb.h"

namespace stretto::services {
struct MemberOptions {
  v1::Pool pool = v1::POOL_UNSPECIFIED;
  std::string name;
  std::string address;  // where this member is reached
  std::string config_hash;
  v1::NumericProfile profile;
  // What the member holds now; any thread.
  std::function<v1::PolicyVersion()> version;
  // What a person should know of the member now, told with each heartbeat; any thread. May be
  // empty.
  std::function<std::string()> notice;
  // Where the coordinator is now; asked before each attempt to connect, because a coordinator that
  // is started again may have another port.
  std::function<absl::StatusOr<std::string>()> coordinator_address;
};

// One thread of its own. What it learns goes to `fence` (run id, epoch) and `stop`: requested with
// OK when the run has ended, with the coordinator's reason when it refuses the member.
class MemberClient {
 public:
  // `fence` and `stop` outlive the client. Returns at once; joining goes on in the background for
  // as long as it takes.
  static std::unique_ptr<MemberClient> Start(MemberOptions options, Fence* fence, StopSignal* stop);
  virtual ~MemberClient() = default;
  // Ends the thread and says good-bye, for at most about a second. At most once.
  virtual void Leave() = 0;
};

// Peak resident memory of this process since it started (VmHWM), 0 if unknown.
uint64_t PeakRssBytes();
}  // namespace stretto::services
