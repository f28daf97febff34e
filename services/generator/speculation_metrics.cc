#include "services/generator/speculation_metrics.h"

#include "absl/strings/str_cat.h"
#include "services/common/log.h"

namespace stretto::services {
SpeculationMetrics::SpeculationMetrics(Metrics* metrics)
    : metrics_(metrics),
      drafted_(metrics->counter("stretto_generator_drafted_tokens_total",
                                "Tokens drafted by speculation.")),
      seconds_(metrics->counter("stretto_generator_draft_seconds_total",
                                "Time spent on drafting, without verification.")),
      cost_(metrics->gauge("stretto_generator_draft_cost_ratio",
                           "What a drafted token costs, relative to one of the policy.")),
      drafting_(metrics->gauge("stretto_generator_speculation_drafting",
                               "1: drafts are made; 0: they aren't worth their cost now.")),
      alarm_(metrics->gauge("stretto_generator_speculation_fruitless",
                            "1: of the latest drafts not a single token was accepted.")) {
  (void)VerifiedAt(0);
  (void)AcceptedAt(0);
}

Counter SpeculationMetrics::VerifiedAt(size_t index) {
  return metrics_->counter(
      "stretto_generator_draft_verified_total",
      "Drafted tokens whose predecessors were accepted, by index in the draft.",
      {{"index", absl::StrCat(index)}});
}
Counter SpeculationMetrics::AcceptedAt(size_t index) {
  return metrics_->counter("stretto_generator_draft_accepted_total",
                           "Drafted tokens that were accepted, by index in the draft.",
                           {{"index", absl::StrCat(index)}});
}

void SpeculationMetrics::Publish(const engine::SpeculationStats& stats, int64_t now_ns) {
  for (const SpeculationLog::Line& line : log_.Observe(stats, now_ns)) {
    Log(line.is_warning ? LogLevel::kWarning : LogLevel::kInfo, line.text);
  }
  if (stats.kind == engine::SpeculationKind::kOff) return;
  cost_.Set(stats.draft_cost);
  drafting_.Set(log_.drafting() ? 1 : 0);
  alarm_.Set(log_.fruitless() ? 1 : 0);
  drafted_.Add(static_cast<double>(stats.num_drafted - last_.num_drafted));
  seconds_.Add(stats.draft_seconds - last_.draft_seconds);
  for (size_t i = 0; i < stats.verified_at.size() && stats.verified_at[i] > 0; ++i) {
    VerifiedAt(i).Add(static_cast<double>(stats.verified_at[i] - last_.verified_at[i]));
    AcceptedAt(i).Add(static_cast<double>(stats.accepted_at[i] - last_.accepted_at[i]));
  }
  last_ = stats;
}
}  // namespace stretto::services
