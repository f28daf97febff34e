// A user's Reward service for tests: real gRPC on a real port.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "stretto/v1/reward.grpc.pb.h"
#include "tests/integration/process.h"

namespace stretto::testing {
// Behaves as told. A completion's reward is its length in bytes.
class RewardServer final : public v1::Reward::Service {
 public:
  enum class Mode { kGood, kSlow, kNan, kWrongCount, kError };

  explicit RewardServer(int port) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~RewardServer() override {
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  }
  bool is_up() const { return server_ != nullptr; }
  grpc::Status GetRewards(grpc::ServerContext* context, const v1::GetRewardsRequest* request,
                          v1::GetRewardsResponse* response) override {
    ++num_calls;
    if (mode == Mode::kError) return {grpc::StatusCode::INTERNAL, "out of opinions"};
    if (mode == Mode::kSlow) {
      Eventually([&] { return context->IsCancelled(); }, 5000);
    }
    for (const std::string& completion : request->completions()) {
      response->add_rewards(mode == Mode::kNan ? std::numeric_limits<double>::quiet_NaN()
                                               : static_cast<double>(completion.size()));
    }
    if (mode == Mode::kWrongCount) response->add_rewards(1);
    return grpc::Status::OK;
  }

  std::atomic<Mode> mode{Mode::kGood};
  std::atomic<int> num_calls{0};

 private:
  std::unique_ptr<grpc::Server> server_;
};
}  // namespace stretto::testing
