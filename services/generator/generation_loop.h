// The engine's owner: one thread that applies commands, computes steps and hands events to the
// calls they belong to. Everyone else speaks to the engine through this class.
//
//   Submit/Cancel/Swap/… ─► bounded command queue ─► engine thread: commands → Step() → events
//                                                                                    │
//   Generation::Next ◄─ updates, put together per sample until they are fetched ◄────┘
//
// Memory of a call that nobody reads is bounded by the tokens it asked for. Knows no gRPC.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/inference/engine.h"
#include "services/common/metrics.h"
#include "services/generator/latency_metrics.h"
#include "services/generator/speculation_metrics.h"

namespace stretto::services {
struct SampleSpec {
  uint32_t sample_index = 0;
  std::vector<int32_t> forced_prefix;  // tokens that exist already; not reported again
};

// The completions of one prompt.
struct GenerationRequest {
  std::vector<int32_t> prompt_ids;
  engine::SamplingParams sampling;
  uint64_t run_seed = 0;
  uint64_t prompt_id = 0;
  int32_t priority = 0;
  bool want_text = false;
  bool prompt_logprobs = false;  // come with news of the first sample
  Api api = Api::kGrpc;          // who asks, for the latencies
  int64_t submitted_ns = 0;      // set by Submit
  std::vector<SampleSpec> samples;
  // The weights to generate with; a negative number: whichever are current.
  int64_t expected_version = -1;
  std::string expected_hash;
};

// News of one sample: the tokens since the last ones, and at the end why it ended.
struct SampleUpdate {
  uint32_t sample_index = 0;
  std::vector<int32_t> ids;
  std::vector<float> logprobs, sampling_logprobs;
  std::vector<int64_t> versions;
  std::vector<std::vector<engine::TokenLogprob>> top_logprobs;  // where asked for, one a token
  std::vector<engine::PromptLogprob> prompt_logprobs;
  std::string text;
  std::optional<engine::FinishReason> finished;
  std::string error;
  int32_t stop_id = -1, stop_string = -1;  // with `finished`; as engine::Event's
  int32_t cached_prompt_tokens = 0;        // with `finished`
};

// One call's results. Thread-safe; written by the engine thread, read by the call's.
class Generation {
 public:
  explicit Generation(size_t num_samples) : num_unfinished_(num_samples) {}
  // Blocks until a sample has ended, or something is there and `gather_ms` have passed, or
  // `timeout_ms` have passed. What is there then, one update a sample; may be empty.
  std::vector<SampleUpdate> Next(int64_t gather_ms, int64_t timeout_ms);
  // Every sample has ended and its end has been fetched.
  bool Done() const;

 private:
  friend class GenerationLoop;
  void Add(uint32_t sample_index, const engine::Event& event, bool truncated);

  mutable absl::Mutex mutex_;
  std::map<uint32_t, SampleUpdate> pending_ ABSL_GUARDED_BY(mutex_);
  bool urgent_ ABSL_GUARDED_BY(mutex_) = false;
  size_t num_unfinished_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> request_ids_;  // the engine thread's
};

struct LoopStatus {
  engine::EngineStats stats;
  int64_t version = 0;
  std::string hash;
  double busy_seconds = 0;
  bool draining = false;
};

class GenerationLoop {
 public:
  // Takes over the engine. `metrics` outlives the loop.
  GenerationLoop(std::unique_ptr<engine::InferenceEngine> engine, Metrics* metrics);
  ~GenerationLoop();

  // Blocks for at most a step. RESOURCE_EXHAUSTED: too much is waiting; INVALID_ARGUMENT: can never
  // be served; FAILED_PRECONDITION: other weights than expected; UNAVAILABLE: draining.
  absl::StatusOr<std::shared_ptr<Generation>> Submit(GenerationRequest request);
  // Frees everything of the call; its samples end as aborted.
  void Cancel(const std::shared_ptr<Generation>& generation);
  // Swaps between two steps; waits (generation goes on) while rollouts on older versions must end
  // first. The seconds that generation stood still. `give_up` is asked now and then while waiting.
  absl::StatusOr<double> Swap(engine::ServedWeights weights, engine::SwapPolicy policy,
                              const std::function<bool()>& give_up);
  LoopStatus Status();
  // Refuses new work from now on (or takes it again).
  void SetDraining(bool draining);
  bool IsDraining() const;  // doesn't wait for the engine
  // Ends all samples as aborted, or those of one kind of caller, and refuses new work.
  void CancelAll(std::optional<Api> api = std::nullopt);
  // Refuses new work, and lets what runs end within `timeout_ms`; what hasn't is then aborted, as
  // rollouts are at once if `abort_rollouts`.
  void FinishWithin(int64_t timeout_ms, bool abort_rollouts);
  bool Idle();

 private:
  struct Target {
    std::shared_ptr<Generation> generation;
    uint32_t sample_index = 0;
    bool truncated = false;  // sampling log-probs say something of their own
    int64_t num_new = 0;     // tokens of the events being handed out
    CompletionTimes times;
  };
  // Runs `command` on the engine thread and waits for it; false: the queue is full.
  bool Run(const std::function<void()>& command);
  // The same for what must not be left out: waits for room in the queue.
  void RunSurely(const std::function<void()>& command);
  bool AwaitIdle(int64_t timeout_ms);
  void ThreadMain();
  bool RunCommands();
  void LogFailure(Api api, const absl::Status& status);
  void Dispatch(absl::Span<const engine::Event> events);
  // Before Dispatch: the latencies of a step that began then and has just ended.
  void Measure(absl::Span<const engine::Event> events, int64_t start_ns);
  void Publish();
  absl::Status SubmitOnThread(GenerationRequest& request,
                              const std::shared_ptr<Generation>& generation);
  absl::Status SubmitToEngine(std::vector<engine::Request> requests, bool as_group);

  struct Command {
    const std::function<void()>* body = nullptr;
    bool done = false;
  };
  std::unique_ptr<engine::InferenceEngine> engine_;  // the engine thread's
  absl::flat_hash_map<uint64_t, Target> targets_;    // the engine thread's
  uint64_t next_request_id_ = 1;                     // the engine thread's
  double busy_seconds_ = 0;                          // the engine thread's
  engine::EngineStats published_;                    // the engine thread's
  int64_t last_publish_ns_ = 0;
  int64_t num_failures_untold_ = 0, next_failure_log_ns_ = 0;  // the engine thread's

  Counter tokens_total_, prompt_tokens_total_, preemptions_total_;
  Counter prefix_query_tokens_, prefix_hit_tokens_;
  Gauge running_, queued_, blocks_, free_blocks_, cached_blocks_, version_gauge_;
  SpeculationMetrics speculation_metrics_;
  LatencyMetrics latency_metrics_;
  std::vector<uint64_t> not_begun_;  // the engine thread's

  mutable absl::Mutex mutex_;
  std::deque<Command*> commands_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};
}  // namespace stretto::services
