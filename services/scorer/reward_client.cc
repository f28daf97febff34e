#include "services/scorer/reward_client.h"

#include <atomic>
#include <cmath>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "base/status.h"
#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "services/common/retry.h"
#include "stretto/v1/reward.grpc.pb.h"

namespace stretto::services {
namespace {
// What whoever runs it can do.
absl::string_view AdviceOn(const absl::Status& trouble) {
  switch (trouble.code()) {
    case absl::StatusCode::kUnavailable:
      return "Start it, or correct the reward's address in the run file (docs/run-file.md); "
             "rewards "
             "wait for it";
    case absl::StatusCode::kUnimplemented:
      return "What listens there is no stretto.v1.Reward service: correct the reward's address in "
             "the run file, or what it serves (protos/stretto/v1/reward.proto); rewards wait for "
             "it";
    case absl::StatusCode::kDeadlineExceeded:
      return "It is there but slow: the reward's timeout_ms in the run file says how long it may "
             "take; rewards wait for it";
    default:
      return "It is there but failed: its own log says why; rewards wait for it";
  }
}

class RewardClientImpl final : public RewardClient {
 public:
  explicit RewardClientImpl(const RewardClientOptions& options)
      : options_(options),
        channel_(MakeChannel(options.address)),
        stub_(v1::Reward::NewStub(channel_)) {}

  absl::StatusOr<std::vector<double>> GetRewards(const RewardQuery& query,
                                                 const std::function<bool()>& cancelled) override {
    Backoff backoff({.initial_wait_ms = 100, .max_wait_ms = 2000}, JitterSeed());
    for (int64_t attempt = 1;; ++attempt) {
      absl::StatusOr<std::vector<double>> rewards = Ask(query);
      if (rewards.ok()) {
        SetTrouble("");
        return rewards;
      }
      ++num_failures_;
      SetTrouble(absl::StrCat("reward service ", options_.address, ", asked for rewards: ",
                              rewards.status().message(), ". ", AdviceOn(rewards.status())));
      LogWarning("reward service ", options_.address, ", attempt ", attempt, " of ",
                 options_.max_attempts, ": ", rewards.status().ToString());
      if (attempt >= options_.max_attempts || cancelled()) {
        return Annotate(rewards.status(), absl::StrCat("reward service ", options_.address));
      }
      Clock::Real().SleepNs(backoff.NextWaitMs() * 1'000'000);
    }
  }
  absl::Status Probe(int64_t timeout_ms) override {
    if (channel_->WaitForConnected(std::chrono::system_clock::now() +
                                   std::chrono::milliseconds(timeout_ms))) {
      SetTrouble("");
      return absl::OkStatus();
    }
    const std::string text =
        absl::StrCat("no reward service answers at ", options_.address, " (asked for ",
                     timeout_ms / 1000, " s). ", AdviceOn(absl::UnavailableError("")));
    SetTrouble(text);
    return absl::UnavailableError(text);
  }
  uint64_t num_failures() const override { return num_failures_; }
  std::string trouble() const override {
    absl::MutexLock lock(&mutex_);
    return trouble_;
  }

 private:
  // The first word on a trouble stays until it is over.
  void SetTrouble(const std::string& text) {
    absl::MutexLock lock(&mutex_);
    if (text.empty() || trouble_.empty()) trouble_ = text;
  }

  absl::StatusOr<std::vector<double>> Ask(const RewardQuery& query) {
    v1::GetRewardsRequest request;
    request.set_run_id(query.run_id);
    request.set_prompt_json(query.prompt_json);
    for (const std::string& completion : query.completions) request.add_completions(completion);
    v1::GetRewardsResponse response;
    grpc::ClientContext context;
    SetDeadline(context, options_.timeout_ms);
    const absl::Status status = FromGrpc(stub_->GetRewards(&context, request, &response));
    if (absl::IsDeadlineExceeded(status)) return NoAnswer();
    RETURN_IF_ERROR(status);
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

  // A host that swallows what is sent to it is as good as none; a service that has been reached and
  // is slow has failed.
  absl::Status NoAnswer() const {
    const std::string text = absl::StrCat("no answer within ", options_.timeout_ms, " ms");
    if (channel_->GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY) {
      return absl::DeadlineExceededError(text);
    }
    return absl::UnavailableError(text + ": no connection");
  }

  const RewardClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Reward::Stub> stub_;
  std::atomic<uint64_t> num_failures_{0};
  mutable absl::Mutex mutex_;
  std::string trouble_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace

std::unique_ptr<RewardClient> MakeRewardClient(const RewardClientOptions& options) {
  return std::make_unique<RewardClientImpl>(options);
}
}  // namespace stretto::services
