#include "engine/inference/model_drafter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/philox.h"
#include "base/status.h"
#include "engine/constrain/constraint.h"

namespace stretto::engine {
namespace {
int32_t BlocksFor(int32_t num_tokens) { return (num_tokens + kBlockTokens - 1) / kBlockTokens; }

// What the next token of `text` is drawn from: as the policy will do it.
SampleRequest Sampling(const DraftRequest& request, absl::Span<const int32_t> text,
                       int64_t constraint_state) {
  const auto position = static_cast<int32_t>(text.size()) - request.num_prompt;
  const DrawIdentity& d = *request.draw;
  const float uniform =
      UniformFloat({d.run_seed, d.prompt_id, d.sample_index, static_cast<uint32_t>(position), 0});
  return {request.params,  uniform, text, request.num_prompt, position < request.params->min_tokens,
          constraint_state};
}

// Whether something may follow `token`; then `state` is the one behind it.
bool GoesOn(const Constraint* constraint, int32_t token, int64_t& state) {
  if (constraint == nullptr) return true;
  state = constraint->Next(state, token);
  return state != Constraint::kDead && !constraint->MustEnd(state);
}
}  // namespace

absl::StatusOr<std::unique_ptr<ModelDrafter>> ModelDrafter::Create(
    const Transformer& model, std::shared_ptr<const ModelWeights> weights,
    const ModelDrafterOptions& options) {
  STRETTO_CHECK(options.cost > 0 && options.max_rows >= options.max_sequences);
  std::unique_ptr<ModelDrafter> drafter(new ModelDrafter(model, std::move(weights), options));
  RETURN_IF_ERROR(drafter->Allocate());
  return drafter;
}

absl::Status ModelDrafter::Allocate() {
  Device& device = model_.device();
  stream_ = device.CreateStream();
  ASSIGN_OR_RETURN(cache_, device.AllocateKvCache(model_.CacheShape(options_.num_blocks)));
  WorkspaceLimits limits;
  limits.max_rows = options_.max_rows;
  limits.max_logits_rows = limits.max_sequences = options_.max_sequences;
  limits.k_leaves = model_.options().k_leaves;
  limits.max_blocks_per_sequence =
      std::min<int64_t>((model_.options().max_sequence_length + kBlockTokens - 1) / kBlockTokens,
                        options_.num_blocks);
  ASSIGN_OR_RETURN(workspace_,
                   Workspace::Create(device, model_.config(), model_.options().dtype, limits));
  ASSIGN_OR_RETURN(sampler_, Sampler::Create(device, model_.config().vocab_size, /*max_rows=*/1,
                                             options_.eos_ids));
  return absl::OkStatus();
}

void ModelDrafter::Propose(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts) {
  ++call_;
  active_.clear();
  batch_.Clear();
  CatchUp(requests);
  while (batch_.num_rows() > 0) {
    const Tensor logits =
        model_.ForwardPaged(*stream_, *weights_, batch_.Build(), *cache_, *workspace_);
    batch_.Clear();
    if (logits.rows == 0 || active_.empty()) break;
    sample_requests_.clear();
    for (const Active& a : active_) {
      sample_requests_.push_back(Sampling(requests[a.request], a.text, a.constraint_state));
    }
    sampled_.resize(active_.size());
    sampler_->Sample(*stream_, logits, sample_requests_, absl::MakeSpan(sampled_));
    DrawNext(requests, drafts);
  }
}

// Rows for the tokens whose keys and values are missing, as many as a pass takes. Requests that
// miss none after it become active.
void ModelDrafter::CatchUp(absl::Span<const DraftRequest> requests) {
  int32_t rows_left = options_.max_rows;
  for (size_t i = 0; i < requests.size() && rows_left > 0; ++i) {
    const absl::Span<const int32_t> tokens = requests[i].tokens;
    const auto size = static_cast<int32_t>(tokens.size());
    std::unique_ptr<State>& state = states_[requests[i].id];
    if (state == nullptr) state = std::make_unique<State>();
    state->last_call = call_;
    // What was accepted of the last draft is true now.
    const int32_t certain = state->num_computed - static_cast<int32_t>(state->guessed.size());
    state->num_computed = certain;
    for (const int32_t token : state->guessed) {
      if (state->num_computed == size || tokens[state->num_computed] != token) break;
      ++state->num_computed;
    }
    state->guessed.clear();
    // The last token's logits are wanted.
    state->num_computed = std::min(state->num_computed, size - 1);
    const int32_t end = size + requests[i].max_tokens - 1;
    if (end > model_.options().max_sequence_length || !Reserve(*state, end)) continue;
    const int32_t count = std::min(size - state->num_computed, rows_left);
    const int32_t row = batch_.AddRows(tokens, state->num_computed, count, state->blocks);
    rows_left -= count;
    state->num_computed += count;
    if (state->num_computed < size) continue;
    batch_.AddLogits(row);
    active_.push_back(
        {i, state.get(), {tokens.begin(), tokens.end()}, requests[i].constraint_state});
  }
}

// Takes the tokens that were drawn, and makes rows for those that another one shall follow.
void ModelDrafter::DrawNext(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts) {
  size_t kept = 0;
  for (size_t a = 0; a < active_.size(); ++a) {
    Active& active = active_[a];
    Draft& draft = drafts[active.request];
    if (!std::isfinite(sampled_[a].logprob)) continue;  // of no use
    const int32_t token = sampled_[a].token;
    draft.tokens.push_back(token);
    active.text.push_back(token);
    const DraftRequest& request = requests[active.request];
    if (!GoesOn(request.params->constraint.get(), token, active.constraint_state)) continue;
    if (static_cast<int32_t>(draft.tokens.size()) == request.max_tokens) continue;
    active.state->guessed.push_back(token);
    ++active.state->num_computed;
    if (kept != a) active_[kept] = std::move(active);
    ++kept;
  }
  active_.resize(kept);
  for (const Active& active : active_) {
    const auto last = static_cast<int32_t>(active.text.size()) - 1;
    batch_.AddLogits(batch_.AddRows(active.text, last, 1, active.state->blocks));
  }
}

bool ModelDrafter::Reserve(State& state, int32_t num_tokens) {
  while (static_cast<int32_t>(state.blocks.size()) < BlocksFor(num_tokens)) {
    const int32_t block = pool_.Allocate();
    if (block != BlockPool::kNone) {
      state.blocks.push_back(block);
    } else if (!EvictOldest()) {
      return false;
    }
  }
  return true;
}

// Of those that this call has not come to.
bool ModelDrafter::EvictOldest() {
  State* oldest = nullptr;
  for (const auto& [id, state] : states_) {
    if (state->last_call == call_ || state->blocks.empty()) continue;
    if (oldest == nullptr || state->last_call < oldest->last_call) oldest = state.get();
  }
  if (oldest == nullptr) return false;
  Release(*oldest);
  return true;
}

void ModelDrafter::Release(State& state) {
  for (const int32_t block : state.blocks) pool_.Unref(block, false);
  state.blocks.clear();
  state.guessed.clear();
  state.num_computed = 0;
}

void ModelDrafter::Forget(uint64_t id) {
  const auto it = states_.find(id);
  if (it == states_.end()) return;
  Release(*it->second);
  states_.erase(it);
}
}  // namespace stretto::engine
