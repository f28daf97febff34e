#include "services/generator/speculation_log.h"

#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "services/generator/speculation_metrics.h"

namespace stretto::services {
namespace {
using engine::SpeculationKind;
using engine::SpeculationStats;
constexpr int64_t kSecond = 1'000'000'000;

SpeculationStats ByModel(double cost) {
  SpeculationStats stats;
  stats.kind = SpeculationKind::kModel;
  stats.draft_cost = cost;
  stats.needed_alone = cost + 0.1;
  return stats;
}
// So many more steps, in which the drafted ones had one token each of which `accepted` came true.
void Go(SpeculationStats& stats, int64_t steps, int64_t drafted, int64_t accepted) {
  stats.num_steps += steps;
  stats.num_drafted_steps += drafted;
  stats.needed_sum += 0.4 * static_cast<double>(steps);
  stats.num_drafted += drafted;
  stats.num_verified += drafted;
  stats.num_accepted += accepted;
  stats.verified_at[0] += drafted;
  stats.accepted_at[0] += accepted;
  stats.draft_seconds += 0.002 * static_cast<double>(drafted);
  stats.num_fruitless = accepted > 0 ? 0 : stats.num_fruitless + drafted;
}
}  // namespace

TEST_CASE("speculation tells how it drafts, and when that begins and ends, not too often") {
  SpeculationLog log;
  SpeculationStats stats = ByModel(0.3);
  auto lines = log.Observe(stats, 0);
  REQUIRE(lines.size() == 1);
  CHECK(absl::StrContains(lines[0].text, "a drafted token costs 0.30"));
  CHECK(absl::StrContains(lines[0].text, "at least 0.40"));
  CHECK(!lines[0].is_warning);
  CHECK(log.Observe(stats, kSecond).empty());
  Go(stats, 63, 60, 50);
  CHECK(log.Observe(stats, 2 * kSecond).empty());  // too few steps
  Go(stats, 1, 1, 1);
  lines = log.Observe(stats, 3 * kSecond);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].text ==
        "speculation: drafting, in 61 of the latest 64 steps; 51 of 61 verified tokens were "
        "accepted, a share of 0.40 is needed; a drafted token costs 0.30 of one of the policy "
        "(2.00 ms)");
  CHECK(log.drafting());
  Go(stats, 64, 62, 50);
  CHECK(log.Observe(stats, 100 * kSecond).empty());  // no news
  Go(stats, 64, 3, 1);
  lines = log.Observe(stats, 101 * kSecond);
  REQUIRE(lines.size() == 1);
  CHECK(absl::StartsWith(lines[0].text, "speculation: not drafting, in 3 of the latest 64"));
  CHECK(!log.drafting());
  Go(stats, 64, 64, 64);
  CHECK(log.Observe(stats, 120 * kSecond).empty());  // told a moment ago
  CHECK(log.drafting());
  Go(stats, 64, 0, 0);
  CHECK(log.Observe(stats, 130 * kSecond).empty());  // and has not lasted
  Go(stats, 64, 64, 64);
  CHECK(log.Observe(stats, 200 * kSecond).size() == 1);
}

TEST_CASE("a draft model that is never worth its cost is warned of at once") {
  SpeculationLog log;
  const auto lines = log.Observe(ByModel(1.0), 0);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].is_warning);
  CHECK(absl::StrContains(lines[0].text, "nothing will ever be drafted"));
}

TEST_CASE("drafts that are never accepted raise an alarm, until one is") {
  SpeculationLog log;
  SpeculationStats stats = ByModel(0.3);
  (void)log.Observe(stats, 0);
  Go(stats, 31, 31, 0);
  CHECK(log.Observe(stats, kSecond).empty());
  CHECK(!log.fruitless());
  Go(stats, 1, 1, 0);
  auto lines = log.Observe(stats, 2 * kSecond);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].is_warning);
  CHECK(absl::StrContains(lines[0].text, "latest 32 drafts not a single token"));
  CHECK(log.fruitless());
  Go(stats, 1, 1, 0);
  CHECK(log.Observe(stats, 200 * kSecond).empty());  // the same alarm
  Go(stats, 1, 1, 1);
  CHECK(log.Observe(stats, 201 * kSecond).empty());
  CHECK(!log.fruitless());
}

TEST_CASE("without speculation nothing is said, and its series are there at 0") {
  SpeculationLog log;
  SpeculationStats off;
  Go(off, 100, 50, 0);
  CHECK(log.Observe(off, 0).empty());
  Metrics metrics;
  SpeculationMetrics speculation(&metrics);
  for (const char* series :
       {"stretto_generator_drafted_tokens_total 0", "stretto_generator_draft_seconds_total 0",
        "stretto_generator_draft_cost_ratio 0", "stretto_generator_speculation_drafting 0",
        "stretto_generator_speculation_fruitless 0",
        "stretto_generator_draft_verified_total{index=\"0\"} 0",
        "stretto_generator_draft_accepted_total{index=\"0\"} 0"}) {
    INFO(series);
    CHECK(absl::StrContains(metrics.Text(), series));
  }
  SpeculationStats stats = ByModel(0.25);
  Go(stats, 64, 40, 0);
  speculation.Publish(stats, 0);
  speculation.Publish(stats, kSecond);
  for (const char* series :
       {"stretto_generator_drafted_tokens_total 40", "stretto_generator_draft_cost_ratio 0.25",
        "stretto_generator_speculation_drafting 1", "stretto_generator_speculation_fruitless 1",
        "stretto_generator_draft_verified_total{index=\"0\"} 40"}) {
    INFO(series);
    CHECK(absl::StrContains(metrics.Text(), series));
  }
}
}  // namespace stretto::services
