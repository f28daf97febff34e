// stretto-scorer: rewards, reference log-probs and prompt ids for a run.
#include <memory>

#include "base/status.h"
#include "grpcpp/impl/service_type.h"
#include "services/common/log.h"
#include "services/common/service_main.h"
#include "services/scorer/reward_model.h"
#include "services/scorer/scorer_service.h"

namespace stretto::services {
namespace {
constexpr int64_t kProbeMs = 2000;

class ScorerProgram final : public Service {
 public:
  std::string kind() const override { return "scorer"; }
  std::string summary() const override {
    return "Gives rewards and reference log-probs to a run's rollouts.";
  }

  absl::Status Start(const ServiceContext& context) override {
    if (!context.run.has_value()) return absl::InvalidArgumentError("--run FILE is needed");
    const RunConfig& run = *context.run;
    has_adapter_ = run.lora.enabled();
    const int64_t threads =
        context.flags.threads > 0 ? context.flags.threads : run.cluster.scorer_threads;
    ASSIGN_OR_RETURN(host_, OpenModelHost(OptionsOfRun(run, static_cast<int>(threads))));
    ASSIGN_OR_RETURN(judge_,
                     Judge::Create(run.rewards, {run.rollout.max_tokens, context.metrics,
                                                 RewardModelsOf(run, static_cast<int>(threads))}));
    // Said at once, not after the first rollouts; the run waits for it.
    if (absl::Status status = judge_->Probe(kProbeMs); !status.ok()) LogWarning(status.message());
    if (run.algorithm.kl_coef > 0 || run.algorithm.kl_target > 0) {
      ASSIGN_OR_RETURN(reference_, Reference::Create(host_.get()));
      LogInfo("reference policy ", run.model.path, " is ", reference_->hash());
    }
    service_ = MakeScorerService({.host = host_.get(),
                                  .judge = judge_.get(),
                                  .stop_strings = run.rollout.stop,
                                  .reference = reference_.get(),
                                  .fence = context.fence,
                                  .metrics = context.metrics});
    return absl::OkStatus();
  }

  std::vector<grpc::Service*> grpc_services() override { return {service_.get()}; }

  std::optional<Membership> membership() override {
    Membership membership;
    membership.pool = v1::POOL_SCORER;
    membership.profile = host_->profile;
    // With an adapter to start from the run's first version is another than the reference.
    const bool is_first = reference_ != nullptr && !has_adapter_;
    membership.version = [this, is_first] {
      v1::PolicyVersion version;
      version.set_number(is_first ? 0 : -1);
      if (is_first) version.set_hash(reference_->hash());
      return version;
    };
    membership.notice = [this] { return judge_->trouble(); };
    return membership;
  }

 private:
  bool has_adapter_ = false;
  std::unique_ptr<ModelHost> host_;
  std::unique_ptr<Judge> judge_;
  std::unique_ptr<Reference> reference_;
  std::unique_ptr<grpc::Service> service_;
};
}  // namespace
}  // namespace stretto::services

int main(int argc, char** argv) {
  stretto::services::ScorerProgram program;
  return stretto::services::ServiceMain(argc, argv, program);
}
