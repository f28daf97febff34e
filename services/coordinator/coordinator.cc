// The loop: turns, start, end, and what the outside sees.
#include "services/coordinator/coordinator.h"

#include <algorithm>
#include <future>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"
#include "services/common/log.h"
#include "services/common/member_client.h"

namespace stretto::services {
namespace {
constexpr int64_t kTickMs = 50;
constexpr int64_t kAskSeconds = 10;
// The status is for people and their tools, who don't see more of it.
constexpr int64_t kStatusNs = 20'000'000;
// Turns come every tick. What lies between two beyond this is time in which nobody was listened to;
// from the longer one on it is told of.
constexpr int64_t kMaxGapNs = 250'000'000, kLongGapNs = 1'000'000'000;
// How often it is looked whether the run's folder is still there.
constexpr int64_t kCheckPlaceNs = 1'000'000'000;
// How long members and watchers have to hear that the run has ended; the shorter time when all
// members have heard it.
constexpr int64_t kFarewellMs = 3000, kShortFarewellMs = 500;

CoreOptions MakeCoreOptions(const RunConfig& c, const Dataset& train, const Dataset& eval) {
  CoreOptions o;
  o.num_steps = c.train.steps;
  o.prompts_per_step = c.train.prompts_per_step;
  o.group_size = c.rollout.group_size;
  o.max_staleness = c.schedule.max_staleness;
  o.max_prompt_tokens = c.MaxPromptTokens();
  o.max_group_replacements = c.train.max_group_replacements;
  o.replace_without_signal = c.algorithm.dynamic_sampling;
  static_assert(kAutoCheckpoints == TrainSection::kAutoInterval);
  o.checkpoint_every = c.train.checkpoint_every;
  o.checkpoint_mtbf_seconds = c.train.checkpoint_mtbf_hours * 3600;
  o.stop_on_failed_save = c.train.checkpoint_failure == "stop";
  const auto num_lines = static_cast<int64_t>(eval.lines.size());
  o.num_eval_prompts = c.eval.max_prompts > 0 ? std::min(c.eval.max_prompts, num_lines) : num_lines;
  o.eval_before = c.eval.before;
  o.eval_after = c.eval.after;
  o.eval_every = c.eval.every;
  o.num_train_lines = train.lines.size();
  o.seed = c.run.seed;
  o.shuffle = c.data.shuffle;
  o.kl_coef = c.algorithm.kl_coef;
  o.kl_controller = {.target = c.algorithm.kl_target, .horizon = c.algorithm.kl_horizon};
  o.num_trainers = c.cluster.trainers;
  o.min_trainers = c.cluster.min_trainers;
  o.ranks_per_copy = c.cluster.tensor_parallel;
  o.relay_fanout = c.cluster.relay_fanout;
  const bool stops_or_skips = c.train.grad_spike_factor > 0 && c.train.grad_spike != "warn";
  o.steps_ahead = c.schedule.max_staleness > 0 && c.cluster.trainers == 1 &&
                  c.algorithm.kl_target <= 0 && !stops_or_skips &&
                  c.train.not_finite_step != "stop";
  o.trainer_grace_ns = c.cluster.trainer_grace_ms * 1'000'000;
  o.settle_ns = 20'000'000;
  o.lease_ns = c.cluster.lease_ms * 1'000'000;
  // Room for what decodes, and as much again of small groups so that no slot waits for a message.
  o.max_samples_in_flight = c.cluster.max_running + c.rollout.group_size;
  return o;
}

v1::RunState StateOf(RunPhase phase) {
  switch (phase) {
    case RunPhase::kWaiting:
      return v1::RUN_STATE_WAITING;
    case RunPhase::kRunning:
      return v1::RUN_STATE_RUNNING;
    case RunPhase::kPaused:
      return v1::RUN_STATE_PAUSED;
    case RunPhase::kStopping:
      return v1::RUN_STATE_STOPPING;
    case RunPhase::kDone:
      return v1::RUN_STATE_DONE;
    case RunPhase::kFailed:
      return v1::RUN_STATE_FAILED;
  }
  return v1::RUN_STATE_UNSPECIFIED;
}

v1::Pool PoolOf(PoolKind pool) {
  switch (pool) {
    case PoolKind::kGenerator:
      return v1::POOL_GENERATOR;
    case PoolKind::kScorer:
      return v1::POOL_SCORER;
    case PoolKind::kTrainer:
      return v1::POOL_TRAINER;
  }
  return v1::POOL_UNSPECIFIED;
}
}  // namespace

std::string RunEssence(RunConfig config) {
  config.train.steps = 0;
  const TrainSection defaults;
  config.train.checkpoint_every = 0;
  config.train.checkpoint_mtbf_hours = defaults.checkpoint_mtbf_hours;
  config.train.checkpoint_kind = defaults.checkpoint_kind;
  config.train.checkpoint_chain = defaults.checkpoint_chain;
  config.train.checkpoint_failure = defaults.checkpoint_failure;
  config.train.keep_checkpoints = 1;
  config.train.max_group_replacements = 0;
  config.eval = EvalSection();
  const std::string backend = config.cluster.backend;
  config.cluster = ClusterSection();
  config.cluster.backend = backend;
  config.run.dir.clear();
  return ToYaml(config);
}

Coordinator::Coordinator(const RunConfig& config, const CoordinatorParts& parts)
    : config_(config), parts_(parts), run_clock_(kMaxGapNs) {}

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Start(const RunConfig& config,
                                                                const CoordinatorParts& parts) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(config, parts));
  RETURN_IF_ERROR(coordinator->Open());
  coordinator->calls_ = std::make_unique<Calls>(
      [c = coordinator.get()](std::function<void()> event) { c->Post(std::move(event)); });
  coordinator->loop_ = std::thread([c = coordinator.get()] { c->Loop(); });
  return coordinator;
}

absl::Status Coordinator::Open() {
  const DatasetOptions options{.skip_bad_lines = config_.data.on_bad_line == "skip",
                               .rewards = config_.rewards};
  ASSIGN_OR_RETURN(train_, ReadDataset(config_.data.train, options));
  if (!config_.data.eval.empty()) {
    ASSIGN_OR_RETURN(eval_, ReadDataset(config_.data.eval, options));
  }
  for (const Dataset* data : {&train_, &eval_}) {
    for (const std::string& warning : data->warnings) LogWarning("skipped ", warning);
    if (data->warnings.empty()) continue;
    const bool is_one = data->warnings.size() == 1;
    Tell(absl::StrCat(data->warnings.size(), is_one ? " line of data is" : " lines of data are",
                      " left out (", data->warnings.front(), is_one ? ")" : ", …)"));
  }
  RETURN_IF_ERROR(Files::Real().MakeDirs(config_.run.dir));
  const std::string run_id = absl::StrCat(config_.run.name, "-", config_.hash.substr(0, 8));
  ASSIGN_OR_RETURN(journal_, Journal::Open(JoinPath(config_.run.dir, "run.sqlite"), run_id,
                                           EssenceWithData(), /*wait=*/absl::Seconds(10)));
  ASSIGN_OR_RETURN(RestoredRun restored, journal_->Restore());
  RETURN_IF_ERROR(ForgetLostCheckpoint(restored));
  ASSIGN_OR_RETURN(const std::vector<StepRecord> steps, journal_->ReadSteps());
  ASSIGN_OR_RETURN(evals_, journal_->ReadEvals());
  ASSIGN_OR_RETURN(const RunTotals totals, journal_->ReadTotals());
  ASSIGN_OR_RETURN(outputs_,
                   RunOutputs::Open(Files::Real(), *parts_.clock, config_.run.dir, steps));
  ASSIGN_OR_RETURN(const auto rewards, journal_->ReadEvalRewards());
  for (const auto& [version, score] : evals_) {
    const auto reward = rewards.find(version);
    RETURN_IF_ERROR(outputs_->AddEval(
        version, score, reward == rewards.end() ? std::nullopt : std::optional(reward->second)));
  }
  earlier_seconds_ = totals.seconds;
  num_rollouts_ = totals.num_rollouts;
  if (!steps.empty()) last_metrics_ = steps.back().metrics;
  for (const StepRecord& step : steps) RememberNorm(step);
  const int64_t version = restored.versions.empty() ? 0 : restored.versions.rbegin()->first;
  first_step_ = version;
  if (version > 0) LogInfo("going on after step ", version);
  core_ = std::make_unique<Core>(MakeCoreOptions(config_, train_, eval_), std::move(restored));
  start_ns_ = mark_ns_ = busy_since_ns_ = NowNs();
  return absl::OkStatus();
}

// Prompts are known by their places: in other data they would be other prompts.
std::string Coordinator::EssenceWithData() const {
  std::string text = RunEssence(config_);
  for (const auto& [key, data] : {std::pair("data.train", &train_), {"data.eval", &eval_}}) {
    absl::StrAppend(&text, "\ncontent of ", key, ": ", data->lines.size(), " lines, hash ",
                    data->Hash());
  }
  return text;
}

// A checkpoint that was removed is none. (Where the trainers' disk isn't the coordinator's, this
// does no more than to have the newest version saved again.)
absl::Status Coordinator::ForgetLostCheckpoint(RestoredRun& restored) {
  if (restored.checkpoint_version < 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto checkpoint, journal_->ReadCheckpoint());
  const std::string name = checkpoint.second.substr(checkpoint.second.rfind('/') + 1);
  const std::string path = JoinPath(JoinPath(config_.run.dir, "checkpoints"), name);
  if (name.empty() || Files::Real().Exists(path)) return absl::OkStatus();
  Tell(absl::StrCat("the checkpoint of version ", restored.checkpoint_version, " (", path,
                    ") isn't there any more: the trainers begin with the newest that is left, or "
                    "with the model, and steps are taken again, with the same results"));
  restored.checkpoint_version = -1;
  return absl::OkStatus();
}

Coordinator::~Coordinator() {
  if (calls_ != nullptr) calls_->CancelAll();
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  if (loop_.joinable()) loop_.join();
  calls_ = nullptr;
}

void Coordinator::Post(std::function<void()> event) {
  absl::MutexLock lock(&mutex_);
  posted_.push_back(std::move(event));
}

void Coordinator::Loop() {
  Turn({});  // what the restored run wants at once
  for (;;) {
    std::deque<std::function<void()>> events;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return closing_ || !posted_.empty();
      };
      mutex_.AwaitWithTimeout(absl::Condition(&has_work), absl::Milliseconds(kTickMs));
      if (closing_) break;
      events.swap(posted_);
    }
    Turn(events);
  }
}

void Coordinator::Turn(const std::deque<std::function<void()>>& events) {
  CountBusy();
  for (const auto& event : events) event();
  if (const int64_t now = NowNs(); now - place_checked_ns_ > kCheckPlaceNs) {
    place_checked_ns_ = now;
    journal_->CheckPlace();
  }
  core_->OnTick(RunNowNs());
  const std::vector<Command> commands = core_->TakeCommands();
  for (const Command& command : commands) {
    std::visit([this](const auto& c) { Record(c); }, command);
  }
  if (CommitTurn(commands)) {
    for (const Command& command : commands) {
      if (std::holds_alternative<TakeStep>(command)) continue;
      std::visit([this](const auto& c) { Do(c); }, command);
    }
  } else if (ended_ns_ < 0) {
    FailOnJournal();
  }
  sync_journal_ = false;
  TellLosses();
  for (auto& reply : std::exchange(replies_, {})) reply();
  // Turns come by the hundred in a second.
  if (ended_ns_ >= 0 || NowNs() - status_ns_ >= kStatusNs) PublishStatus();
  if (ended_ns_ < 0) return;
  // Members hear of the end with their next heartbeat, watchers when they ask.
  const auto& members = core_->members();
  const bool all_left =
      !members.empty() && std::none_of(members.begin(), members.end(),
                                       [](const auto& entry) { return entry.second.is_live; });
  const int64_t wait_ms = all_left ? kShortFarewellMs : kFarewellMs;
  if (NowNs() - ended_ns_ > wait_ms * 1'000'000) {
    parts_.stop->Request(end_status_);
    absl::MutexLock lock(&mutex_);
    run_is_over_ = true;
  }
}

// What the turn has recorded survives this process when it is committed, and the machine when it is
// synced, which takes milliseconds: the trainers' next step, of which nobody hears before its own
// turn, begins meanwhile.
bool Coordinator::CommitTurn(const std::vector<Command>& commands) {
  if (!journal_->Commit(/*sync=*/false).ok()) return false;
  for (const Command& command : commands) {
    if (const auto* step = std::get_if<TakeStep>(&command)) Do(*step);
  }
  return !sync_journal_ || journal_->Sync().ok();
}

int64_t Coordinator::RunNowNs() {
  const int64_t now_ns = run_clock_.Read(NowNs());
  if (run_clock_.num_gaps() == num_gaps_) return now_ns;
  num_gaps_ = run_clock_.num_gaps();
  const int64_t gap_ns = run_clock_.last_gap_ns();
  if (gap_ns >= 0 && gap_ns < kLongGapNs) return now_ns;
  Do(CountFault{"clock_gap", ""});
  LogWarning("the clock moved by ", static_cast<double>(gap_ns) * 1e-9,
             " s at once (stopped, starved, or the clock was set); no lease ran out in that time");
  return now_ns;
}

// What cannot be recorded must not be done.
void Coordinator::FailOnJournal() {
  Do(CountFault{"journal", ""});
  end_status_ = journal_->status();
  LogError("the run ends: ", end_status_.message());
  core_->OnFault(end_status_, RunNowNs());
  core_->TakeCommands();
  calls_->CancelAll();
  ended_ns_ = NowNs();
}

// Asks on the loop and waits for the answer, which is given when its turn has been committed.
template <class T>
absl::StatusOr<T> Coordinator::Ask(std::function<absl::StatusOr<T>()> question) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
  std::future<absl::StatusOr<T>> future = promise->get_future();
  Post([this, promise, question = std::move(question)] {
    auto answer = std::make_shared<absl::StatusOr<T>>(question());
    replies_.push_back([promise, answer] { promise->set_value(std::move(*answer)); });
  });
  if (future.wait_for(std::chrono::seconds(kAskSeconds)) != std::future_status::ready) {
    return absl::UnavailableError("the coordinator is busy or ending");
  }
  return future.get();
}

absl::StatusOr<v1::RegisterResponse> Coordinator::Register(const v1::RegisterRequest& request) {
  return Ask<v1::RegisterResponse>([this, request] { return DoRegister(request); });
}

absl::StatusOr<v1::HeartbeatResponse> Coordinator::Heartbeat(const v1::HeartbeatRequest& request) {
  return Ask<v1::HeartbeatResponse>([this, request] { return DoHeartbeat(request); });
}

absl::Status Coordinator::Leave(const v1::LeaveRequest& request) {
  return Ask<bool>([this, request]() -> absl::StatusOr<bool> {
           core_->OnLeave(request.name(), request.member_epoch(), RunNowNs());
           return true;
         })
      .status();
}

absl::Status Coordinator::CheckMember(const v1::RegisterRequest& request) {
  if (!request.run_id().empty() && request.run_id() != journal_->run_id()) {
    return absl::FailedPreconditionError(
        absl::StrCat("this is run '", journal_->run_id(), "', not '", request.run_id(), "'"));
  }
  if (request.name().empty() || request.address().empty()) {
    return absl::InvalidArgumentError("a member needs a name and an address");
  }
  if (!request.config_hash().empty() && request.config_hash() != config_.hash) {
    return absl::FailedPreconditionError(
        absl::StrCat("the member read another run file (hash ", request.config_hash(),
                     ") than the coordinator (", config_.hash, ")"));
  }
  const v1::NumericProfile& p = request.profile();
  if (p.backend().empty() || config_.schedule.numerics != "exact") return absl::OkStatus();
  const std::string profile =
      absl::StrCat(p.backend(), "/", p.instruction_set(), "/", p.dtype(), "/", p.k_leaves());
  if (profile_.empty()) profile_ = profile;
  if (profile == profile_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the run is exact and computes in profile ", profile_, "; the member computes in ", profile));
}

absl::StatusOr<v1::RegisterResponse> Coordinator::DoRegister(const v1::RegisterRequest& request) {
  if (const absl::Status status = CheckMember(request); !status.ok()) {
    Do(CountFault{"refused_member", request.name()});
    return status;
  }
  PoolKind pool = PoolKind::kGenerator;
  if (request.pool() == v1::POOL_SCORER) {
    pool = PoolKind::kScorer;
  } else if (request.pool() == v1::POOL_TRAINER) {
    pool = PoolKind::kTrainer;
  } else if (request.pool() != v1::POOL_GENERATOR) {
    return absl::InvalidArgumentError("a member needs a pool");
  }
  ASSIGN_OR_RETURN(const uint64_t epoch,
                   core_->OnRegister(request.name(), pool, request.address(),
                                     FromProto(request.version()), RunNowNs()));
  LogInfo(request.name(), " joined from ", request.address(), ", epoch ", epoch, ", version ",
          request.version().number());
  v1::RegisterResponse response;
  response.set_run_id(journal_->run_id());
  response.set_member_epoch(epoch);
  response.set_heartbeat_interval_ms(static_cast<uint32_t>(config_.cluster.heartbeat_ms));
  response.set_lease_ms(static_cast<uint32_t>(config_.cluster.lease_ms));
  return response;
}

absl::StatusOr<v1::HeartbeatResponse> Coordinator::DoHeartbeat(
    const v1::HeartbeatRequest& request) {
  if (!core_->OnHeartbeat(request.name(), request.member_epoch(), RunNowNs())) {
    return absl::FailedPreconditionError(absl::StrCat("epoch ", request.member_epoch(), " of ",
                                                      request.name(),
                                                      " is not its present one; register again"));
  }
  uint64_t& peak = peak_rss_[request.name()];
  peak = std::max<uint64_t>(peak, request.peak_rss_bytes());
  reported_versions_[request.name()] = request.version();
  TakeNotice(request.name(), request.notice());
  v1::HeartbeatResponse response;
  response.set_run_ended(ended_ns_ >= 0);
  if (ended_ns_ >= 0) core_->OnLeave(request.name(), request.member_epoch(), RunNowNs());
  return response;
}

void Coordinator::TakeNotice(const std::string& member, std::string notice) {
  constexpr size_t kMaxBytes = 1000;
  notice.resize(std::min(notice.size(), kMaxBytes));
  std::string& known = notices_[member];
  if (known == notice) return;
  known = std::move(notice);
  if (!known.empty()) Record(RecordEvent{absl::StrCat(member, ": ", known)});
}

void Coordinator::Tell(const std::string& text) {
  constexpr size_t kMaxEvents = 16;
  events_.push_back(text);
  ++num_events_;
  if (events_.size() > kMaxEvents) events_.pop_front();
}

absl::Status Coordinator::Control(v1::ControlRunRequest::Action action) {
  return Ask<bool>([this, action]() -> absl::StatusOr<bool> {
           switch (action) {
             case v1::ControlRunRequest::ACTION_PAUSE:
             case v1::ControlRunRequest::ACTION_RESUME:
               core_->OnPause(action == v1::ControlRunRequest::ACTION_PAUSE, RunNowNs());
               return true;
             case v1::ControlRunRequest::ACTION_STOP:
               core_->OnStop(RunNowNs());
               return true;
             case v1::ControlRunRequest::ACTION_CHECKPOINT:
               core_->OnCheckpointRequest(RunNowNs());
               return true;
             default:
               return absl::InvalidArgumentError("an action is needed");
           }
         })
      .status();
}

void Coordinator::StopAndWait(int64_t timeout_ms) {
  Post([this] { core_->OnStop(RunNowNs()); });
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&run_is_over_), absl::Milliseconds(timeout_ms));
}

std::pair<v1::RunStatus, uint64_t> Coordinator::Status() const {
  absl::MutexLock lock(&mutex_);
  return {status_, status_number_};
}

std::pair<v1::RunStatus, uint64_t> Coordinator::AwaitChange(uint64_t seen,
                                                            int64_t timeout_ms) const {
  absl::MutexLock lock(&mutex_);
  const auto changed = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return status_number_ != seen; };
  mutex_.AwaitWithTimeout(absl::Condition(&changed), absl::Milliseconds(timeout_ms));
  return {status_, status_number_};
}

double Coordinator::SessionSeconds() const {
  const int64_t end_ns = ended_ns_ >= 0 ? ended_ns_ : NowNs();
  return static_cast<double>(end_ns - start_ns_) * 1e-9;
}

void Coordinator::PublishStatus() {
  status_ns_ = NowNs();
  v1::RunStatus status;
  status.set_run_id(journal_->run_id());
  status.set_run_dir(config_.run.dir);
  status.set_first_step(first_step_);
  status.set_last_event(events_.empty() ? "" : events_.back());
  for (const std::string& event : events_) status.add_events(event);
  status.set_num_events(num_events_);
  status.set_session(journal_->session());
  const Core::Round round = core_->round();
  status.set_round_rollouts(static_cast<uint64_t>(round.num_wanted));
  status.set_round_generated(static_cast<uint64_t>(round.num_generated));
  status.set_round_scored(static_cast<uint64_t>(round.num_scored));
  status.set_state(journal_->status().ok() ? StateOf(core_->phase()) : v1::RUN_STATE_FAILED);
  status.set_detail(core_->detail());
  status.set_phase(ended_ns_ >= 0 ? "" : core_->activity());
  status.set_step(core_->version_number());
  status.set_num_steps(config_.train.steps);
  *status.mutable_version() = ToProto(core_->version());
  for (const auto& [name, value] : last_metrics_) (*status.mutable_metrics())[name] = value;
  for (const auto& [name, member] : core_->members()) {
    v1::MemberStatus* m = status.add_members();
    m->set_name(name);
    m->set_pool(PoolOf(member.pool));
    m->set_address(member.address);
    m->set_member_epoch(member.epoch);
    m->set_state(member.state);
    *m->mutable_version() = ToProto(member.version);
    m->set_num_in_flight(static_cast<uint32_t>(member.num_in_flight));
    const auto peak = peak_rss_.find(name);
    if (peak != peak_rss_.end()) m->set_peak_rss_bytes(peak->second);
    const auto notice = notices_.find(name);
    if (notice != notices_.end()) m->set_notice(notice->second);
  }
  const TrainerGroup& trainers = core_->trainers();
  if (config_.cluster.trainers > 1) {
    status.set_trainer_group_epoch(trainers.epoch);
    for (v1::MemberStatus& m : *status.mutable_members()) {
      for (size_t r = 0; r < trainers.ranks.size(); ++r) {
        if (trainers.ranks[r].name == m.name()) m.set_rank(static_cast<uint32_t>(r));
      }
    }
  }
  status.set_checkpoint_version(core_->checkpoints().version);
  status.set_saving_version(core_->save().version);
  status.set_checkpoint_error(core_->checkpoints().error);
  status.set_num_rollouts(num_rollouts_);
  status.set_num_groups_dropped(
      static_cast<uint64_t>(core_->num_rejected() + core_->num_stale_dropped()));
  status.set_elapsed_seconds(earlier_seconds_ + SessionSeconds());
  status.set_buffer_groups(static_cast<uint64_t>(core_->num_buffered()));
  status.set_eval_before(evals_.count(0) > 0 ? evals_.at(0) : -1);
  status.set_eval_last(evals_.empty() ? -1 : evals_.rbegin()->second);
  status.set_eval_last_step(evals_.empty() ? 0 : evals_.rbegin()->first);
  absl::MutexLock lock(&mutex_);
  // Time alone is no change.
  v1::RunStatus before = status_;
  before.set_elapsed_seconds(status.elapsed_seconds());
  if (before.SerializeAsString() != status.SerializeAsString()) ++status_number_;
  status_ = std::move(status);
}
}  // namespace stretto::services
