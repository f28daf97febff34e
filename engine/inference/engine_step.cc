#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "engine/constrain/constraint.h"
#include "engine/inference/engine_impl.h"

namespace stretto::engine {
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
          entry.rank = sampler_->RankInLast(completion->tokens[begin + 1 + r]);
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
      state = constraint->Next(
          state, tokens[static_cast<size_t>(completion.size()) + static_cast<size_t>(k) - 1]);
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
}  // namespace stretto::engine
