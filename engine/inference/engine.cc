#include "engine/inference/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/constrain/constraint.h"
#include "engine/inference/engine_impl.h"

namespace stretto::engine {
absl::Status EngineImpl::Allocate(int64_t num_blocks) {
  Device& device = model_.device();
  stream_ = device.CreateStream();
  auto cache = device.AllocateKvCache(model_.CacheShape(num_blocks));
  if (!cache.ok()) return Annotate(cache.status(), "the KV cache (--kv-cache-mb)");
  cache_ = *std::move(cache);
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
  sequences.reserve(completions.size());
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

namespace {
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
