// Asks a user's Reward service (reward.proto). Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stretto::services {
struct RewardQuery {
  std::string run_id;
  std::string prompt_json;
  std::vector<std::string> completions;
};

class RewardClient {
 public:
  virtual ~RewardClient() = default;
  // One finite reward a completion. Each attempt has the timeout; a status other than OK, a wrong
  // count or a non-finite number fails it, and after `max_attempts` the last failure is the answer.
  // `cancelled` is asked between attempts. Blocks.
  virtual absl::StatusOr<std::vector<double>> GetRewards(
      const RewardQuery& query, const std::function<bool()>& cancelled) = 0;
  // Waits for a connection. UNAVAILABLE: nobody answers there, and what to do; trouble() says so
  // too. Blocks for at most `timeout_ms`.
  virtual absl::Status Probe(int64_t timeout_ms) = 0;
  // Failed attempts so far.
  virtual uint64_t num_failures() const = 0;
  // What keeps rewards from coming since the last one that came, for people; empty: nothing.
  virtual std::string trouble() const = 0;
};

struct RewardClientOptions {
  std::string address;
  int64_t timeout_ms = 10000;
  int64_t max_attempts = 3;
};
std::unique_ptr<RewardClient> MakeRewardClient(const RewardClientOptions& options);
}  // namespace stretto::services
