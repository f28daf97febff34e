// The command line's view of a run: asks its coordinator. The only file of the command line that
// speaks gRPC is coordinator_client.cc.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "stretto/v1/coordinator.pb.h"

namespace stretto::cli {
class CoordinatorClient {
 public:
  virtual ~CoordinatorClient() = default;
  // Both block for at most a few seconds. UNAVAILABLE: nobody answers there (now).
  virtual absl::StatusOr<v1::RunStatus> Status() = 0;
  virtual absl::StatusOr<v1::RunStatus> Control(v1::ControlRunRequest::Action action) = 0;
};
// Connects in the background; never blocks.
std::unique_ptr<CoordinatorClient> ConnectToCoordinator(const std::string& address);
}  // namespace stretto::cli
