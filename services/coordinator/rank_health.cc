#include "services/coordinator/rank_health.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace stretto::services {
namespace {
constexpr double kSlowFactor = 1.5;    // of the others' median
constexpr double kSlowSeconds = 0.05;  // less is noise
constexpr double kLargeFactor = 10;    // of the others' median
constexpr int kSlowSteps = 3;          // on end; gradients count at once

double Value(const RankHealth::Metrics& metrics, const char* name) {
  const auto found = metrics.find(name);
  return found == metrics.end() ? 0 : found->second;
}

// Of all ranks but one, without those that have nothing of it.
template <class Get>
double MedianOfOthers(const std::map<std::string, RankHealth::Rank>& ranks, const std::string& name,
                      const Get& get) {
  std::vector<double> values;
  for (const auto& [other, rank] : ranks) {
    if (other != name && std::isfinite(get(rank)) && get(rank) > 0) values.push_back(get(rank));
  }
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
}  // namespace

std::vector<std::string> RankHealth::Add(int64_t step,
                                         const std::map<std::string, Metrics>& ranks) {
  std::map<std::string, Rank> now;
  for (const auto& [name, metrics] : ranks) {
    Rank& rank = now[name] = ranks_[name];
    rank.compute_seconds =
        std::max(0.0, Value(metrics, "train_seconds") - Value(metrics, "collective_seconds"));
    rank.gradient = Value(metrics, "rank_gradient");
  }
  ranks_ = std::move(now);
  std::vector<std::string> notes;
  if (ranks_.size() < 2) return notes;
  for (auto& [name, rank] : ranks_) {
    const double seconds =
        MedianOfOthers(ranks_, name, [](const Rank& r) { return r.compute_seconds; });
    const bool is_slow = rank.compute_seconds > kSlowFactor * seconds &&
                         rank.compute_seconds > seconds + kSlowSeconds;
    rank.num_slow = is_slow ? rank.num_slow + 1 : 0;
    const bool was_slow = rank.is_slow;
    rank.is_slow = rank.num_slow >= kSlowSteps;
    if (rank.is_slow && !was_slow) {
      notes.push_back(
          absl::StrFormat("%s is slow: it computed %.2f s of step %d, the others' median is %.2f s",
                          name, rank.compute_seconds, step, seconds));
    }
    const double norm = MedianOfOthers(ranks_, name, [](const Rank& r) { return r.gradient; });
    const bool is_large =
        !std::isfinite(rank.gradient) || (norm > 0 && rank.gradient > kLargeFactor * norm);
    if (is_large && !rank.has_large_gradients) {
      notes.push_back(absl::StrFormat(
          "%s has gradients unlike the others' in step %d: %g, the others' median is %g", name,
          step, rank.gradient, norm));
    }
    rank.has_large_gradients = is_large;
  }
  return notes;
}
}  // namespace stretto::services
