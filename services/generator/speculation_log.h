// What a generator says about its speculation: how it drafts, when that begins and ends to be worth
// its cost, with the numbers that decide it, and that no draft is accepted any more. Pure: counts
// and time in, lines out. Single-threaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/inference/speculation_options.h"

namespace stretto::services {
class SpeculationLog {
 public:
  struct Line {
    bool is_warning = false;
    std::string text;
  };
  // Whether it drafts is decided anew after so many steps in which it could have: it does when it
  // has in a quarter of them (rare tries are none).
  static constexpr int64_t kWindowSteps = 64;
  // So many drafts in a row without an accepted token raise the alarm.
  static constexpr int64_t kFruitlessAlarm = 32;
  // Between two lines about drafting, and between two alarms. A change meanwhile is told after it,
  // if it lasts.
  static constexpr int64_t kMinIntervalNs = int64_t{60} * 1'000'000'000;

  // `stats` of the engine's life. Nothing when speculation is off.
  std::vector<Line> Observe(const engine::SpeculationStats& stats, int64_t now_ns);
  bool drafting() const { return drafting_; }
  bool fruitless() const { return fruitless_; }

 private:
  void Introduce(const engine::SpeculationStats& stats, std::vector<Line>* lines);
  void Decide(const engine::SpeculationStats& stats, int64_t now_ns, std::vector<Line>* lines);
  void Alarm(const engine::SpeculationStats& stats, int64_t now_ns, std::vector<Line>* lines);

  bool introduced_ = false, drafting_ = false, fruitless_ = false;
  engine::SpeculationStats window_begin_;
  bool told_ = false, told_drafting_ = false;  // the last line about drafting
  int64_t told_ns_ = 0, alarm_ns_ = 0;
  bool alarmed_ = false;
};
}  // namespace stretto::services
