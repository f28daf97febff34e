// The gRPC face of a scorer (scorer.proto).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "services/common/fence.h"
#include "services/common/metrics.h"
#include "services/common/model_host.h"
#include "services/scorer/judge.h"
#include "services/scorer/reference.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
struct ScorerParts {
  const ModelHost* host = nullptr;
  Judge* judge = nullptr;
  std::vector<std::string> stop_strings = {};  // of the run's completions
  Reference* reference = nullptr;              // null: this run asks for no reference log-probs
  const Fence* fence = nullptr;
  Metrics* metrics = nullptr;
};
// All parts outlive the service.
std::unique_ptr<grpc::Service> MakeScorerService(const ScorerParts& parts);
}  // namespace stretto::services
