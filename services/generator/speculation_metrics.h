// A generator's speculation at /metrics and in its log: tokens drafted and accepted, by their index
// in the draft, whether drafts are made at all (speculation_log.h), and the alarm that none is
// accepted any more (the draft model has nothing left in common with the policy). All series are
// there from the start, at 0 until something is drafted; those of later indices come with them.
#pragma once

#include "engine/inference/speculation_options.h"
#include "services/common/metrics.h"
#include "services/generator/speculation_log.h"

namespace stretto::services {
class SpeculationMetrics {
 public:
  // `metrics` outlives this.
  explicit SpeculationMetrics(Metrics* metrics);
  // What has been counted since the last call. From one thread.
  void Publish(const engine::SpeculationStats& stats, int64_t now_ns);

 private:
  Counter VerifiedAt(size_t index);
  Counter AcceptedAt(size_t index);

  Metrics* metrics_;
  Counter drafted_, seconds_;
  Gauge cost_, drafting_, alarm_;
  SpeculationLog log_;
  engine::SpeculationStats last_;
};
}  // namespace stretto::services
