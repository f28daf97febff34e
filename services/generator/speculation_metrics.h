// A generator's speculation at /metrics: tokens drafted and accepted, by their index in the draft,
// and the alarm that no draft is accepted any more (the draft model has nothing left in common with
// the policy, or has another tokenizer). Silent until something has been drafted.
#pragma once

#include <optional>

#include "engine/inference/speculation_options.h"
#include "services/common/metrics.h"

namespace stretto::services {
class SpeculationMetrics {
 public:
  // So many drafts in a row without an accepted token raise the alarm.
  static constexpr int64_t kFruitlessAlarm = 32;

  // `metrics` outlives this.
  explicit SpeculationMetrics(Metrics* metrics) : metrics_(metrics) {}
  // What has been counted since the last call. From one thread.
  void Publish(const engine::SpeculationStats& stats);

 private:
  struct Handles {
    Counter drafted, seconds;
    Gauge alarm;
  };
  Metrics* metrics_;
  std::optional<Handles> handles_;
  engine::SpeculationStats last_;
};
}  // namespace stretto::services
