// stretto-coordinator: keeps the stream of rollouts of one run flowing.
#include <grpcpp/impl/codegen/service_type.h>

#include "base/status.h"
#include "services/common/service_main.h"
#include "services/coordinator/coordinator.h"
#include "services/coordinator/coordinator_rpc.h"

namespace stretto::services {
namespace {
// The step under way and a checkpoint may take their time.
constexpr int64_t kStopTimeoutMs = 120'000;

class CoordinatorProgram : public Service {
 public:
  std::string kind() const override { return "coordinator"; }
  std::string summary() const override {
    return "Runs a run: leads its members, keeps its journal, hands rollouts to the trainer.";
  }

  absl::Status Start(const ServiceContext& context) override {
    if (!context.run.has_value()) return absl::InvalidArgumentError("--run FILE is needed");
    ASSIGN_OR_RETURN(coordinator_, Coordinator::Start(*context.run, {.metrics = context.metrics,
                                                                     .stop = context.stop,
                                                                     .clock = &Clock::Real()}));
    service_ = MakeCoordinatorService(coordinator_.get());
    return absl::OkStatus();
  }
  std::vector<grpc::Service*> grpc_services() override { return {service_.get()}; }
  void Drain(int64_t) override { coordinator_->StopAndWait(kStopTimeoutMs); }
  void Stop() override { coordinator_ = nullptr; }
  // What ends a coordinator that serves is its run.
  int ExitCode(const absl::Status& reason) const override {
    return reason.ok() ? 0 : kExitRunFailed;
  }

 private:
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<grpc::Service> service_;
};
}  // namespace
}  // namespace stretto::services

int main(int argc, char** argv) {
  stretto::services::CoordinatorProgram program;
  return stretto::services::ServiceMain(argc, argv, program);
}
