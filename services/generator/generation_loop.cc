#include "services/generator/generation_loop.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/weights/version.h"
#include "services/common/log.h"

namespace stretto::services {
using engine::Event;

namespace {
constexpr size_t kMaxCommands = 1024;
constexpr int64_t kPublishIntervalNs = 500'000'000;
// How often a swap that must wait for old rollouts is tried again.
constexpr int64_t kSwapRetryMs = 20;
constexpr int64_t kIdlePollNs = 10'000'000;
constexpr int64_t kAbortMs = 2000;  // until what was cancelled has ended: a step
}  // namespace

// --- Generation
// -----------------------------------------------------------------------------------

void Generation::Add(uint32_t sample_index, const Event& event, bool truncated) {
  absl::MutexLock lock(&mutex_);
  SampleUpdate& update = pending_[sample_index];
  update.sample_index = sample_index;
  update.text += event.text;
  if (event.kind == Event::Kind::kToken) {
    update.ids.push_back(event.token);
    update.logprobs.push_back(event.logprob);
    update.versions.push_back(event.version);
    if (truncated) update.sampling_logprobs.push_back(event.sampling_logprob);
    if (!event.top_logprobs.empty()) update.top_logprobs.push_back(event.top_logprobs);
    return;
  }
  if (event.kind == Event::Kind::kPrompt) {
    update.prompt_logprobs = event.prompt_logprobs;
    return;
  }
  update.finished = event.reason;
  update.stop_id = event.stop_id;
  update.stop_string = event.stop_string;
  update.cached_prompt_tokens = event.cached_prompt_tokens;
  if (!event.status.ok()) update.error = std::string(event.status.message());
  urgent_ = true;
}

std::vector<SampleUpdate> Generation::Next(int64_t gather_ms, int64_t timeout_ms) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !pending_.empty(); };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&ready), absl::Milliseconds(timeout_ms))) return {};
  if (gather_ms > 0) {
    mutex_.AwaitWithTimeout(absl::Condition(&urgent_), absl::Milliseconds(gather_ms));
  }
  std::vector<SampleUpdate> updates;
  for (auto& [index, update] : pending_) {
    if (update.finished.has_value()) --num_unfinished_;
    updates.push_back(std::move(update));
  }
  pending_.clear();
  urgent_ = false;
  return updates;
}

bool Generation::Done() const {
  absl::MutexLock lock(&mutex_);
  return num_unfinished_ == 0 && pending_.empty();
}

// --- the loop
// ---------------------------------------------------------------------------------------

GenerationLoop::GenerationLoop(std::unique_ptr<engine::InferenceEngine> engine, Metrics* metrics)
    : engine_(std::move(engine)),
      tokens_total_(metrics->counter("stretto_generator_tokens_total", "Completion tokens.")),
      prompt_tokens_total_(
          metrics->counter("stretto_generator_prompt_tokens_total", "Prompt tokens computed.")),
      preemptions_total_(metrics->counter("stretto_generator_preemptions_total",
                                          "Rollouts that lost their blocks for a while.")),
      prefix_query_tokens_(metrics->counter("stretto_generator_prefix_cache_query_tokens_total",
                                            "Prompt tokens of completions that have begun.")),
      prefix_hit_tokens_(metrics->counter(
          "stretto_generator_prefix_cache_hit_tokens_total",
          "Of them, those that the prefix cache or another of the same prompt had computed.")),
      running_(metrics->gauge("stretto_generator_running", "Rollouts being decoded.")),
      queued_(metrics->gauge("stretto_generator_queued", "Rollouts that wait.")),
      blocks_(metrics->gauge("stretto_generator_blocks", "KV blocks altogether.")),
      free_blocks_(metrics->gauge("stretto_generator_free_blocks", "Free KV blocks.")),
      cached_blocks_(metrics->gauge("stretto_generator_cached_blocks",
                                    "KV blocks that the prefix cache knows, in use or free.")),
      version_gauge_(metrics->gauge("stretto_policy_version", "Policy version in use.")),
      speculation_metrics_(metrics),
      latency_metrics_(metrics) {
  thread_ = std::thread([this] { ThreadMain(); });
}

GenerationLoop::~GenerationLoop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

bool GenerationLoop::Run(const std::function<void()>& command) {
  Command entry{.body = &command};
  absl::MutexLock lock(&mutex_);
  if (commands_.size() >= kMaxCommands || stopping_) return false;
  commands_.push_back(&entry);
  mutex_.Await(absl::Condition(&entry.done));
  return true;
}

bool GenerationLoop::RunCommands() {
  std::deque<Command*> commands;
  {
    absl::MutexLock lock(&mutex_);
    const bool idle = !engine_->HasWork();
    const auto woken = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stopping_ || !commands_.empty();
    };
    if (idle) mutex_.AwaitWithTimeout(absl::Condition(&woken), absl::Milliseconds(500));
    commands.swap(commands_);
    if (stopping_ && commands.empty()) return false;
  }
  for (Command* command : commands) (*command->body)();
  absl::MutexLock lock(&mutex_);
  for (Command* command : commands) command->done = true;
  return true;
}

void GenerationLoop::ThreadMain() {
  while (RunCommands()) {
    if (engine_->HasWork()) {
      const int64_t start_ns = Clock::Real().NowNs();
      const absl::Span<const Event> events = engine_->Step();
      busy_seconds_ += static_cast<double>(Clock::Real().NowNs() - start_ns) * 1e-9;
      Measure(events, start_ns);
      // Who has an answer finds in the metrics that it has ended.
      if (std::any_of(events.begin(), events.end(),
                      [](const Event& event) { return event.kind == Event::Kind::kFinished; })) {
        Publish();
      }
      Dispatch(events);
    }
    if (Clock::Real().NowNs() - last_publish_ns_ >= kPublishIntervalNs) Publish();
  }
}

void GenerationLoop::Measure(absl::Span<const Event> events, int64_t start_ns) {
  const int64_t now_ns = Clock::Real().NowNs();
  const auto waits_still = [&](uint64_t id) {
    const auto found = targets_.find(id);
    if (found == targets_.end()) return false;  // cancelled
    if (engine_->IsQueued(id)) return true;
    latency_metrics_.Begun(found->second.times, start_ns);
    return false;
  };
  not_begun_.erase(std::remove_if(not_begun_.begin(), not_begun_.end(),
                                  [&](uint64_t id) { return !waits_still(id); }),
                   not_begun_.end());
  for (const Event& event : events) {
    const auto found = targets_.find(event.request_id);
    if (found != targets_.end() && event.kind == Event::Kind::kToken) ++found->second.num_new;
  }
  for (const Event& event : events) {
    const auto found = targets_.find(event.request_id);
    if (found == targets_.end()) continue;
    Target& target = found->second;
    const int64_t num_new = std::exchange(target.num_new, 0);
    if (num_new > 0) latency_metrics_.Tokens(&target.times, num_new, now_ns);
    if (event.kind == Event::Kind::kFinished) {
      latency_metrics_.Ended(target.times, event.reason, now_ns);
    }
  }
}

// One a second: weights that aren't finite fail everything.
void GenerationLoop::LogFailure(Api api, const absl::Status& status) {
  const int64_t now_ns = Clock::Real().NowNs();
  if (now_ns < next_failure_log_ns_) {
    ++num_failures_untold_;
    return;
  }
  const int64_t untold = std::exchange(num_failures_untold_, 0);
  LogWarning("a completion failed (", api == Api::kHttp ? "HTTP" : "gRPC", "): ", status.ToString(),
             untold > 0 ? absl::StrCat("; ", untold, " more before it") : "");
  next_failure_log_ns_ = now_ns + 1'000'000'000;
}

void GenerationLoop::Dispatch(absl::Span<const Event> events) {
  for (const Event& event : events) {
    const auto found = targets_.find(event.request_id);
    if (found == targets_.end()) continue;
    const Target& target = found->second;
    target.generation->Add(target.sample_index, event, target.truncated);
    if (event.kind == Event::Kind::kFinished) {
      if (!event.status.ok()) LogFailure(target.times.api, event.status);
      targets_.erase(found);
    }
  }
}

void GenerationLoop::Publish() {
  const int64_t now_ns = Clock::Real().NowNs();
  last_publish_ns_ = now_ns;
  const engine::EngineStats stats = engine_->stats();
  const auto add = [&](const Counter& counter, int64_t engine::EngineStats::*count) {
    counter.Add(static_cast<double>(stats.*count - published_.*count));
  };
  add(tokens_total_, &engine::EngineStats::tokens_generated);
  add(prompt_tokens_total_, &engine::EngineStats::prompt_tokens_computed);
  add(prefix_query_tokens_, &engine::EngineStats::prompt_tokens_asked);
  add(prefix_hit_tokens_, &engine::EngineStats::prompt_tokens_cached);
  add(preemptions_total_, &engine::EngineStats::num_preemptions);
  published_ = stats;
  running_.Set(static_cast<double>(stats.num_running));
  queued_.Set(static_cast<double>(stats.num_queued));
  blocks_.Set(static_cast<double>(stats.blocks_total));
  cached_blocks_.Set(static_cast<double>(stats.blocks_cached));
  free_blocks_.Set(static_cast<double>(stats.blocks_total - stats.blocks_used));
  version_gauge_.Set(static_cast<double>(engine_->version()));
  speculation_metrics_.Publish(stats.speculation, now_ns);
}

absl::StatusOr<std::shared_ptr<Generation>> GenerationLoop::Submit(GenerationRequest request) {
  if (request.samples.empty()) return absl::InvalidArgumentError("no samples are asked for");
  auto generation = std::make_shared<Generation>(request.samples.size());
  request.submitted_ns = Clock::Real().NowNs();
  absl::Status status;
  const bool ran = Run([&] { status = SubmitOnThread(request, generation); });
  if (!ran) return absl::ResourceExhaustedError("too many calls are waiting; try again");
  if (!status.ok()) return status;
  return generation;
}

absl::Status GenerationLoop::SubmitOnThread(GenerationRequest& request,
                                            const std::shared_ptr<Generation>& generation) {
  if (request.expected_version >= 0 &&
      (request.expected_version != engine_->version() ||
       (!request.expected_hash.empty() && request.expected_hash != engine_->weights_hash()))) {
    return absl::FailedPreconditionError(absl::StrCat(
        engine::VersionName(request.expected_version, request.expected_hash), " is expected, ",
        engine::VersionName(engine_->version(), engine_->weights_hash()), " is in use"));
  }
  const engine::SamplingParams& sampling = request.sampling;
  const bool truncated = sampling.temperature > 0 &&
                         (sampling.top_k > 0 || sampling.top_p < 1.0f || sampling.min_p > 0 ||
                          sampling.ChangesLogits() || sampling.min_tokens > 0);
  std::vector<engine::Request> requests;
  bool as_group = true;
  for (SampleSpec& sample : request.samples) {
    engine::Request& entry = requests.emplace_back();
    entry.id = next_request_id_++;
    entry.prompt_ids = request.prompt_ids;
    entry.forced_prefix = std::move(sample.forced_prefix);
    entry.sampling = sampling;
    entry.draw = {.run_seed = request.run_seed,
                  .prompt_id = request.prompt_id,
                  .sample_index = sample.sample_index};
    entry.priority = request.priority;
    entry.want_text = request.want_text;
    entry.prompt_logprobs = request.prompt_logprobs && requests.size() == 1;
    if (requests.size() == 1) {
      // Before anything is copied for the others.
      RETURN_IF_ERROR(engine_->Check(entry));
      const auto num = static_cast<int64_t>(request.samples.size());
      const auto num_tokens = static_cast<int64_t>(request.prompt_ids.size());
      RETURN_IF_ERROR(engine_->CheckRoom(num, num * num_tokens));
    }
    as_group = as_group && entry.forced_prefix.empty();
    generation->request_ids_.push_back(entry.id);
  }
  absl::Status status = SubmitToEngine(std::move(requests), as_group);
  if (!status.ok()) return status;
  const CompletionTimes times{.api = request.api, .submitted_ns = request.submitted_ns};
  for (size_t i = 0; i < request.samples.size(); ++i) {
    targets_[generation->request_ids_[i]] = {.generation = generation,
                                             .sample_index = request.samples[i].sample_index,
                                             .truncated = truncated,
                                             .times = times};
    not_begun_.push_back(generation->request_ids_[i]);
  }
  return absl::OkStatus();
}

absl::Status GenerationLoop::SubmitToEngine(std::vector<engine::Request> requests, bool as_group) {
  if (as_group && requests.size() > 1) return engine_->SubmitGroup(std::move(requests));
  std::vector<uint64_t> taken;
  for (engine::Request& request : requests) {
    const uint64_t id = request.id;
    absl::Status status = engine_->Submit(std::move(request));
    if (!status.ok()) {
      // All or none. The ends of those that were taken come for ids that nobody waits for.
      for (const uint64_t earlier : taken) (void)engine_->Cancel(earlier);
      return status;
    }
    taken.push_back(id);
  }
  return absl::OkStatus();
}

void GenerationLoop::RunSurely(const std::function<void()>& command) {
  while (!Run(command)) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    Clock::Real().SleepNs(1'000'000);
  }
}

void GenerationLoop::Cancel(const std::shared_ptr<Generation>& generation) {
  // A full queue is no reason to keep computing for someone who has gone.
  RunSurely([this, &generation] {
    for (const uint64_t id : generation->request_ids_) {
      if (targets_.contains(id)) (void)engine_->Cancel(id);
    }
  });
}

absl::StatusOr<double> GenerationLoop::Swap(engine::ServedWeights weights,
                                            engine::SwapPolicy policy,
                                            const std::function<bool()>& give_up) {
  while (true) {
    absl::Status status;
    double seconds = 0;
    const bool ran = Run([&] {
      const int64_t start_ns = Clock::Real().NowNs();
      status = engine_->SwapWeights(weights, policy);
      seconds = static_cast<double>(Clock::Real().NowNs() - start_ns) * 1e-9;
    });
    if (!ran) return absl::ResourceExhaustedError("too many calls are waiting; try again");
    if (status.ok()) return seconds;
    if (!absl::IsResourceExhausted(status) || give_up()) return status;
    Clock::Real().SleepNs(kSwapRetryMs * 1'000'000);
  }
}

LoopStatus GenerationLoop::Status() {
  LoopStatus status;
  (void)Run([&] {
    status.stats = engine_->stats();
    status.version = engine_->version();
    status.hash = engine_->weights_hash();
    status.busy_seconds = busy_seconds_;
  });
  absl::MutexLock lock(&mutex_);
  status.draining = draining_;
  return status;
}

void GenerationLoop::SetDraining(bool draining) {
  RunSurely([this, draining] { draining ? engine_->Drain() : engine_->Undrain(); });
  absl::MutexLock lock(&mutex_);
  draining_ = draining;
}

bool GenerationLoop::IsDraining() const {
  absl::MutexLock lock(&mutex_);
  return draining_;
}

void GenerationLoop::CancelAll(std::optional<Api> api) {
  SetDraining(true);
  RunSurely([this, api] {
    std::vector<uint64_t> ids;
    for (const auto& [id, target] : targets_) {
      if (!api.has_value() || target.times.api == *api) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end());
    for (const uint64_t id : ids) (void)engine_->Cancel(id);
  });
}

bool GenerationLoop::AwaitIdle(int64_t timeout_ms) {
  const int64_t end_ns = Clock::Real().NowNs() + timeout_ms * 1'000'000;
  while (!Idle()) {
    if (Clock::Real().NowNs() >= end_ns) return false;
    Clock::Real().SleepNs(kIdlePollNs);
  }
  return true;
}

void GenerationLoop::FinishWithin(int64_t timeout_ms, bool abort_rollouts) {
  SetDraining(true);
  if (abort_rollouts) CancelAll(Api::kGrpc);
  if (AwaitIdle(timeout_ms)) return;
  LogWarning("what has not ended within ", timeout_ms, " ms (--grace-ms) is cut off");
  CancelAll();
  (void)AwaitIdle(kAbortMs);
}

bool GenerationLoop::Idle() {
  bool idle = false;
  return Run([&] { idle = !engine_->HasWork(); }) && idle;
}
}  // namespace stretto::services
