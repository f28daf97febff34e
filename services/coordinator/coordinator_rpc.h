// The Coordinator service of protos/stretto/v1/coordinator.proto, over a Coordinator.
#pragma once

#include <memory>

#include "services/coordinator/coordinator.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
// `coordinator` outlives the service.
std::unique_ptr<grpc::Service> MakeCoordinatorService(Coordinator* coordinator);
}  // namespace stretto::services
