#include "engine/inference/speculation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/inference/model_drafter.h"
#include "engine/inference/ngram_drafter.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
namespace {
// No drafter is right so often that a token is worth more.
constexpr double kNeverWorth = 0.97;

// Weights that products read for a token.
int64_t NumProductWeights(const ModelConfig& c) {
  const int64_t heads = c.head_dim * c.hidden_size * 2 * (c.num_heads + c.num_kv_heads);
  return c.num_layers * (heads + 3 * c.hidden_size * c.intermediate_size) +
         c.vocab_size * c.hidden_size;
}
}  // namespace

absl::Status ValidateSpeculation(const Transformer& model, const SpeculationOptions& options) {
  if (options.kind == SpeculationKind::kOff) return absl::OkStatus();
  if (options.max_draft < 1 || options.max_draft > kMaxDraft || options.max_drafted_rows < 1 ||
      options.min_match < 1 || options.min_match > kMaxMinMatch || !(options.row_cost > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("speculation with max_draft ", options.max_draft, ", max_drafted_rows ",
                     options.max_drafted_rows, ", min_match ", options.min_match, " and row_cost ",
                     options.row_cost, ": expected 1 to ", kMaxDraft, ", at least 1, 1 to ",
                     kMaxMinMatch, " and a positive number"));
  }
  if (options.kind == SpeculationKind::kNgram) return absl::OkStatus();
  if (options.draft_model == nullptr || options.draft_weights == nullptr) {
    return absl::InvalidArgumentError("speculation by a draft model without model or weights");
  }
  const int64_t vocab_size = options.draft_model->config().vocab_size;
  if (vocab_size != model.config().vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the draft model has a vocabulary of ", vocab_size, " tokens, the policy one of ",
        model.config().vocab_size, ": they must have the same tokenizer"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Speculator>> Speculator::Create(const Transformer& model,
                                                               const EngineOptions& options,
                                                               int64_t num_kv_blocks) {
  const SpeculationOptions& speculation = options.speculation;
  std::unique_ptr<Drafter> drafter;
  if (speculation.kind == SpeculationKind::kNgram) {
    drafter = std::make_unique<NgramDrafter>(speculation.min_match);
  } else {
    ModelDrafterOptions draft;
    draft.num_blocks = static_cast<int32_t>(
        speculation.draft_kv_blocks > 0 ? speculation.draft_kv_blocks : num_kv_blocks);
    draft.max_sequences = options.max_running;
    draft.max_rows = options.max_tokens_per_step;
    draft.eos_ids = options.eos_ids;
    draft.cost = speculation.draft_cost > 0
                     ? static_cast<double>(speculation.draft_cost)
                     : static_cast<double>(NumProductWeights(speculation.draft_model->config())) /
                           static_cast<double>(NumProductWeights(model.config()));
    ASSIGN_OR_RETURN(
        drafter, ModelDrafter::Create(*speculation.draft_model, speculation.draft_weights, draft));
  }
  return std::make_unique<Speculator>(speculation, std::move(drafter));
}

void Acceptance::Count(bool accepted) {
  share_ += rate_ * ((accepted ? 1.0f : 0.0f) - share_);
  if (accepted) interval_ = kFirstInterval;
}

int32_t Acceptance::Length(double least, int32_t max) {
  int32_t length = 0;
  for (double p = share_; length < max && p >= least; p *= share_) ++length;
  if (length > 0 || ++num_passed_over_ < interval_) return length;
  num_passed_over_ = 0;
  interval_ = std::min(2 * interval_, kLastInterval);
  return std::min(1, max);
}

// What a drafted token's chance to be accepted must be at least, in a step of so many rows of which
// `num_sequences` draw.
double Speculator::LeastProbability(int64_t num_sequences, int64_t num_rows) const {
  const auto sequences = static_cast<double>(num_sequences);
  const double fixed = 1 / static_cast<double>(options_.row_cost);
  return (sequences + drafter_->cost() * (fixed + sequences)) /
         (fixed + static_cast<double>(num_rows));
}

Speculator::State& Speculator::StateOf(uint64_t id) {
  const auto [it, is_new] = states_.try_emplace(id);
  if (is_new) {
    for (int32_t c = 0; c < kNumConfidences; ++c) {
      it->second.accepted[c] = Acceptance(std::max(accepted_[c].share(), kLeastHope));
    }
  }
  return it->second;
}

// Who wants a draft, and how long it may be. A draft that costs something is cut to what it is
// worth before it is made.
void Speculator::Collect(const Scheduler& scheduler, double least) {
  planned_.clear();
  requests_.clear();
  const StepPlan& plan = scheduler.plan();
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    int32_t length = std::min(scheduler.DraftRoom(i), options_.max_draft);
    if (length <= 0) continue;
    const auto& completion = static_cast<const Completion&>(*plan.rows[i].sequence);
    if (drafter_->cost() > 0) {
      length = StateOf(completion.id()).accepted[0].Length(least, length);
      if (length == 0) continue;
    }
    planned_.push_back(i);
    requests_.push_back({completion.id(), completion.tokens, completion.num_prompt(),
                         &completion.request().sampling, &completion.request().draw, length,
                         completion.constraint_state()});
  }
}

// Whether a sequence could have a draft, if it were worth its cost.
bool Speculator::HasRoom(const Scheduler& scheduler) {
  for (size_t i = 0; i < scheduler.plan().rows.size(); ++i) {
    if (scheduler.DraftRoom(i) > 0) return true;
  }
  return false;
}

void Speculator::Extend(Scheduler& scheduler) {
  const StepPlan& plan = scheduler.plan();
  const int64_t num_sequences =
      std::count_if(plan.rows.begin(), plan.rows.end(), [](const auto& r) { return r.samples; });
  const double least = LeastProbability(num_sequences, plan.num_rows);
  if (HasRoom(scheduler)) {
    ++stats_.num_steps;
    stats_.needed_sum += least;
  }
  if (least > kNeverWorth) return;
  const int64_t num_drafted = stats_.num_drafted;
  const double start = Clock::Real().NowSeconds();
  Collect(scheduler, least);
  drafts_.assign(requests_.size(), {});
  if (!requests_.empty()) drafter_->Propose(requests_, absl::MakeSpan(drafts_));
  int32_t left = options_.max_drafted_rows;
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Draft& draft = drafts_[i];
    // What the sampler can't draw, or what ends the completion, needs no row behind it.
    const auto& completion =
        static_cast<const Completion&>(*scheduler.plan().rows[planned_[i]].sequence);
    int32_t length = completion.NumPossible(draft.tokens);
    if (length == 0) continue;
    State& state = StateOf(requests_[i].id);
    state.confidence = draft.confidence;
    if (drafter_->cost() == 0) length = state.accepted[draft.confidence].Length(least, length);
    length = std::min(length, left);
    const int32_t added =
        scheduler.AddDraft(planned_[i], absl::MakeConstSpan(draft.tokens).first(length));
    left -= added;
    stats_.num_drafted += added;
  }
  if (stats_.num_drafted > num_drafted) ++stats_.num_drafted_steps;
  stats_.draft_seconds += Clock::Real().NowSeconds() - start;
}

void Speculator::Verified(const Completion& completion, int32_t index, bool accepted) {
  State& state = StateOf(completion.id());
  state.accepted[state.confidence].Count(accepted);
  accepted_[state.confidence].Count(accepted);
  ++stats_.num_verified;
  ++stats_.verified_at[index];
  if (accepted) {
    ++stats_.num_accepted;
    ++stats_.accepted_at[index];
    stats_.num_fruitless = 0;
  } else if (index == 0) {
    ++stats_.num_fruitless;
  }
}

void Speculator::Forget(const Completion& completion) {
  states_.erase(completion.id());
  drafter_->Forget(completion.id());
}
}  // namespace stretto::engine
