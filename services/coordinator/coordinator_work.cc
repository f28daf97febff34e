// The loop's hands: records into the journal, commands to members, answers back to the core.
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "services/common/log.h"
#include "services/common/member_client.h"
#include "services/coordinator/coordinator.h"
#include "services/coordinator/step_metrics.h"

namespace stretto::services {
template <class Command>
Calls::Target Coordinator::TargetOf(const Command& command) const {
  const auto it = core_->members().find(command.member);
  return {command.member, it == core_->members().end() ? "" : it->second.address, command.epoch};
}

template <class Command>
v1::Caller Coordinator::CallerOf(const Command& command) const {
  v1::Caller caller;
  caller.set_run_id(journal_->run_id());
  caller.set_member_epoch(command.epoch);
  return caller;
}

namespace {
// The ids that a prompt is used with.
absl::Span<const int32_t> Kept(const v1::TokenizedPrompt& prompt, const RunConfig& config) {
  absl::Span<const int32_t> ids(prompt.ids().data(), static_cast<size_t>(prompt.ids_size()));
  const auto most = static_cast<size_t>(config.MaxPromptTokens());
  const bool is_cut = config.data.on_long_prompt == "cut" && ids.size() > most;
  return is_cut ? ids.last(most) : ids;
}
}  // namespace

std::string Coordinator::PlaceOf(const DatasetPlace& place) const {
  return (place.epoch == kEvalEpoch ? eval_ : train_).PlaceOf(place.index);
}

const std::string& Coordinator::PromptJson(const DatasetPlace& place) const {
  const Dataset& data = place.epoch == kEvalEpoch ? eval_ : train_;
  return data.lines.at(place.index);
}

void Coordinator::Record(const RecordGroup& record) {
  journal_->Write(record);
  const Group& group = record.group;
  if (group.state == GroupState::kRejected) {
    LogWarning(group.kind == GroupKind::kEval ? "eval" : "train", " group ", group.id, " (",
               PlaceOf(group.place), ") left out: ", group.reason);
  }
  if (group.state == GroupState::kScored && group.kind == GroupKind::kTrain) {
    num_rollouts_ += static_cast<uint64_t>(config_.rollout.group_size);
  }
}

void Coordinator::Record(const RecordVersion& record) {
  version_born_ns_ = NowNs();
  journal_->Write(record);
  journal_->WriteSessionSeconds(SessionSeconds());
  for (const auto& [name, bytes] : peak_rss_) journal_->WritePeakRss(name, bytes);
  journal_->WritePeakRss("coordinator", PeakRssBytes());
  sync_journal_ = true;
}

void Coordinator::Record(const RecordCheckpoint& record) {
  journal_->WriteCheckpoint(record.version, last_checkpoint_.checkpoint_hash(),
                            last_checkpoint_.path());
  LogInfo("checkpoint of version ", record.version, ": ", last_checkpoint_.path(), " ",
          last_checkpoint_.checkpoint_hash());
  sync_journal_ = true;
}

void Coordinator::Record(const RecordEval& record) {
  std::vector<GroupRecord> groups;
  for (const uint64_t id : record.scored) {
    absl::StatusOr<GroupRecord> group = journal_->ReadGroup(id);
    if (group.ok()) groups.push_back(std::move(*group));
  }
  const double score = EvalScore(groups, config_.eval.reward);
  if (record.num_rejected > 0) {
    Tell(absl::StrCat("evaluation of version ", record.version, ": ", record.num_rejected, " of ",
                      record.scored.size() + static_cast<size_t>(record.num_rejected),
                      " questions are left out (the coordinator's log has the reasons)"));
  }
  const auto num_prompts = static_cast<int64_t>(record.scored.size()) + record.num_rejected;
  journal_->WriteEval(record.version, score, num_prompts, record.num_rejected);
  evals_[record.version] = score;
  mark_ns_ = NowNs();
  LogInfo("evaluation of version ", record.version, ": ", score, " of ", num_prompts, " prompts",
          record.num_rejected > 0 ? absl::StrCat(", ", record.num_rejected, " left out") : "");
  if (const absl::Status status = outputs_->AddEval(record.version, score, EvalReward(groups));
      !status.ok()) {
    LogWarning(status.message());
  }
}

void Coordinator::Record(const RecordEvent& record) {
  journal_->Write(record);
  LogInfo(record.text);
  Tell(record.text);
}

void Coordinator::Do(const TokenizePrompts& command) {
  v1::TokenizeRequest request;
  *request.mutable_caller() = CallerOf(command);
  for (const uint64_t id : command.groups) {
    const auto it = core_->groups().find(id);
    request.add_prompt_json(it == core_->groups().end() ? "{}" : PromptJson(it->second.place));
  }
  calls_->Tokenize(TargetOf(command), std::move(request),
                   [this, command](const absl::StatusOr<v1::TokenizeResponse>& answer) {
                     Tokenized(command, answer);
                   });
}

void Coordinator::Tokenized(const TokenizePrompts& asked,
                            const absl::StatusOr<v1::TokenizeResponse>& answer) {
  std::vector<Core::TokenizedPrompt> prompts;
  absl::Status status = answer.status();
  if (status.ok() && static_cast<size_t>(answer->prompts_size()) != asked.groups.size()) {
    status = absl::InternalError("as many prompts as were asked for did not come back");
  }
  if (status.ok()) {
    for (int i = 0; i < answer->prompts_size(); ++i) {
      const v1::TokenizedPrompt& p = answer->prompts(i);
      const auto known = core_->groups().find(asked.groups[static_cast<size_t>(i)]);
      prompts.push_back(
          {.length = static_cast<int64_t>(Kept(p, config_).size()),
           .error = p.error(),
           .place = known == core_->groups().end() ? "" : PlaceOf(known->second.place)});
    }
  }
  if (!core_->OnTokenized(asked, status, prompts, RunNowNs())) return;
  for (size_t i = 0; i < asked.groups.size(); ++i) {
    const auto ids = Kept(answer->prompts(static_cast<int>(i)), config_);
    if (!ids.empty()) journal_->WritePromptIds(asked.groups[i], ids);
  }
}

void Coordinator::Do(const GenerateGroup& command) {
  const absl::StatusOr<GroupRecord> group = journal_->ReadGroup(command.group);
  if (!group.ok()) {
    Post([this, command, status = group.status()] { Generated(command, status); });
    return;
  }
  const bool is_eval = group->place.epoch == kEvalEpoch;
  v1::GenerateRequest request;
  *request.mutable_caller() = CallerOf(command);
  *request.mutable_prompt_id() = ToProto(group->place);
  request.mutable_prompt_ids()->Add(group->prompt_ids.begin(), group->prompt_ids.end());
  const auto known = core_->groups().find(command.group);
  const int64_t step = known == core_->groups().end() ? 1 : known->second.round;
  *request.mutable_sampling() = is_eval ? EvalSampling(config_) : TrainSampling(config_, step);
  request.set_until_context(true);  // generators know how much that is
  request.set_run_seed(config_.run.seed);
  const int64_t num_samples = is_eval ? 1 : config_.rollout.group_size;
  for (int64_t i = 0; i < num_samples; ++i) {
    request.add_samples()->set_sample_index(static_cast<uint32_t>(i));
  }
  *request.mutable_expected_version() = ToProto(command.expected);
  request.set_priority(is_eval ? 1 : 0);
  std::function<void()> on_token;
  if (!has_token_ || lost_groups_.count(command.group) > 0) {
    on_token = [this, command] { Recovered(command); };
  }
  calls_->Generate(TargetOf(command), command.group, command.attempt, std::move(request),
                   std::move(on_token),
                   [this, command](const absl::StatusOr<std::vector<RolloutRecord>>& answer) {
                     Generated(command, answer);
                   });
}

void Coordinator::Generated(const GenerateGroup& asked,
                            const absl::StatusOr<std::vector<RolloutRecord>>& answer) {
  int64_t min_version = INT64_MAX, max_version = INT64_MIN;
  if (answer.ok()) {
    for (const RolloutRecord& rollout : *answer) {
      for (const int64_t version : rollout.versions) {
        min_version = std::min(min_version, version);
        max_version = std::max(max_version, version);
      }
    }
  }
  absl::Status status = answer.status();
  if (absl::IsDataLoss(status)) Do(CountFault{"impossible_rollout", asked.member});
  const int64_t wanted = asked.expected.number;
  const int64_t oldest = wanted >= 0 ? wanted : asked.held_version;
  const int64_t newest = wanted >= 0 ? wanted : core_->version_number();
  // A member that says it wrote with what it cannot have is not believed.
  if (status.ok() && (min_version < oldest || max_version > newest)) {
    Do(CountFault{"impossible_version", asked.member});
    status = absl::DataLossError(absl::StrCat("tokens are said to be of versions ", min_version,
                                              " to ", max_version, "; it can have written with ",
                                              oldest, " to ", newest));
  }
  // Whoever is to do it again is asked by the turn that hears of this.
  const auto known = core_->groups().find(asked.group);
  const bool is_awaited = known != core_->groups().end() && known->second.attempt == asked.attempt;
  if (absl::IsUnavailable(status) && is_awaited) Lose(asked.group, asked.member);
  if (core_->OnGenerated(asked, status, min_version, RunNowNs())) {
    balance_.Generated(static_cast<int64_t>(answer->size()));
    journal_->WriteRollouts(asked.group, *answer);
  }
}

void Coordinator::Do(const CancelGenerate& command) {
  if (!command.member.empty()) Lose(command.group, command.member);
  calls_->CancelGenerate(command.group, command.attempt);
}

void Coordinator::Do(const ScoreGroup& command) {
  absl::StatusOr<GroupRecord> group = journal_->ReadGroup(command.group);
  if (!group.ok()) {
    Post(
        [this, command, status = group.status()] { core_->OnScored(command, status, RunNowNs()); });
    return;
  }
  v1::ScoreRequest request;
  *request.mutable_caller() = CallerOf(command);
  *request.mutable_prompt_id() = ToProto(group->place);
  request.mutable_prompt_ids()->Add(group->prompt_ids.begin(), group->prompt_ids.end());
  request.set_prompt_json(PromptJson(group->place));
  for (const RolloutRecord& rollout : group->rollouts) {
    *request.add_completions() = ToProto(rollout);
  }
  request.set_temperature(static_cast<float>(config_.rollout.temperature));
  request.set_want_reference_logprobs(group->place.epoch != kEvalEpoch &&
                                      config_.algorithm.kl_coef > 0);
  calls_->Score(
      TargetOf(command), std::move(request),
      [this, command, group = std::move(*group)](const absl::StatusOr<v1::ScoreResponse>& answer) {
        Scored(command, group, answer);
      });
}

void Coordinator::Scored(const ScoreGroup& asked, GroupRecord group,
                         const absl::StatusOr<v1::ScoreResponse>& answer) {
  absl::Status status = answer.status();
  const bool wants_reference = group.place.epoch != kEvalEpoch && config_.algorithm.kl_coef > 0;
  if (status.ok()) status = ApplyScores(*answer, wants_reference, &group.rollouts);
  if (status.ok()) {
    if (const absl::Status same = journal_->CheckScorerTag(answer->scorer_tag()); !same.ok()) {
      Do(CountFault{"other_rewards", asked.member});
      core_->OnFault(Annotate(same, asked.member), RunNowNs());
      return;
    }
  }
  if (core_->OnScored(asked, status, RunNowNs(), HasSignal(group.rollouts))) {
    balance_.Scored(static_cast<int64_t>(group.rollouts.size()));
    journal_->WriteScores(asked.group, group.rollouts, answer->scorer_tag());
  }
}

void Coordinator::Do(const PrepareVersion& command) {
  v1::PrepareWeightsRequest request;
  *request.mutable_caller() = CallerOf(command);
  *request.mutable_version() = ToProto(command.version);
  for (const std::string& source : command.sources) request.add_sources(source);
  calls_->Prepare(TargetOf(command), std::move(request),
                  [this, command](const absl::StatusOr<v1::PrepareWeightsResponse>& answer) {
                    core_->OnPrepared(command, answer.status(), RunNowNs());
                  });
}

void Coordinator::Do(const CommitVersion& command) {
  v1::CommitWeightsRequest request;
  *request.mutable_caller() = CallerOf(command);
  *request.mutable_version() = ToProto(command.version);
  calls_->Commit(TargetOf(command), std::move(request),
                 [this, command](const absl::StatusOr<v1::CommitWeightsResponse>& answer) {
                   core_->OnCommitted(command, answer.status(), RunNowNs());
                   if (answer.ok()) NoteSpread(command.version);
                 });
}

// How long the newest version took to be in use everywhere.
void Coordinator::NoteSpread(const Version& version) {
  if (!(version == core_->version()) || spread_version_ == version.number) return;
  for (const auto& [name, member] : core_->members()) {
    const bool lacks_it =
        member.pool == PoolKind::kGenerator && member.is_live && !(member.version == version);
    if (lacks_it) return;
  }
  spread_version_ = version.number;
  parts_.metrics
      ->gauge("stretto_weights_spread_seconds",
              "From the birth of the newest policy version to its being in use at all generators.")
      .Set(static_cast<double>(NowNs() - version_born_ns_) * 1e-9);
}

void Coordinator::Do(const PrepareRank& command) {
  v1::PrepareGroupRequest request;
  *request.mutable_caller() = CallerOf(command);
  request.set_group_epoch(command.group_epoch);
  calls_->PrepareGroup(TargetOf(command), std::move(request),
                       [this, command](const absl::StatusOr<v1::PrepareGroupResponse>& answer) {
                         core_->OnRankPrepared(command, answer.status(),
                                               answer.ok() ? answer->peer_address() : "",
                                               RunNowNs());
                       });
}

void Coordinator::Do(const JoinRank& command) {
  v1::JoinGroupRequest request;
  *request.mutable_caller() = CallerOf(command);
  request.set_rank(command.rank);
  v1::TrainerGroup* group = request.mutable_group();
  group->set_epoch(command.group_epoch);
  group->set_layout(config_.cluster.trainer_layout);
  group->set_tensor_parallel(static_cast<uint32_t>(config_.cluster.tensor_parallel));
  group->set_collective_timeout_ms(static_cast<uint32_t>(config_.cluster.collective_timeout_ms));
  for (const JoinRank::Peer& peer : command.ranks) {
    v1::RankAddress* rank = group->add_ranks();
    rank->set_name(peer.name);
    rank->set_peer_address(peer.address);
  }
  calls_->JoinGroup(TargetOf(command), std::move(request),
                    [this, command](const absl::StatusOr<v1::JoinGroupResponse>& answer) {
                      core_->OnRankJoined(command, answer.status(),
                                          answer.ok() ? FromProto(answer->version()) : Version(),
                                          RunNowNs());
                    });
}

// The batch of a step, read once for all ranks.
absl::StatusOr<Calls::Batch> Coordinator::ReadExperience(int64_t step) {
  if (batch_step_ == step) return batch_;
  ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, journal_->ReadBatch(step));
  auto groups = std::make_shared<std::vector<v1::ExperienceGroup>>();
  for (const uint64_t id : ids) {
    ASSIGN_OR_RETURN(const GroupRecord group, journal_->ReadGroup(id));
    groups->push_back(ToExperience(group, config_.algorithm));
  }
  batch_ = std::move(groups);
  batch_step_ = step;
  return batch_;
}

void Coordinator::Do(const TakeStep& command) {
  v1::TrainStepHeader header;
  *header.mutable_caller() = CallerOf(command);
  header.set_step(command.step);
  *header.mutable_base_version() = ToProto(command.base);
  header.set_group_epoch(command.group_epoch);
  if (config_.algorithm.kl_coef > 0) header.set_kl_coef(command.kl_coef);
  absl::StatusOr<Calls::Batch> groups = ReadExperience(command.step);
  if (!groups.ok()) {
    Post([this, command, status = groups.status()] { StepTaken(command, status); });
    return;
  }
  const double threshold = SpikeThreshold(command.step);
  if (config_.train.grad_spike != "warn" && std::isfinite(threshold)) {
    header.set_skip_above_norm(threshold);
  }
  header.set_num_groups(static_cast<uint32_t>((*groups)->size()));
  header.set_generators_wait(!core_->IsGenerating());
  calls_->TrainStep(TargetOf(command), std::move(header), *std::move(groups),
                    [this, command](const absl::StatusOr<v1::TrainStepResponse>& answer) {
                      StepTaken(command, answer);
                    });
}

void Coordinator::StepTaken(const TakeStep& asked,
                            const absl::StatusOr<v1::TrainStepResponse>& answer) {
  Version version;
  double measured_kl = std::nan("");
  if (answer.ok()) {
    version = FromProto(answer->version());
    const auto kl = answer->metrics().find("kl");
    if (kl != answer->metrics().end()) measured_kl = kl->second;
    rank_metrics_[asked.member] = {answer->metrics().begin(), answer->metrics().end()};
  }
  const bool is_new = core_->OnStepTaken(asked, answer.status(), version, measured_kl, RunNowNs());
  if (!is_new) return;
  RecordStep(asked, *answer);
  rank_metrics_.clear();
  std::erase_if(lost_groups_,
                [this](const auto& lost) { return core_->groups().count(lost.first) == 0; });
  batch_ = nullptr;
  batch_step_ = -1;
}

void Coordinator::RecordStep(const TakeStep& asked, const v1::TrainStepResponse& answer) {
  std::vector<GroupRecord> batch;
  absl::StatusOr<std::vector<uint64_t>> ids = journal_->ReadBatch(asked.step);
  for (size_t i = 0; ids.ok() && i < ids->size(); ++i) {
    absl::StatusOr<GroupRecord> group = journal_->ReadGroup((*ids)[i]);
    if (group.ok()) batch.push_back(std::move(*group));
  }
  const double seconds = static_cast<double>(NowNs() - mark_ns_) * 1e-9;
  mark_ns_ = NowNs();
  StepRecord step;
  step.step = asked.step;
  step.seconds = seconds;
  step.skip_reason = answer.skipped() ? answer.skip_reason() : "";
  step.metrics =
      StepMetrics(batch, asked.step - 1, {answer.metrics().begin(), answer.metrics().end()},
                  {.step_seconds = seconds, .train_seconds = answer.seconds()});
  if (config_.algorithm.kl_coef > 0) step.metrics["kl_coef"] = asked.kl_coef;
  std::erase_if(step.metrics, [](const auto& m) { return absl::StartsWith(m.first, "rank_"); });
  useful_seconds_ += answer.seconds();
  step.metrics["goodput"] = useful_seconds_ / std::max(SessionSeconds(), 1e-9);
  if (answer.skipped()) step.metrics["skipped"] = 1;
  JudgeStep(step);
  RememberNorm(step);
  for (const std::string& note : rank_health_.Add(asked.step, rank_metrics_)) {
    Record(RecordEvent{note});
  }
  balance_.Trained(config_.train.prompts_per_step * config_.rollout.group_size, answer.seconds());
  journal_->WriteStep(step, core_->kl_coef());
  last_metrics_ = step.metrics;
  if (const absl::Status status = outputs_->AddStep(step); !status.ok()) {
    LogWarning(status.message());
  }
  PublishMetrics();
}

void Coordinator::Do(const AskTrainer& command) {
  calls_->TrainerStatus(
      TargetOf(command), [this, command](const absl::StatusOr<v1::TrainerStatus>& answer) {
        core_->OnTrainerStatus(command, answer.status(),
                               answer.ok() ? FromProto(answer->version()) : Version(), NowNs());
      });
}

template <class Command>
v1::SaveCheckpointRequest Coordinator::SaveRequestOf(const Command& command) const {
  v1::SaveCheckpointRequest request;
  *request.mutable_caller() = CallerOf(command);
  request.set_group_epoch(command.group_epoch);
  request.set_version(command.version);
  // Only what the version determines: a checkpoint's bits must not depend on how it came about.
  request.set_extra_json(absl::StrCat("{\"step\": ", command.version, "}"));
  return request;
}

void Coordinator::Do(const BeginSave& command) {
  v1::SaveCheckpointRequest request = SaveRequestOf(command);
  request.set_begin_only(true);
  calls_->SaveCheckpoint(TargetOf(command), std::move(request),
                         [this, command](const absl::StatusOr<v1::SaveCheckpointResponse>& answer) {
                           core_->OnSaveBegun(command, answer.status(), RunNowNs());
                         });
}

void Coordinator::Do(const AwaitSave& command) {
  calls_->SaveCheckpoint(TargetOf(command), SaveRequestOf(command),
                         [this, command](const absl::StatusOr<v1::SaveCheckpointResponse>& answer) {
                           Core::SaveResult result;
                           if (answer.ok()) result = {answer->error(), answer->seconds()};
                           if (core_->OnSaveOver(command, answer.status(), result, RunNowNs())) {
                             last_checkpoint_ = *answer;
                           }
                           PublishCheckpointMetrics();
                         });
}

void Coordinator::Do(const EndRun& command) {
  end_status_ = command.status;
  ended_ns_ = NowNs();
  if (command.status.ok()) {
    LogInfo("run ", journal_->run_id(), ": ", command.detail);
  } else {
    LogError("run ", journal_->run_id(), ": ", command.detail);
  }
  calls_->CancelAll();
  journal_->WriteSessionSeconds(SessionSeconds());
  for (const auto& [name, bytes] : peak_rss_) journal_->WritePeakRss(name, bytes);
  journal_->WritePeakRss("coordinator", PeakRssBytes());
  absl::Status status = journal_->Commit(/*sync=*/true);
  if (!status.ok()) LogError(status.message());
  WriteSummary();
}

void Coordinator::WriteSummary() {
  RunSummary summary;
  summary.run_id = journal_->run_id();
  summary.state = !end_status_.ok()                               ? "failed"
                  : core_->version_number() < config_.train.steps ? "stopped"
                                                                  : "done";
  summary.detail = core_->detail();
  summary.num_steps = core_->version_number();
  summary.evals = evals_;
  if (config_.eval.before && evals_.count(0) > 0) summary.eval_before = evals_.at(0);
  if (config_.eval.after && evals_.count(config_.train.steps) > 0) {
    summary.eval_after = evals_.at(config_.train.steps);
  }
  summary.version = core_->version();
  summary.last_metrics = last_metrics_;
  const auto totals = journal_->ReadTotals();
  if (totals.ok()) summary.totals = *totals;
  const auto checkpoint = journal_->ReadCheckpoint();
  if (checkpoint.ok()) std::tie(summary.checkpoint_hash, summary.checkpoint_path) = *checkpoint;
  for (const absl::Status& status :
       {totals.status(), checkpoint.status(), outputs_->WriteSummary(summary)}) {
    if (!status.ok()) LogError("summary.json: ", status.message());
  }
}
}  // namespace stretto::services
