#include "engine/inference/engine.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/constrain/constraint.h"
#include "engine/inference/batch_builder.h"
#include "engine/inference/completion.h"
#include "engine/inference/sampler.h"
#include "engine/inference/scheduler.h"
#include "engine/inference/speculation.h"
#include "engine/inference/validation.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
namespace {
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

absl::Status EngineImpl::Allocate(int64_t num_blocks) {
  Device& device = model_.device();
  stream_ = device.CreateStream();
  ASSIGN_OR_RETURN(cache_, device.AllocateKvCache(model_.CacheShape(num_blocks)));
  WorkspaceLimits limits;
  limits.max_rows = options_.max_tokens_per_step;
  limits.max_logits_rows = limits.max_sequences = options_.max_running;
  if (options_.speculation.kind != SpeculationKind::kOff) {
    limits.max_logits_rows += options_.speculation.max_drafted_rows;
    ASSIGN_OR_RETURN(speculator_, Speculator::Create(model_, options_, num_blocks));
  }
  limits.k_leaves = model_.options().k_leaves;
  limits.max_blocks_per_sequence =
      std::min((limits_.max_context + kBlockTokens - 1) / kBlockTokens, num_blocks);
  ASSIGN_OR_RETURN(workspace_,
                   Workspace::Create(device, model_.config(), model_.options().dtype, limits));
  ASSIGN_OR_RETURN(sampler_, Sampler::Create(device, limits_.vocab_size, options_.max_running,
                                             options_.eos_ids, limits.k_leaves));
  return absl::OkStatus();
}

// --- requests
// -------------------------------------------------------------------------------------

absl::Status EngineImpl::Submit(Request request) {
  if (draining_) return absl::UnavailableError("the engine is draining: ask another generator");
  ASSIGN_OR_RETURN(std::unique_ptr<Completion> completion, MakeCompletion(std::move(request)));
  if (const auto reason = completion->EndsAtStart()) {
    completion->Finish(*reason, absl::OkStatus(), pending_events_);
    ++stats_.num_finished;
    return absl::OkStatus();
  }
  std::vector<std::unique_ptr<Completion>> one;
  one.push_back(std::move(completion));
  return Enqueue(std::move(one));
}

absl::Status EngineImpl::SubmitGroup(std::vector<Request> samples) {
  if (draining_) return absl::UnavailableError("the engine is draining: ask another generator");
  if (samples.empty()) return absl::InvalidArgumentError("the group is empty");
  absl::flat_hash_set<uint64_t> ids;
  std::vector<std::unique_ptr<Completion>> group;
  for (Request& sample : samples) {
    if (!sample.forced_prefix.empty()) {
      return absl::InvalidArgumentError("a member of a group has a forced prefix: submit it alone");
    }
    if (!ids.insert(sample.id).second) {
      return absl::AlreadyExistsError(absl::StrCat("two members of the group have id ", sample.id));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<Completion> completion, MakeCompletion(std::move(sample)));
    if (!group.empty() &&
        (completion->tokens != group[0]->tokens || completion->priority != group[0]->priority)) {
      return absl::InvalidArgumentError("the members of a group differ in prompt or priority");
    }
    group.push_back(std::move(completion));
  }
  return Enqueue(std::move(group));
}

absl::StatusOr<std::unique_ptr<Completion>> EngineImpl::MakeCompletion(Request request) {
  RETURN_IF_ERROR(ValidateRequest(request, limits_));
  if (completions_.contains(request.id)) {
    return absl::AlreadyExistsError(absl::StrCat("request ", request.id, " is here already"));
  }
  // What prompt and completion may reach together.
  const auto num_prompt = static_cast<int64_t>(request.prompt_ids.size());
  const int32_t max_tokens = request.sampling.max_tokens;
  const auto max_size =
      static_cast<int32_t>(max_tokens > 0 ? num_prompt + max_tokens : limits_.max_context);
  auto completion = std::make_unique<Completion>(std::move(request), max_size, options_.eos_ids,
                                                 options_.text_decoder);
  if (completion->constraint_state() == Constraint::kDead && !completion->EndsAtStart()) {
    return absl::InvalidArgumentError("the forced prefix breaks the constraint");
  }
  return completion;
}

absl::Status EngineImpl::Enqueue(std::vector<std::unique_ptr<Completion>> completions) {
  std::vector<Sequence*> sequences;
  for (const auto& c : completions) sequences.push_back(c.get());
  RETURN_IF_ERROR(scheduler_.Submit(sequences));
  for (auto& c : completions) {
    const uint64_t id = c->id();
    completions_.emplace(id, std::move(c));
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::Cancel(uint64_t request_id) {
  const auto it = completions_.find(request_id);
  if (it == completions_.end()) {
    return absl::NotFoundError(absl::StrCat("no unfinished request has id ", request_id));
  }
  End(*it->second, FinishReason::kAborted, absl::OkStatus(), pending_events_);
  return absl::OkStatus();
}

// Reports the end and forgets the completion.
void EngineImpl::End(Completion& completion, FinishReason reason, absl::Status status,
                     std::vector<Event>& events) {
  completion.Finish(reason, std::move(status), events);
  ++(reason == FinishReason::kAborted ? stats_.num_aborted : stats_.num_finished);
  scheduler_.Remove(&completion);
  if (speculator_ != nullptr) speculator_->Forget(completion);
  completions_.erase(completion.id());
}

// --- a step
// ---------------------------------------------------------------------------------------

absl::Span<const Event> EngineImpl::Step() {
  events_.clear();
  events_.swap(pending_events_);
  if (paused_ || !scheduler_.has_work()) return events_;
  Stopwatch watch;
  const StepPlan& plan = scheduler_.Plan();
  if (speculator_ != nullptr) speculator_->Extend(scheduler_);
  CountPlan(plan);
  watch.Lap(stats_.schedule_seconds);
  CopyBlocks(plan);
  draws_.clear();
  sampled_.clear();
  for (const LiveWeights& live : live_) RunPlan(plan, live, watch);
  scheduler_.Commit();
  watch.Lap(stats_.schedule_seconds);
  Deliver();
  if (live_.size() > 1) DropUnusedWeights();
  watch.Lap(stats_.other_seconds);
  return events_;
}

// One by one: a block that was copied from may be a later copy's target.
void EngineImpl::CopyBlocks(const StepPlan& plan) {
  for (size_t i = 0; i < plan.copy_from.size(); ++i) {
    model_.device().CopyKvBlocks(*stream_, *cache_, {&plan.copy_from[i], 1}, {&plan.copy_to[i], 1});
  }
}

// Computes the rows of the sequences that use these weights, and draws their next tokens.
void EngineImpl::RunPlan(const StepPlan& plan, const LiveWeights& live, Stopwatch& watch) {
  batch_.Clear();
  sample_requests_.clear();
  last_row_.resize(plan.rows.size());
  if (with_draft_.size() < plan.rows.size()) with_draft_.resize(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlannedRows& rows = plan.rows[i];
    auto* completion = static_cast<Completion*>(rows.sequence);
    if (completion->epoch != live.epoch) continue;
    const absl::Span<const int32_t> tokens = WithDraft(rows, i);
    last_row_[i] = rows.fork_of >= 0 ? last_row_[rows.fork_of]
                                     : batch_.AddRows(tokens, rows.begin, rows.count + rows.drafted,
                                                      completion->blocks);
    if (completion->NeedsPromptLogprobs()) batch_.FinishAllRows();
    if (!rows.samples) continue;
    AddDraws(*completion, tokens, rows.drafted, last_row_[i], live.served.version);
  }
  if (batch_.num_rows() == 0) return;
  watch.Lap(stats_.other_seconds);
  const Tensor logits =
      model_.ForwardPaged(*stream_, *live.served.weights, batch_.Build(), *cache_, *workspace_);
  watch.Lap(stats_.forward_seconds);
  SampleRows(logits);
  FindPromptLogprobs(plan, live);
  watch.Lap(stats_.sample_seconds);
}

void EngineImpl::SampleRows(const Tensor& logits) {
  if (sample_requests_.empty()) return;
  const size_t first = sampled_.size();
  sampled_.resize(first + sample_requests_.size());
  sampler_->Sample(*stream_, logits, sample_requests_, absl::MakeSpan(sampled_).subspan(first));
  FindTopLogprobs(logits, first);
}

// A prompt's log-probs, from the logits of its rows of this pass, as many at a time as there is
// room for.
void EngineImpl::FindPromptLogprobs(const StepPlan& plan, const LiveWeights& live) {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlannedRows& planned = plan.rows[i];
    auto* completion = static_cast<Completion*>(planned.sequence);
    if (completion->epoch != live.epoch || !completion->NeedsPromptLogprobs()) continue;
    const float temperature = completion->request().sampling.temperature;
    const int32_t num_top = completion->request().sampling.top_logprobs;
    // The prompt's last token is no row's target but predicts the completion's first.
    const int32_t end = std::min(planned.begin + planned.count, completion->num_prompt() - 1);
    const int32_t first_row = last_row_[i] - planned.count - planned.drafted + 1;
    std::vector<PromptLogprob> found;
    for (int32_t begin = planned.begin; begin < end; begin += options_.max_running) {
      const int32_t count = std::min(end - begin, options_.max_running);
      std::vector<int32_t> rows(static_cast<size_t>(count));
      std::iota(rows.begin(), rows.end(), first_row + begin - planned.begin);
      const Tensor logits_RV =
          model_.LogitsOfRows(*stream_, *live.served.weights, rows, *workspace_);
      std::vector<float> logprobs(rows.size());
      sampler_->LogProbs(*stream_, logits_RV,
                         absl::MakeConstSpan(completion->tokens).subspan(begin + 1, count),
                         temperature, absl::MakeSpan(logprobs));
      for (int32_t r = 0; r < count; ++r) {
        PromptLogprob& entry = found.emplace_back();
        entry.logprob = logprobs[r];
        if (num_top > 0 && std::isfinite(entry.logprob)) {
          entry.top = sampler_->TopLogprobs(*stream_, logits_RV.Rows(r, 1), temperature, num_top);
        }
      }
    }
    completion->AddPromptLogprobs(planned.begin, std::move(found), events_);
  }
}

// Draw `first` + r belongs to row r.
void EngineImpl::FindTopLogprobs(const Tensor& logits_BV, size_t first) {
  for (size_t i = first; i < draws_.size(); ++i) {
    const SamplingParams& p = draws_[i].completion->request().sampling;
    if (p.top_logprobs == 0 || !std::isfinite(sampled_[i].logprob)) continue;
    draws_[i].top_logprobs =
        sampler_->TopLogprobs(*stream_, logits_BV.Rows(static_cast<int64_t>(i - first), 1),
                              p.temperature, p.top_logprobs);
  }
}

// The tokens of the sequence in plan entry `i` and its draft; valid until the next step.
absl::Span<const int32_t> EngineImpl::WithDraft(const PlannedRows& rows, size_t i) {
  const Sequence& s = *rows.sequence;
  if (rows.drafted == 0) return s.tokens;
  with_draft_[i].assign(s.tokens.begin(), s.tokens.end());
  with_draft_[i].insert(with_draft_[i].end(), s.draft.begin(), s.draft.end());
  return with_draft_[i];
}

// Asks for a token after the completion's last one and after each drafted one: every position is
// drawn as if the tokens before it were there for good.
void EngineImpl::AddDraws(Completion& completion, absl::Span<const int32_t> tokens,
                          int32_t num_drafted, int32_t last_row, int64_t version) {
  const Constraint* constraint = completion.request().sampling.constraint.get();
  int64_t state = completion.constraint_state();
  for (int32_t k = 0; k <= num_drafted; ++k) {
    if (k > 0 && constraint != nullptr) {
      state = constraint->Next(state, tokens[static_cast<size_t>(completion.size() + k - 1)]);
    }
    batch_.AddLogits(last_row - num_drafted + k);
    sample_requests_.push_back({&completion.request().sampling, completion.NextUniform(k),
                                tokens.first(static_cast<size_t>(completion.size() + k)),
                                completion.num_prompt(), completion.MasksStopIds(k), state});
    draws_.push_back({&completion, version, k, num_drafted, {}});
  }
}

void EngineImpl::Deliver() {
  bool next_is_valid = false;
  for (size_t i = 0; i < draws_.size(); ++i) {
    Draw& draw = draws_[i];
    if (draw.index > 0 && !next_is_valid) continue;  // behind a token that wasn't drawn, or the end
    next_is_valid = false;
    Completion& completion = *draw.completion;
    const Sampled& sampled = sampled_[i];
    if (!std::isfinite(sampled.logprob)) {
      End(completion, FinishReason::kError,
          absl::InternalError(absl::StrCat("the logits of version ", draw.version,
                                           " are not finite at token ", completion.num_tokens())),
          events_);
      continue;
    }
    const bool accepted = scheduler_.Append(&completion, sampled.token);
    if (draw.index < draw.num_drafted) speculator_->Verified(completion, draw.index, accepted);
    ++stats_.tokens_generated;
    if (const auto reason =
            completion.Accept(sampled, draw.version, std::move(draw.top_logprobs), events_)) {
      End(completion, *reason, absl::OkStatus(), events_);
    } else {
      next_is_valid = accepted;
    }
  }
}

void EngineImpl::CountPlan(const StepPlan& plan) {
  ++stats_.num_steps;
  stats_.num_preemptions += plan.num_preempted;
  for (const PlannedRows& rows : plan.rows) {
    const Sequence& s = *rows.sequence;
    if (!s.wrote_tokens() || rows.count > 1) stats_.prompt_tokens_computed += rows.count;
    if (rows.fork_of >= 0) {
      stats_.prompt_tokens_cached += s.size();
      stats_.prompt_tokens_asked += s.size();
    } else if (s.num_preemptions == 0 && rows.begin == s.num_cached) {
      stats_.prompt_tokens_cached += s.num_cached;
      stats_.prompt_tokens_asked += s.num_given;
    }
  }
}

// --- weights
// --------------------------------------------------------------------------------------

absl::Status EngineImpl::SwapWeights(ServedWeights weights, SwapPolicy policy) {
  if (weights.weights == nullptr) return absl::InvalidArgumentError("no weights to swap in");
  if (weights.weights->dtype() != model_.options().dtype) {
    return absl::InvalidArgumentError(absl::StrCat("weights of version ", weights.version, " are ",
                                                   Name(weights.weights->dtype()), ": expected ",
                                                   Name(model_.options().dtype)));
  }
  if (policy == SwapPolicy::kFinish) {
    const auto kept = static_cast<int32_t>(EpochsInUse(/*after_swap=*/true).size());
    if (kept + 1 > options_.max_live_versions) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "rollouts run on ", kept, " versions before ", weights.version, " and ",
          options_.max_live_versions, " may be alive: try again when they have ended"));
    }
  }
  const int32_t epoch = scheduler_.SetWeights(RootKey(weights.hash, weights.version), policy);
  live_.push_back({epoch, std::move(weights)});
  ++stats_.num_swaps;
  DropUnusedWeights();
  return absl::OkStatus();
}

// `after_swap`: of those that a swap with kFinish leaves on their version.
absl::flat_hash_set<int32_t> EngineImpl::EpochsInUse(bool after_swap) const {
  absl::flat_hash_set<int32_t> epochs;
  for (const auto& [id, completion] : completions_) {
    if (!after_swap || completion->wrote_tokens()) epochs.insert(completion->epoch);
  }
  return epochs;
}

void EngineImpl::DropUnusedWeights() {
  const absl::flat_hash_set<int32_t> used = EpochsInUse(/*after_swap=*/false);
  const int32_t newest = live_.back().epoch;
  live_.erase(std::remove_if(live_.begin(), live_.end(),
                             [&](const LiveWeights& live) {
                               return live.epoch != newest && !used.contains(live.epoch);
                             }),
              live_.end());
}

EngineStats EngineImpl::stats() const {
  EngineStats stats = stats_;
  stats.num_running = scheduler_.num_running();
  stats.num_queued = scheduler_.num_waiting();
  stats.blocks_total = scheduler_.pool().num_blocks();
  stats.blocks_used = scheduler_.pool().num_used();
  stats.blocks_cached = scheduler_.num_cached_blocks();
  if (speculator_ != nullptr) stats.speculation = speculator_->stats();
  return stats;
}

absl::Status ValidateOptions(const Transformer& model, const ServedWeights& weights,
                             const EngineOptions& options) {
  if (weights.weights == nullptr) return absl::InvalidArgumentError("no weights");
  if (options.max_running <= 0 || options.max_tokens_per_step < options.max_running) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_running is ", options.max_running, " and max_tokens_per_step ",
        options.max_tokens_per_step, ": expected 0 < max_running <= max_tokens_per_step"));
  }
  if (options.max_live_versions < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_live_versions is ", options.max_live_versions, ": expected 1 or more"));
  }
  RETURN_IF_ERROR(ValidateSpeculation(model, options.speculation));
  for (const int32_t id : options.eos_ids) {
    if (id >= 0 && id < model.config().vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("eos id ", id, " isn't in the vocabulary of ", model.config().vocab_size));
  }
  return absl::OkStatus();
}
}  // namespace

int64_t KvBlocks(const Transformer& model, int64_t num_kv_blocks, int64_t kv_cache_bytes) {
  if (num_kv_blocks > 0) return num_kv_blocks;
  return kv_cache_bytes / model.CacheShape(1).block_bytes();
}

absl::StatusOr<std::unique_ptr<InferenceEngine>> InferenceEngine::Create(const Transformer& model,
                                                                         ServedWeights weights,
                                                                         EngineOptions options) {
  RETURN_IF_ERROR(ValidateOptions(model, weights, options));
  const int64_t num_blocks = KvBlocks(model, options.num_kv_blocks, options.kv_cache_bytes);
  if (num_blocks < 1 || num_blocks > INT32_MAX / kBlockTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("the KV cache would have ", num_blocks, " blocks of ", kBlockTokens,
                     " tokens: expected 1 to ", INT32_MAX / kBlockTokens));
  }
  SchedulerOptions scheduler;
  scheduler.num_blocks = static_cast<int32_t>(num_blocks);
  scheduler.max_running = options.max_running;
  scheduler.max_tokens_per_step = options.max_tokens_per_step;
  scheduler.max_queued = options.max_queued;
  scheduler.max_queued_tokens = options.max_queued_tokens;
  scheduler.prefix_cache = options.prefix_cache;
  auto engine =
      std::make_unique<EngineImpl>(model, std::move(weights), std::move(options), scheduler);
  RETURN_IF_ERROR(engine->Allocate(num_blocks));
  return std::unique_ptr<InferenceEngine>(std::move(engine));
}
}  // namespace stretto::engine
