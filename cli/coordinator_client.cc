#include "cli/coordinator_client.h"

#include <grpcpp/grpcpp.h>

#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "stretto/v1/coordinator.grpc.pb.h"

namespace stretto::cli {
namespace {
class GrpcCoordinatorClient final : public CoordinatorClient {
 public:
  explicit GrpcCoordinatorClient(const std::string& address)
      : stub_(v1::Coordinator::NewStub(services::MakeChannel(address))) {}

  absl::StatusOr<v1::RunStatus> Status() override {
    return Call(v1::GetRunStatusRequest(), &v1::Coordinator::Stub::GetRunStatus);
  }
  absl::StatusOr<v1::RunStatus> Control(v1::ControlRunRequest::Action action) override {
    v1::ControlRunRequest request;
    request.set_action(action);
    return Call(request, &v1::Coordinator::Stub::ControlRun);
  }

 private:
  template <class Request, class Method>
  absl::StatusOr<v1::RunStatus> Call(const Request& request, Method method) {
    grpc::ClientContext context;
    services::SetDeadline(context, /*timeout_ms=*/3000);
    v1::RunStatus status;
    const absl::Status result = services::FromGrpc(((*stub_).*method)(&context, request, &status));
    if (!result.ok()) return result;
    return status;
  }
  std::unique_ptr<v1::Coordinator::Stub> stub_;
};
}  // namespace

std::unique_ptr<CoordinatorClient> ConnectToCoordinator(const std::string& address) {
  return std::make_unique<GrpcCoordinatorClient>(address);
}
}  // namespace stretto::cli
