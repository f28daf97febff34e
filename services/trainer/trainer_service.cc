#include "services/trainer/trainer_service.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "grpcpp/server_context.h"
#include "services/common/grpc_status.h"
#include "stretto/v1/trainer.grpc.pb.h"

namespace stretto::services {
namespace {
engine::TrainGroup ToTrainGroup(const v1::ExperienceGroup& proto) {
  engine::TrainGroup group;
  group.prompt_ids = {proto.prompt_ids().begin(), proto.prompt_ids().end()};
  for (const v1::Experience& experience : proto.experiences()) {
    const v1::Completion& completion = experience.completion();
    engine::TrainCompletion& entry = group.completions.emplace_back();
    entry.ids = {completion.ids().begin(), completion.ids().end()};
    entry.behaviour_logprobs = {completion.logprobs().begin(), completion.logprobs().end()};
    entry.policy_versions = {completion.versions().begin(), completion.versions().end()};
    entry.reference_logprobs = {experience.reference_logprobs().begin(),
                                experience.reference_logprobs().end()};
    entry.advantage = static_cast<float>(experience.advantage());
  }
  return group;
}

// Mean and standard deviation of what has been added.
class Spread {
 public:
  void Add(double value) {
    ++count_;
    sum_ += value;
    sum_of_squares_ += value * value;
  }
  double mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }
  double std() const {
    if (count_ == 0) return 0;
    const double variance = sum_of_squares_ / static_cast<double>(count_) - mean() * mean();
    return std::sqrt(std::max(0.0, variance));
  }

 private:
  int64_t count_ = 0;
  double sum_ = 0, sum_of_squares_ = 0;
};

void ToProto(const StepOutcome& outcome, v1::TrainStepResponse& response) {
  response.mutable_version()->set_number(outcome.version);
  response.mutable_version()->set_hash(outcome.hash);
  response.mutable_metrics()->insert(outcome.metrics.begin(), outcome.metrics.end());
  response.set_skipped(outcome.skipped);
  response.set_skip_reason(outcome.skip_reason);
  response.set_seconds(outcome.seconds);
  response.set_num_tokens(static_cast<uint64_t>(outcome.num_tokens));
}

class TrainerServiceImpl final : public v1::Trainer::Service {
 public:
  TrainerServiceImpl(PolicyTrainer* trainer, GroupSeat* seat, const ModelHost* host,
                     const Fence* fence)
      : trainer_(trainer), seat_(seat), host_(host), fence_(fence) {}

  grpc::Status PrepareGroup(grpc::ServerContext*, const v1::PrepareGroupRequest* request,
                            v1::PrepareGroupResponse* response) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    absl::StatusOr<std::string> address = seat_->Prepare(request->group_epoch());
    if (!address.ok()) return ToGrpc(address.status());
    response->set_peer_address(*std::move(address));
    return grpc::Status::OK;
  }

  grpc::Status JoinGroup(grpc::ServerContext*, const v1::JoinGroupRequest* request,
                         v1::JoinGroupResponse* response) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    const v1::TrainerGroup& group = request->group();
    GroupRequest join;
    join.table.group = request->caller().run_id();
    join.table.epoch = static_cast<int64_t>(group.epoch());
    for (const v1::RankAddress& rank : group.ranks()) {
      join.table.members.push_back({rank.name(), rank.peer_address()});
    }
    join.rank = static_cast<int>(request->rank());
    join.layout = group.layout();
    join.tensor_parallel = std::max<int64_t>(1, group.tensor_parallel());
    join.timeout = absl::Milliseconds(group.collective_timeout_ms());
    if (join.rank >= join.table.size() || group.collective_timeout_ms() == 0) {
      return ToGrpc(absl::InvalidArgumentError("a rank of the group and a timeout are expected"));
    }
    const absl::StatusOr<TrainerState> state = trainer_->JoinGroup(join);
    if (!state.ok()) return ToGrpc(state.status());
    response->mutable_version()->set_number(state->version);
    response->mutable_version()->set_hash(state->hash);
    return grpc::Status::OK;
  }

  grpc::Status TrainStep(grpc::ServerContext* context,
                         grpc::ServerReader<v1::TrainStepChunk>* reader,
                         v1::TrainStepResponse* response) override {
    return ToGrpc(Step(*context, *reader, *response));
  }

  grpc::Status SaveCheckpoint(grpc::ServerContext* context,
                              const v1::SaveCheckpointRequest* request,
                              v1::SaveCheckpointResponse* response) override {
    return ToGrpc(Save(*context, *request, *response));
  }

  grpc::Status GetTrainerStatus(grpc::ServerContext*, const v1::GetTrainerStatusRequest*,
                                v1::TrainerStatus* response) override {
    const TrainerState state = trainer_->State();
    response->mutable_version()->set_number(state.version);
    response->mutable_version()->set_hash(state.hash);
    *response->mutable_profile() = host_->profile;
    response->set_checkpoint_extra_json(state.restored_extra_json);
    response->set_checkpoint_version(state.checkpoint_version);
    response->set_checkpoint_hash(state.checkpoint_hash);
    response->set_num_parameters(static_cast<uint64_t>(state.num_parameters));
    response->set_busy_seconds(state.busy_seconds);
    response->set_group_epoch(state.group_epoch);
    response->set_rank(static_cast<uint32_t>(state.rank));
    response->set_num_ranks(static_cast<uint32_t>(state.num_ranks));
    return grpc::Status::OK;
  }

  grpc::Status ExportPolicy(grpc::ServerContext*, const v1::ExportPolicyRequest* request,
                            v1::ExportPolicyResponse* response) override {
    if (absl::Status status = Check(request->caller()); !status.ok()) return ToGrpc(status);
    const absl::StatusOr<int64_t> version = trainer_->Export(request->path(), request->dtype());
    if (!version.ok()) return ToGrpc(version.status());
    response->mutable_version()->set_number(*version);
    const TrainerState state = trainer_->State();
    if (state.version == *version) response->mutable_version()->set_hash(state.hash);
    return grpc::Status::OK;
  }

 private:
  absl::Status Save(const grpc::ServerContext& context, const v1::SaveCheckpointRequest& request,
                    v1::SaveCheckpointResponse& response) {
    RETURN_IF_ERROR(Check(request.caller()));
    const uint64_t epoch = request.group_epoch();
    SaveRequest save{.extra_json = request.extra_json(), .group_epoch = epoch, .version = {}};
    save.version = request.has_version() ? request.version() : trainer_->State().version;
    const bool is_known = request.has_version() && trainer_->HasSave(request.version(), epoch);
    if (request.begin_only() || !is_known) RETURN_IF_ERROR(trainer_->BeginSave(save));
    response.mutable_version()->set_number(*save.version);
    if (request.begin_only()) return absl::OkStatus();
    ASSIGN_OR_RETURN(
        const engine::SaveReport report,
        trainer_->AwaitSave(*save.version, epoch, [&context] { return context.IsCancelled(); }));
    const TrainerState state = trainer_->State();
    if (state.version == *save.version) response.mutable_version()->set_hash(state.hash);
    response.set_seconds(report.seconds);
    response.set_blocked_seconds(report.blocked_seconds);
    response.set_bytes_written(static_cast<uint64_t>(report.bytes_written));
    if (!report.status.ok()) {
      response.set_error(std::string(report.status.message()));
      return absl::OkStatus();
    }
    response.set_path(report.info.path);
    response.set_checkpoint_hash(report.info.checkpoint_hash);
    return absl::OkStatus();
  }

  absl::Status Check(const v1::Caller& caller) const {
    return fence_->Check(caller.run_id(), caller.member_epoch());
  }

  absl::Status Step(const grpc::ServerContext& context,
                    grpc::ServerReader<v1::TrainStepChunk>& reader,
                    v1::TrainStepResponse& response) {
    v1::TrainStepChunk chunk;
    if (!reader.Read(&chunk) || !chunk.has_header()) {
      return absl::InvalidArgumentError("the first message of a step is its header");
    }
    const v1::TrainStepHeader header = chunk.header();
    RETURN_IF_ERROR(Check(header.caller()));
    StepRequest request;
    request.step = header.step();
    request.base_version = header.base_version().number();
    request.base_hash = header.base_version().hash();
    request.group_epoch = header.group_epoch();
    request.generators_wait = header.generators_wait();
    if (header.has_kl_coef()) request.kl_coef = header.kl_coef();
    if (header.has_skip_above_norm()) request.skip_above_norm = header.skip_above_norm();
    const bool is_ahead =
        request.base_hash.empty() && request.base_version == trainer_->State().version + 1;
    if (!is_ahead) {
      ASSIGN_OR_RETURN(const absl::optional<StepOutcome> taken, trainer_->Look(request));
      if (taken.has_value()) {
        ToProto(*taken, response);
        return absl::OkStatus();
      }
    }
    RETURN_IF_ERROR(ReadGroups(reader, header.num_groups(), request));
    if (is_ahead) {
      RETURN_IF_ERROR(trainer_->AwaitVersion(request.base_version,
                                             [&context] { return context.IsCancelled(); }));
    }
    ASSIGN_OR_RETURN(const StepOutcome outcome, trainer_->TakeStep(request));
    ToProto(outcome, response);
    return absl::OkStatus();
  }

  static absl::Status ReadGroups(grpc::ServerReader<v1::TrainStepChunk>& reader,
                                 uint32_t num_groups, StepRequest& request) {
    v1::TrainStepChunk chunk;
    Spread rewards;
    while (reader.Read(&chunk)) {
      if (!chunk.has_group()) return absl::InvalidArgumentError("a second header in one step");
      if (request.batch.groups.size() >= num_groups) {
        return absl::InvalidArgumentError(
            absl::StrCat("more groups than the ", num_groups, " of the header"));
      }
      std::vector<double>& rewards_of_group = request.rewards.emplace_back();
      for (const v1::Experience& experience : chunk.group().experiences()) {
        if (!std::isfinite(experience.reward()) || !std::isfinite(experience.advantage())) {
          return absl::InvalidArgumentError(absl::StrCat("prompt ",
                                                         chunk.group().prompt_id().index(),
                                                         ": a reward or advantage is not finite"));
        }
        rewards.Add(experience.reward());
        rewards_of_group.push_back(experience.reward());
      }
      request.batch.groups.push_back(ToTrainGroup(chunk.group()));
    }
    if (request.batch.groups.size() != num_groups) {
      // The caller broke off: nothing has been begun.
      return absl::InvalidArgumentError(
          absl::StrCat(request.batch.groups.size(), " groups came, the header says ", num_groups));
    }
    request.reward_mean = rewards.mean();
    request.reward_std = rewards.std();
    return absl::OkStatus();
  }

  PolicyTrainer* trainer_;
  GroupSeat* seat_;
  const ModelHost* host_;
  const Fence* fence_;
};
}  // namespace

std::unique_ptr<grpc::Service> MakeTrainerService(PolicyTrainer* trainer, GroupSeat* seat,
                                                  const ModelHost* host, const Fence* fence) {
  return std::make_unique<TrainerServiceImpl>(trainer, seat, host, fence);
}
}  // namespace stretto::services
