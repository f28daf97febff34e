// Serving policy versions (weights.proto): from a store of complete ones (trainers), or as they
// come in (weights_relay.h). Fetching them: weights_fetch.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/weights/growing_tensors.h"
#include "engine/weights/store.h"
#include "services/common/metrics.h"
#include "stretto/v1/weights.pb.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
// What a Weights service hands out. Thread-safe; calls may block for a few seconds.
class WeightsProvider {
 public:
  virtual ~WeightsProvider() = default;
  // version.number() < 0: the newest. NOT_FOUND names the versions that are here.
  virtual absl::StatusOr<v1::WeightsManifest> Manifest(const v1::PolicyVersion& version) = 0;
  virtual absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>> Snapshot(
      const v1::PolicyVersion& version) = 0;
  // FAILED_PRECONDITION: no such delta.
  virtual absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>> Delta(
      const v1::PolicyVersion& base, const v1::PolicyVersion& version) = 0;
};

// What `store` holds; it outlives the provider. `make_delta`, if given, can make the deltas between
// any two versions of the store that it doesn't hold; they may grow while they are sent.
using MakeDelta = std::function<absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>>(
    const v1::PolicyVersion& base, const v1::PolicyVersion& version)>;
std::unique_ptr<WeightsProvider> ProvideStore(const engine::WeightsStore* store,
                                              MakeDelta make_delta = {});

// Both outlive the service.
std::unique_ptr<grpc::Service> MakeWeightsService(WeightsProvider* provider, Metrics* metrics);

v1::PolicyVersion ToProto(int64_t number, const std::string& hash);
// Without delta bases.
v1::WeightsManifest ToProto(const engine::WeightsVersion& version);
}  // namespace stretto::services
