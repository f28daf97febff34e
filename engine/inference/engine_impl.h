// The engine: requests and weights (engine.cc), and what a step does (engine_step.cc).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "engine/inference/batch_builder.h"
#include "engine/inference/completion.h"
#include "engine/inference/engine.h"
#include "engine/inference/sampler.h"
#include "engine/inference/scheduler.h"
#include "engine/inference/speculation.h"
#include "engine/inference/validation.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
// Weights that some sequence computes with.
struct LiveWeights {
  int32_t epoch = 0;
  ServedWeights served;
};

// A token that a step drew: from the logits of the completion's last token (index 0) or of its
// draft, in this order. It is valid if the drafted tokens up to its row were drawn.
struct Draw {
  Completion* completion = nullptr;
  int64_t version = 0;
  int32_t index = 0, num_drafted = 0;
  std::vector<TokenLogprob> top_logprobs = {};  // where asked for
};

// Adds the time since the last lap to a sum.
class Stopwatch {
 public:
  void Lap(double& seconds) {
    const double now = Clock::Real().NowSeconds();
    seconds += now - last_;
    last_ = now;
  }

 private:
  double last_ = Clock::Real().NowSeconds();
};

class EngineImpl final : public InferenceEngine {
 public:
  EngineImpl(const Transformer& model, ServedWeights weights, EngineOptions options,
             const SchedulerOptions& scheduler_options)
      : model_(model),
        options_(std::move(options)),
        scheduler_(scheduler_options, RootKey(weights.hash, weights.version)) {
    limits_.vocab_size = model.config().vocab_size;
    // The last token's keys and values are never needed.
    const int64_t cached = int64_t{scheduler_options.num_blocks} * kBlockTokens + 1;
    limits_.cache_is_short = cached < model.options().max_sequence_length;
    limits_.max_context = std::min(cached, model.options().max_sequence_length);
    limits_.has_text = static_cast<bool>(options_.text_decoder);
    live_.push_back({0, std::move(weights)});
  }

  absl::Status Allocate(int64_t num_blocks);

  absl::Status Submit(Request request) override;
  absl::Status CheckRoom(int64_t num_requests, int64_t num_tokens) const override {
    return scheduler_.CheckRoom(num_requests, num_tokens);
  }
  absl::Status Check(const Request& request) const override {
    return ValidateRequest(request, limits_);
  }
  absl::Status SubmitGroup(std::vector<Request> samples) override;
  absl::Span<const Event> Step() override;
  absl::Status Cancel(uint64_t request_id) override;
  bool IsQueued(uint64_t request_id) const override {
    const auto it = completions_.find(request_id);
    return it != completions_.end() && it->second->num_cached < 0;  // never admitted
  }
  void Pause() override { paused_ = true; }
  void Resume() override { paused_ = false; }
  void Drain() override { draining_ = true; }
  void Undrain() override { draining_ = false; }
  bool HasWork() const override { return scheduler_.has_work() || !pending_events_.empty(); }
  absl::Status SwapWeights(ServedWeights weights, SwapPolicy policy) override;
  int64_t max_context() const override { return limits_.max_context; }
  int64_t version() const override { return live_.back().served.version; }
  const std::string& weights_hash() const override { return live_.back().served.hash; }
  EngineStats stats() const override;
  void FlushPrefixCache() override { scheduler_.FlushPrefixCache(); }

 private:
  absl::StatusOr<std::unique_ptr<Completion>> MakeCompletion(Request request);
  absl::Status Enqueue(std::vector<std::unique_ptr<Completion>> completions);
  void RunPlan(const StepPlan& plan, const LiveWeights& live, Stopwatch& watch);
  void SampleRows(const Tensor& logits_BV);
  void FindPromptLogprobs(const StepPlan& plan, const LiveWeights& live);
  void FindTopLogprobs(const Tensor& logits_BV, size_t first);
  void CopyBlocks(const StepPlan& plan);
  void CountPlan(const StepPlan& plan);
  absl::Span<const int32_t> WithDraft(const PlannedRows& rows, size_t i);
  void AddDraws(Completion& completion, absl::Span<const int32_t> tokens, int32_t num_drafted,
                int32_t last_row, int64_t version);
  void Deliver();
  void End(Completion& completion, FinishReason reason, absl::Status status,
           std::vector<Event>& events);
  absl::flat_hash_set<int32_t> EpochsInUse(bool after_swap) const;
  void DropUnusedWeights();

  const Transformer& model_;
  EngineOptions options_;
  RequestLimits limits_;
  std::vector<LiveWeights> live_;  // by epoch; the last one serves new requests
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Sampler> sampler_;
  Scheduler scheduler_;
  std::unique_ptr<Speculator> speculator_;  // if wanted
  absl::flat_hash_map<uint64_t, std::unique_ptr<Completion>> completions_;
  bool paused_ = false, draining_ = false;
  EngineStats stats_;

  // Of the current step; reused.
  BatchBuilder batch_;
  std::vector<int32_t> last_row_;                 // by entry of the plan
  std::vector<std::vector<int32_t>> with_draft_;  // the same
  std::vector<SampleRequest> sample_requests_;
  std::vector<Draw> draws_;
  std::vector<Sampled> sampled_;
  std::vector<Event> events_, pending_events_;
};
}  // namespace stretto::engine
