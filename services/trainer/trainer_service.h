// The gRPC face of a trainer (trainer.proto).
#pragma once

#include <memory>

#include "services/common/fence.h"
#include "services/common/model_host.h"
#include "services/trainer/policy_trainer.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
// All outlive the service.
std::unique_ptr<grpc::Service> MakeTrainerService(PolicyTrainer* trainer, GroupSeat* seat,
                                                  const ModelHost* host, const Fence* fence);
}  // namespace stretto::services
