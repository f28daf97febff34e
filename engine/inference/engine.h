// The inference engine: continuous batching of completions over a paged KV cache. It joins the
// scheduler (who computes what in a step), the model's paged forward pass, and the sampler.
//
//   Submit ─► queued ─► prefilling ─► decoding ─► finished      Step() = plan → forward → sample
//               ▲            │           │                               → events
//               └─ preempted ◄───────────┘   (blocks freed; recomputed to the same bits)
//
// A token's id and log-prob are a pure function of its prefix, the weights' version, its sampling
// parameters and its draw identity: not of its company, chunking, cache hits, preemptions,
// speculation or threads.
//
// Threads: single-threaded. All calls come from one owner thread at a time; the device spreads the
// tensor work. A service wraps the engine in a loop: apply commands, Step(), deliver events.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device/device.h"
#include "engine/inference/request.h"
#include "engine/inference/speculation_options.h"

namespace stretto::engine {
class ModelWeights;
class Transformer;

// Text of one completion as it grows. Push returns the bytes that became certain (whole characters;
// may be empty); Finish the rest.
class TextDecoder {
 public:
  virtual ~TextDecoder() = default;
  virtual std::string Push(int32_t token) = 0;
  virtual std::string Finish() = 0;
};
// Makes a decoder for a new completion, drawn so; its prompt's text is not part of the output.
using TextDecoderFactory = std::function<std::unique_ptr<TextDecoder>(const SamplingParams&)>;

// Weights as the engine uses them. `hash` is the tree hash that proves the version; it keys the
// prefix cache.
struct ServedWeights {
  std::shared_ptr<const ModelWeights> weights;
  int64_t version = 0;
  std::string hash;
};

struct EngineOptions {
  // Memory for keys and values: num_kv_blocks if positive, else kv_cache_bytes.
  int64_t kv_cache_bytes = int64_t{256} << 20;
  int64_t num_kv_blocks = 0;

  int32_t max_running = 64;           // sequences in one step
  int32_t max_tokens_per_step = 512;  // rows of one step; at least max_running
  int32_t max_queued = 4096;          // requests that wait
  int64_t max_queued_tokens = int64_t{64} << 20;
  bool prefix_cache = true;
  int32_t max_live_versions = 2;  // with SwapPolicy::kFinish
  SpeculationOptions speculation;
  std::vector<int32_t> eos_ids;
  TextDecoderFactory text_decoder;  // may be empty: stop strings and text are then refused
};

struct EngineStats {
  int64_t num_running = 0, num_queued = 0;  // now; preempted ones count as queued
  int64_t blocks_total = 0, blocks_used = 0,
          blocks_cached = 0;           // cached: contents known, in use or free
  int64_t prompt_tokens_computed = 0;  // rows of prefill, recomputation included
  int64_t prompt_tokens_cached = 0;    // rows saved by prefix cache and group sharing
  int64_t prompt_tokens_asked = 0;     // given to requests that have begun: computed or saved once
  int64_t tokens_generated = 0;
  int64_t num_preemptions = 0, num_finished = 0, num_aborted = 0, num_steps = 0, num_swaps = 0;
  SpeculationStats speculation;
  double schedule_seconds = 0, forward_seconds = 0, sample_seconds = 0, other_seconds = 0;
};

class InferenceEngine {
 public:
  // `model` (with its device) must outlive the engine.
  // ResourceExhausted when the KV cache cannot be allocated, InvalidArgument for impossible
  // options.
  static absl::StatusOr<std::unique_ptr<InferenceEngine>> Create(const Transformer& model,
                                                                 ServedWeights weights,
                                                                 EngineOptions options);
  virtual ~InferenceEngine() = default;

  // Takes a request. InvalidArgument: the request can never be served (the message says why),
  // AlreadyExists: its id is in use, ResourceExhausted: the queue is full (try again later),
  // Unavailable: draining. A refused request leaves no trace. Allowed while paused.
  virtual absl::Status Submit(Request request) = 0;
  // What Submit would say of the request's values: OK or InvalidArgument.
  virtual absl::Status Check(const Request& request) const = 0;
  // ResourceExhausted: Submit would say so of so many requests of so many given tokens together.
  virtual absl::Status CheckRoom(int64_t num_requests, int64_t num_tokens) const = 0;
  // Takes a group, all or none: requests with the same prompt_ids and priority and no forced
  // prefix. The prompt is computed once and its blocks are shared.
  virtual absl::Status SubmitGroup(std::vector<Request> samples) = 0;

  // One step for up to max_tokens_per_step rows. Blocks for the computation. The events are valid
  // until the next call. Empty when there is nothing to do or the engine is paused (events of
  // cancellations still come). A request whose logits are not finite ends with kError; the others
  // go on.
  virtual absl::Span<const Event> Step() = 0;

  // Ends a request in whatever state it is; its held-back tokens and kFinished(kAborted) come with
  // the next Step(), also while paused. NotFound if it isn't here (finished already or never came).
  virtual absl::Status Cancel(uint64_t request_id) = 0;

  // Whether a request waits and nothing of it has been computed yet.
  virtual bool IsQueued(uint64_t request_id) const = 0;

  virtual void Pause() = 0;  // Step() computes nothing until Resume()
  virtual void Resume() = 0;
  virtual void Drain() = 0;  // refuse new requests; Step() ends those that are here
  virtual void Undrain() = 0;
  // Whether Step() has anything to do, now or once resumed.
  virtual bool HasWork() const = 0;

  // Takes effect before the next Step(); call it between steps. The weights that were in use are
  // released when no rollout needs them. The prefix cache of the old version is unreachable at
  // once. ResourceExhausted: kFinish would keep more than max_live_versions alive (swap again
  // later, when old rollouts have ended). InvalidArgument: no weights, or of another dtype.
  virtual absl::Status SwapWeights(ServedWeights weights, SwapPolicy policy) = 0;
  // Tokens that a prompt and its completion may have together: the model's max_sequence_length, or
  // less where the whole KV cache holds less. A prompt that leaves no room in it is refused, and a
  // max_tokens that goes beyond it.
  virtual int64_t max_context() const = 0;
  // The version that new requests get.
  virtual int64_t version() const = 0;
  virtual const std::string& weights_hash() const = 0;

  virtual EngineStats stats() const = 0;
  // Forgets what the prefix cache holds (blocks in use stay).
  virtual void FlushPrefixCache() = 0;
};
}  // namespace stretto::engine
