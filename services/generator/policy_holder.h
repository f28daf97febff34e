// The policy versions of a generator: the one in use and, beside it, the next one prepared. A
// version is fetched, verified by hash and laid out for the device in the caller's thread while
// generation goes on; only a complete and verified version can be committed. Thread-safe. Knows no
// gRPC.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/inference/engine.h"
#include "services/common/model_host.h"
#include "services/common/weights_fetch.h"
#include "services/common/weights_relay.h"

namespace stretto::services {
using WeightsFetcher = std::function<absl::StatusOr<FetchedWeights>(const FetchRequest&)>;

struct PreparedInfo {
  uint64_t bytes_received = 0;
  bool was_delta = false;
  double seconds = 0;
  double transfer_seconds = 0;  // of them, until its bytes were here
  double layout_seconds = 0;    // and for the device's layout, once the bytes were verified
  int num_sources_left = 0;     // that failed on the way
};

class PolicyHolder {
 public:
  ~PolicyHolder();
  // Version 0 from the model's files, laid out. `host` outlives the holder.
  static absl::StatusOr<std::unique_ptr<PolicyHolder>> Create(const ModelHost* host,
                                                              WeightsFetcher fetcher);

  // Makes the memory ready that new versions take, so that the first ones are prepared as fast as
  // those that find what earlier ones have left. In the background; for members of a run.
  void ReserveMemory();

  // Blocks until the version is ready. A version counts from when a source has shown that it has
  // it: an announcement that nobody stands behind holds up nothing. Then one at a time: a repeat
  // waits for the first and has its result; an older version than one that counts is ABORTED.
  // `cancelled` is asked now and then, whatever is being waited for.
  absl::StatusOr<PreparedInfo> Prepare(int64_t number, const std::string& hash,
                                       const std::string& run_id,
                                       const std::vector<std::string>& sources,
                                       const std::function<bool()>& cancelled);
  // Ends what is being prepared, and refuses to prepare anything from now on.
  void StopPreparing();
  // The version as the engine uses it. FAILED_PRECONDITION: it is neither prepared nor in use.
  absl::StatusOr<engine::ServedWeights> Get(int64_t number, const std::string& hash) const;
  // It is in use from now on; the one before is let go.
  void Committed(int64_t number, const std::string& hash);
  // Number and hash of the version in use.
  std::pair<int64_t, std::string> Current() const;
  engine::ServedWeights CurrentWeights() const;
  // What other generators may fetch from this one.
  WeightsRelay& relay() { return relay_; }

 private:
  struct Held {
    std::shared_ptr<const engine::WeightsVersion> version =
        nullptr;  // host bytes: the base of the next delta
    std::shared_ptr<const engine::ModelWeights> weights = nullptr;
    bool Is(int64_t number, const std::string& hash) const {
      return version != nullptr && version->number == number && version->hash == hash;
    }
    engine::ServedWeights Served() const {
      return {.weights = weights, .version = version->number, .hash = version->hash};
    }
  };
  PolicyHolder(const ModelHost* host, WeightsFetcher fetcher)
      : host_(host), fetcher_(std::move(fetcher)), expected_(ManifestOf(*host)) {}

  // One call of Prepare.
  struct Turn {
    FetchRequest request;
    std::function<bool()> cancelled;  // the caller's
    bool counts = false;              // a source has it, or it is here
    int64_t superseded_by = -1;       // a newer one that has come to count since the call
    bool is_taken = false;
    bool is_here = false;                                           // nothing is to be fetched
    std::shared_ptr<const engine::ModelWeights> base_weights = {};  // of request.base
  };
  // Why the version is not wanted any more, or OK.
  absl::Status Wanted(const Turn& turn) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Waits until no other is prepared. What comes of an error is the same for the whole call.
  absl::Status TakeTurn(Turn* turn);
  absl::Status AwaitTurn(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the version builds on; or that it is here.
  void FindBase(Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Holds(const std::string& hash) const;
  absl::StatusOr<PreparedInfo> Fetch(Turn* turn);

  const ModelHost* host_;
  const WeightsFetcher fetcher_;
  const engine::Manifest expected_;
  WeightsRelay relay_;
  std::atomic<bool> is_ending_{false};
  std::thread reserver_;
  mutable absl::Mutex mutex_;
  bool is_preparing_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Turn*> turns_ ABSL_GUARDED_BY(mutex_);  // of the calls under way
  Held current_ ABSL_GUARDED_BY(mutex_);
  Held prepared_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::services
