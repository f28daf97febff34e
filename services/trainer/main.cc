// stretto-trainer: takes optimizer steps for a run and serves the policy's versions.
#include <memory>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "base/flag_checks.h"
#include "base/status.h"
#ifdef STRETTO_HAS_NCCL
#include "engine/collectives/nccl/nccl_exchange.h"
#endif
#include "engine/device/burn_in.h"
#include "grpcpp/impl/service_type.h"
#include "services/common/log.h"
#include "services/common/service_main.h"
#include "services/common/weights_rpc.h"
#include "services/trainer/trainer_service.h"

namespace stretto::services {
namespace {
absl::StatusOr<engine::FrameCarrier> CarrierOf(const RunConfig& run) {
  if (run.cluster.collectives != "nccl") return engine::FrameCarrier();
#ifdef STRETTO_HAS_NCCL
  if (engine::NumNcclDevices() > 0) return engine::OverNccl(0);
  return absl::FailedPreconditionError(
      "cluster.collectives is nccl: this machine shows no CUDA device to this trainer "
      "(CUDA_VISIBLE_DEVICES chooses it); give it one, or set cluster.collectives=tcp");
#else
  return absl::FailedPreconditionError(
      "cluster.collectives is nccl: this trainer was built without NCCL; build with `cmake "
      "--preset cuda` where the CUDA toolkit is, or set cluster.collectives=tcp");
#endif
}

class TrainerProgram final : public Service {
 public:
  std::string kind() const override { return "trainer"; }
  std::string summary() const override {
    return "Learns from a run's rollouts and serves the new weights.";
  }

  void AddFlags(CLI::App& app) override {
    app.add_option("--threads-beside-generators", threads_beside_generators_,
                   "compute threads while generators of the same machine compute; 0: --threads")
        ->capture_default_str()
        ->check(IntegerIn(0, 1024));
  }

  absl::Status Start(const ServiceContext& context) override {
    if (!context.run.has_value()) return absl::InvalidArgumentError("--run FILE is needed");
    const RunConfig& run = *context.run;
    ASSIGN_OR_RETURN(engine::FrameCarrier carrier, CarrierOf(run));
    const int64_t threads =
        context.flags.threads > 0 ? context.flags.threads : run.cluster.trainer_threads;
    ASSIGN_OR_RETURN(host_, OpenModelHost(OptionsOfRun(run, static_cast<int>(threads))));
    ASSIGN_OR_RETURN(const double ceiling, CheckMachine(run, *context.metrics));
    seat_ = std::make_unique<GroupSeat>(context.flags.bind, std::move(carrier));
    ASSIGN_OR_RETURN(
        trainer_, PolicyTrainer::Open(run, {.host = host_.get(),
                                            .metrics = context.metrics,
                                            .seat = seat_.get(),
                                            .files = &Files::Real(),
                                            .on_failed = [stop = context.stop](const auto& status) {
                                              stop->Request(status);
                                            }}));
    trainer_->SetMatrixCeiling(ceiling);
    trainer_->SetThreadsBesideGenerators(threads_beside_generators_);
    service_ = MakeTrainerService(trainer_.get(), seat_.get(), host_.get(), context.fence);
    weights_ = ProvideStore(&trainer_->store(), [this](const v1::PolicyVersion& base,
                                                       const v1::PolicyVersion& version) {
      return trainer_->delta_encoder().Get(base.number(), base.hash(), version.number(),
                                           version.hash());
    });
    weights_service_ = MakeWeightsService(weights_.get(), context.metrics);
    return absl::OkStatus();
  }

  std::vector<grpc::Service*> grpc_services() override {
    return {service_.get(), weights_service_.get()};
  }

  void OnServing(const std::string& address) override {
    seat_->SetHost(address.substr(0, address.rfind(':')));
  }

  // A step under way would wait for peers, and they for this rank.
  void Drain(int64_t) override { seat_->Leave(); }

  // A save under way ends first, and reports to the metrics.
  void Stop() override { trainer_ = nullptr; }

  std::optional<Membership> membership() override {
    Membership membership;
    membership.pool = v1::POOL_TRAINER;
    membership.profile = host_->profile;
    membership.version = [this] {
      const TrainerState state = trainer_->State();
      v1::PolicyVersion version;
      version.set_number(state.version);
      version.set_hash(state.hash);
      return version;
    };
    membership.notice = [this] { return trainer_->State().notice; };
    return membership;
  }

 private:
  // A machine that computes wrong doesn't join. What its products reach; 0: not measured.
  absl::StatusOr<double> CheckMachine(const RunConfig& run, Metrics& metrics) {
    if (run.cluster.burn_in_ms == 0) return 0.0;
    const auto result = engine::BurnIn(
        {.backend = run.cluster.backend, .num_threads = host_->device->num_threads()}, host_->dtype,
        {.seconds = static_cast<double>(run.cluster.burn_in_ms) * 1e-3});
    if (!result.ok()) {
      return Annotate(result.status(), "burn-in: this trainer doesn't join");
    }
    LogInfo("burn-in: ", result->num_products, " products came out right, ", result->flops * 1e-9,
            " GFLOP/s");
    metrics
        .gauge("stretto_trainer_matrix_ceiling_flops",
               "Operations a second that this machine's products reach, measured at the start.")
        .Set(result->flops);
    return result->flops;
  }

  int threads_beside_generators_ = 0;
  std::unique_ptr<ModelHost> host_;
  std::unique_ptr<GroupSeat> seat_;
  std::unique_ptr<PolicyTrainer> trainer_;
  std::unique_ptr<WeightsProvider> weights_;
  std::unique_ptr<grpc::Service> service_, weights_service_;
};
}  // namespace
}  // namespace stretto::services

int main(int argc, char** argv) {
  stretto::services::TrainerProgram program;
  return stretto::services::ServiceMain(argc, argv, program);
}
