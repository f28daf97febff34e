#include "services/common/member_client.h"

#include <chrono>
#include <fstream>
#include <thread>

#include "base/status.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "services/common/retry.h"
#include "stretto/v1/coordinator.grpc.pb.h"

namespace stretto::services {
namespace {
// Both are repeated over a new connection. On the old one TCP would send again only after a pause
// that grows with the time for which the network was away.
constexpr int64_t kRegisterTimeoutMs = 2000;
constexpr int64_t kHeartbeatTimeoutMs = 1000;
constexpr int64_t kLeaveTimeoutMs = 1000;
// As many lost ones are told of, and the member registers again.
constexpr int kHeartbeatsBeforeRegister = 3;

// An answer that asking again will not change.
bool IsRefusal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) ||
         absl::IsUnimplemented(status);
}

class MemberClientImpl final : public MemberClient {
 public:
  MemberClientImpl(MemberOptions options, Fence* fence, StopSignal* stop)
      : options_(std::move(options)), fence_(fence), stop_(stop) {
    thread_ = std::thread([this] { Run(); });
  }
  ~MemberClientImpl() override { Join(); }

  void Leave() override {
    Join();
    if (stub_ == nullptr || fence_->epoch() == 0 || run_ended_) return;
    v1::LeaveRequest request;
    request.set_run_id(fence_->run_id());
    request.set_name(options_.name);
    request.set_member_epoch(fence_->epoch());
    v1::LeaveResponse response;
    grpc::ClientContext context;
    SetDeadline(context, kLeaveTimeoutMs);
    const absl::Status status = FromGrpc(stub_->Leave(&context, request, &response));
    if (!status.ok()) LogDebug("leaving without good-bye: ", status.message());
  }

 private:
  void Join() {
    leaving_.Request();
    if (thread_.joinable()) thread_.join();
  }
  bool Ending() const { return leaving_.requested() || stop_->requested(); }

  void Run() {
    Backoff backoff({.initial_wait_ms = 50, .max_wait_ms = 1000}, JitterSeed());
    bool told = false;
    while (!Ending()) {
      const absl::Status status = Register();
      if (status.ok()) {
        LogInfo("joined run ", fence_->run_id(), " with epoch ", fence_->epoch());
        backoff.Reset();
        told = false;
        KeepLease();
        continue;
      }
      if (IsRefusal(status)) {
        stop_->Request(Annotate(status, "the coordinator refuses this member"));
        return;
      }
      if (!told) LogInfo("waiting for the coordinator: ", status.message());
      told = true;
      leaving_.WaitFor(backoff.NextWaitMs());
    }
  }

  // Anew, to where the coordinator is now.
  absl::Status Connect() {
    ASSIGN_OR_RETURN(std::string address, options_.coordinator_address());
    stub_ = v1::Coordinator::NewStub(MakeChannel(address));
    return absl::OkStatus();
  }

  absl::Status Register() {
    RETURN_IF_ERROR(Connect());
    v1::RegisterRequest request;
    request.set_run_id(fence_->run_id());
    request.set_pool(options_.pool);
    request.set_name(options_.name);
    request.set_address(options_.address);
    *request.mutable_profile() = options_.profile;
    request.set_config_hash(options_.config_hash);
    *request.mutable_version() = options_.version();
    v1::RegisterResponse response;
    grpc::ClientContext context;
    SetDeadline(context, kRegisterTimeoutMs);
    RETURN_IF_ERROR(FromGrpc(stub_->Register(&context, request, &response)));
    fence_->Set(response.run_id(), response.member_epoch());
    interval_ms_ = std::max<int64_t>(10, response.heartbeat_interval_ms());
    return absl::OkStatus();
  }

  // Heartbeats until this member must register again (returns), or the end.
  void KeepLease() {
    int num_lost = 0;
    while (!leaving_.WaitFor(interval_ms_) && !stop_->requested()) {
      bool ended = false;
      const absl::Status status = Heartbeat(&ended);
      if (ended) {
        LogInfo("the run has ended");
        run_ended_ = true;
        stop_->Request();
        return;
      }
      if (status.ok()) {
        num_lost = 0;
      } else if (!IsRetryable(status) && !absl::IsDeadlineExceeded(status)) {
        LogInfo("registering again: ", status.message());
        return;
      } else if (++num_lost >= kHeartbeatsBeforeRegister || !Connect().ok()) {
        LogInfo("the coordinator does not answer: ", status.message());
        return;
      }
    }
  }

  absl::Status Heartbeat(bool* ended) {
    v1::HeartbeatRequest request;
    request.set_run_id(fence_->run_id());
    request.set_name(options_.name);
    request.set_member_epoch(fence_->epoch());
    *request.mutable_version() = options_.version();
    request.set_peak_rss_bytes(PeakRssBytes());
    if (options_.notice) request.set_notice(options_.notice());
    v1::HeartbeatResponse response;
    grpc::ClientContext context;
    SetDeadline(context, kHeartbeatTimeoutMs);
    RETURN_IF_ERROR(FromGrpc(stub_->Heartbeat(&context, request, &response)));
    *ended = response.run_ended();
    return absl::OkStatus();
  }

  const MemberOptions options_;
  Fence* const fence_;
  StopSignal* const stop_;
  StopSignal leaving_;
  // Used by the thread, and by Leave() after it has ended.
  std::unique_ptr<v1::Coordinator::Stub> stub_;
  int64_t interval_ms_ = 500;
  bool run_ended_ = false;
  std::thread thread_;
};
}  // namespace

std::unique_ptr<MemberClient> MemberClient::Start(MemberOptions options, Fence* fence,
                                                  StopSignal* stop) {
  return std::make_unique<MemberClientImpl>(std::move(options), fence, stop);
}

uint64_t PeakRssBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word != "VmHWM:") continue;
    uint64_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}
}  // namespace stretto::services
