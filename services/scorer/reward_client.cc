#include "services/scorer/reward_client.h"

#include <atomic>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "services/common/retry.h"
#include "stretto/v1/reward.grpc.pb.h"

namespace stretto::services {
namespace {
class RewardClientImpl final : public RewardClient {
 public:
  explicit RewardClientImpl(const RewardClientOptions& options)
      : options_(options), stub_(v1::Reward::NewStub(MakeChannel(options.address))) {}

  absl::StatusOr<std::vector<double>> GetRewards(const RewardQuery& query,
                                                 const std::function<bool()>& cancelled) override {
    Backoff backoff({.initial_wait_ms = 100, .max_wait_ms = 2000}, JitterSeed());
    for (int64_t attempt = 1;; ++attempt) {
      absl::StatusOr<std::vector<double>> rewards = Ask(query);
      if (rewards.ok()) return rewards;
      ++num_failures_;
      LogWarning("reward service ", options_.address, ", attempt ", attempt, " of ",
                 options_.max_attempts, ": ", rewards.status().ToString());
      if (attempt >= options_.max_attempts || cancelled()) {
        return Annotate(rewards.status(), absl::StrCat("reward service ", options_.address));
      }
      Clock::Real().SleepNs(backoff.NextWaitMs() * 1'000'000);
    }
  }
  uint64_t num_failures() const override { return num_failures_; }

 private:
  absl::StatusOr<std::vector<double>> Ask(const RewardQuery& query) {
    v1::GetRewardsRequest request;
    request.set_run_id(query.run_id);
    request.set_prompt_json(query.prompt_json);
    for (const std::string& completion : query.completions) request.add_completions(completion);
    v1::GetRewardsResponse response;
    grpc::ClientContext context;
    SetDeadline(context, options_.timeout_ms);
    RETURN_IF_ERROR(FromGrpc(stub_->GetRewards(&context, request, &response)));
    if (response.rewards_size() != request.completions_size()) {
      return absl::InternalError(absl::StrCat(response.rewards_size(), " rewards for ",
                                              request.completions_size(), " completions"));
    }
    for (const double reward : response.rewards()) {
      if (!std::isfinite(reward)) {
        return absl::InternalError(absl::StrCat("a reward is ", reward));
      }
    }
    return std::vector<double>(response.rewards().begin(), response.rewards().end());
  }

  const RewardClientOptions options_;
  std::unique_ptr<v1::Reward::Stub> stub_;
  std::atomic<uint64_t> num_failures_{0};
};
}  // namespace

std::unique_ptr<RewardClient> MakeRewardClient(const RewardClientOptions& options) {
  return std::make_unique<RewardClientImpl>(options);
}
}  // namespace stretto::services
