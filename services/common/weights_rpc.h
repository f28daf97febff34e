// Both ends of the Weights service (weights.proto): serving the versions of a store, and fetching
// one from whoever has it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/weights/store.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
// Serves what `store` holds; `store` outlives it. `await_deltas(version number)`, if given, is
// called before a manifest is sent and may block for a while until deltas to that version are in
// the store.
std::unique_ptr<grpc::Service> MakeWeightsService(const engine::WeightsStore* store,
                                                  std::function<void(int64_t)> await_deltas = {});

struct FetchRequest {
  std::string run_id;
  int64_t number = 0;
  std::string hash;                  // proves the version; must not be empty
  std::vector<std::string> sources;  // addresses, tried in order
  // What the version must consist of (hashes ignored): the tensors of this process's model.
  engine::Manifest expected;
  // A version that is here already, as a base for a delta; may be null.
  std::shared_ptr<const engine::WeightsVersion> base = nullptr;
  std::function<bool()> cancelled;  // asked between messages; may be empty
  int64_t timeout_ms = 120000;      // of each call
};

struct FetchedWeights {
  std::shared_ptr<const engine::WeightsVersion> version = nullptr;
  uint64_t bytes_received = 0;
  bool was_delta = false;
};

// Manifest, then the delta from `base` where the source has it, else the snapshot. Everything is
// verified by hash before it is returned; a delta that does not verify is followed by the snapshot,
// a source that fails by the next one. The error is the last source's. Blocks.
absl::StatusOr<FetchedWeights> FetchWeights(const FetchRequest& request);
}  // namespace stretto::services
