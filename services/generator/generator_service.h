// The gRPC face of a generator (generator.proto). All it does is translate: the work is the
// GenerationLoop's and the PolicyHolder's.
#pragma once

#include <memory>

#include "engine/constrain/constraint.h"
#include "engine/inference/engine.h"
#include "services/common/fence.h"
#include "services/common/model_host.h"
#include "services/generator/generation_loop.h"
#include "services/generator/policy_holder.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
struct GeneratorParts {
  const ModelHost* host = nullptr;
  PolicyHolder* policy = nullptr;
  GenerationLoop* loop = nullptr;
  const Fence* fence = nullptr;
  engine::ConstraintCache* constraints = nullptr;
  Metrics* metrics = nullptr;
  engine::SwapPolicy swap_policy = engine::SwapPolicy::kFinish;
};
// All parts outlive the service.
std::unique_ptr<grpc::Service> MakeGeneratorService(const GeneratorParts& parts);
}  // namespace stretto::services
