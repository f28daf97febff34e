#include "services/generator/speculation_metrics.h"

#include "absl/strings/str_cat.h"

namespace stretto::services {
void SpeculationMetrics::Publish(const engine::SpeculationStats& stats) {
  if (stats.num_drafted == 0) return;
  if (!handles_.has_value()) {
    handles_ = Handles{
        .drafted = metrics_->counter("stretto_generator_drafted_tokens_total",
                                     "Tokens drafted by speculation."),
        .seconds = metrics_->counter("stretto_generator_draft_seconds_total",
                                     "Time spent on drafting, without verification."),
        .alarm = metrics_->gauge("stretto_generator_speculation_fruitless",
                                 "1: of the latest drafts not a single token was accepted.")};
  }
  handles_->drafted.Add(static_cast<double>(stats.num_drafted - last_.num_drafted));
  handles_->seconds.Add(stats.draft_seconds - last_.draft_seconds);
  handles_->alarm.Set(stats.num_fruitless >= kFruitlessAlarm ? 1 : 0);
  for (size_t i = 0; i < stats.verified_at.size() && stats.verified_at[i] > 0; ++i) {
    const Labels index = {{"index", absl::StrCat(i)}};
    metrics_
        ->counter("stretto_generator_draft_verified_total",
                  "Drafted tokens whose predecessors were accepted, by index in the draft.", index)
        .Add(static_cast<double>(stats.verified_at[i] - last_.verified_at[i]));
    metrics_
        ->counter("stretto_generator_draft_accepted_total",
                  "Drafted tokens that were accepted, by index in the draft.", index)
        .Add(static_cast<double>(stats.accepted_at[i] - last_.accepted_at[i]));
  }
  last_ = stats;
}
}  // namespace stretto::services
