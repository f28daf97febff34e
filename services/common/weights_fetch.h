// Fetching a policy version from whoever has it, or is receiving it itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/weights/version.h"

namespace stretto::services {
class WeightsRelay;

struct FetchRequest {
  std::string run_id;
  int64_t number = 0;
  std::string hash;                  // proves the version; must not be empty
  std::vector<std::string> sources;  // addresses, best first
  // What the version must consist of (hashes ignored): the tensors of this process's model.
  engine::Manifest expected;
  // A version that is here already, as a base for a delta; may be null.
  std::shared_ptr<const engine::WeightsVersion> base = nullptr;
  WeightsRelay* relay = nullptr;    // is told of what comes in; may be null
  std::function<bool()> cancelled;  // asked now and then; may be empty
  // Called once a source has shown that it has the version, before anything of it is asked for. It
  // may block, and set `base`; an error of it ends the fetching. May be empty.
  std::function<absl::Status()> found = nullptr;
  // Called before bytes are applied and verified, from any thread; what it returns is held
  // meanwhile. May be empty.
  std::function<std::shared_ptr<void>()> begin_computing = nullptr;
  int64_t timeout_ms = 120000;  // of each call
  // Without a byte or a sign of life for so long a source is left for the next, if there is one.
  int64_t stall_ms = 2000;
  int64_t first_answer_ms = 6000;  // a source may wait until it has what is asked for
  int64_t last_stall_ms = 15000;   // the same for a source without another, from the first moment
  // It is asked again meanwhile, from where it was, over a new connection: on one that was cut off
  // TCP sends again only after a pause that grows with the time for which the network was away.
  int64_t reconnect_ms = 3000;
};

struct FetchedWeights {
  std::shared_ptr<const engine::WeightsVersion> version = nullptr;
  uint64_t bytes_received = 0;
  bool was_delta = false;
  int num_sources_left = 0;     // that failed on the way
  double transfer_seconds = 0;  // until all bytes were here, yet to be applied
};

// The delta from `base`, from the first source that has it, else the snapshot. A source that breaks
// off is left for the next one, which goes on where it was. Everything is verified by hash before
// it is returned; a delta that does not verify is fetched anew from the next source and at last
// replaced by the snapshot. The error is the last source's. Blocks.
absl::StatusOr<FetchedWeights> FetchWeights(const FetchRequest& request);
}  // namespace stretto::services
