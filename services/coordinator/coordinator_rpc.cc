#include "services/coordinator/coordinator_rpc.h"

#include <grpcpp/server_context.h>

#include "services/common/grpc_status.h"
#include "stretto/v1/coordinator.grpc.pb.h"

namespace stretto::services {
namespace {
template <class Response>
grpc::Status Give(absl::StatusOr<Response> answer, Response* response) {
  if (!answer.ok()) return ToGrpc(answer.status());
  *response = *std::move(answer);
  return grpc::Status::OK;
}

bool IsOver(const v1::RunStatus& status) {
  return status.state() == v1::RUN_STATE_DONE || status.state() == v1::RUN_STATE_FAILED;
}

class CoordinatorService : public v1::Coordinator::Service {
 public:
  explicit CoordinatorService(Coordinator* coordinator) : coordinator_(coordinator) {}

  grpc::Status Register(grpc::ServerContext*, const v1::RegisterRequest* request,
                        v1::RegisterResponse* response) override {
    return Give(coordinator_->Register(*request), response);
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse* response) override {
    return Give(coordinator_->Heartbeat(*request), response);
  }
  grpc::Status Leave(grpc::ServerContext*, const v1::LeaveRequest* request,
                     v1::LeaveResponse*) override {
    return ToGrpc(coordinator_->Leave(*request));
  }
  grpc::Status GetRunStatus(grpc::ServerContext*, const v1::GetRunStatusRequest*,
                            v1::RunStatus* response) override {
    *response = coordinator_->Status().first;
    return grpc::Status::OK;
  }
  grpc::Status WatchRun(grpc::ServerContext* context, const v1::WatchRunRequest*,
                        grpc::ServerWriter<v1::RunStatus>* writer) override {
    uint64_t seen = 0;
    while (!context->IsCancelled()) {
      const auto [status, number] = coordinator_->AwaitChange(seen, /*timeout_ms=*/250);
      if (number == seen) continue;
      seen = number;
      if (!writer->Write(status) || IsOver(status)) break;
    }
    return grpc::Status::OK;
  }
  grpc::Status ControlRun(grpc::ServerContext*, const v1::ControlRunRequest* request,
                          v1::RunStatus* response) override {
    const absl::Status status = coordinator_->Control(request->action());
    *response = coordinator_->Status().first;
    return ToGrpc(status);
  }

 private:
  Coordinator* const coordinator_;
};
}  // namespace

std::unique_ptr<grpc::Service> MakeCoordinatorService(Coordinator* coordinator) {
  return std::make_unique<CoordinatorService>(coordinator);
}
}  // namespace stretto::services
