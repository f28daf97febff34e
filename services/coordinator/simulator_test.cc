// The core under thousands of simulated runs, and what it costs in time where each kind of work
// takes as long as on large hardware.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "absl/strings/str_cat.h"
#include "services/coordinator/simulation.h"

namespace stretto::services {
namespace {
SimOptions OptionsOf(uint64_t seed) {
  const int num_trainers = 1 + static_cast<int>(seed / 3 % 4);
  return {.seed = seed,
          .max_staleness = static_cast<int64_t>(seed % 3),
          .num_generators = 1 + static_cast<int>(seed % 4),
          .num_scorers = 1 + static_cast<int>(seed % 2),
          .num_trainers = num_trainers,
          .min_trainers = seed % 7 < 3 ? num_trainers : 1};
}

// What runs of many seeds have in common; several threads share the seeds.
struct Campaign {
  uint64_t first = 1, count = 0;
  std::string control;  // the hash without disturbance and staleness
  std::atomic<uint64_t> next{0};
  std::atomic<bool> has_failed{false};
  std::string failure;
  uint64_t failed_seed = 0;
  std::atomic<int64_t> num_troubles{0}, num_events{0};
  std::atomic<int64_t> num_silent{0}, num_late{0};

  void Work() {
    for (uint64_t i; !has_failed && (i = next.fetch_add(1)) < count;) {
      const std::string text = RunOne(first + i);
      if (text.empty() || has_failed.exchange(true)) continue;
      failed_seed = first + i;
      failure = text;
    }
  }
  // Empty: all held.
  std::string RunOne(uint64_t seed) {
    try {
      SimOptions options = OptionsOf(seed);
      options.is_told = count == 1;
      Simulation simulation(options);
      const std::string end = simulation.Run();
      num_troubles += simulation.num_troubles();
      num_events += simulation.num_events();
      const auto count_of = [&](const char* kind) {
        const auto found = simulation.faults().find(kind);
        return found == simulation.faults().end() ? 0 : found->second;
      };
      num_silent += count_of("silent_member");
      num_late += count_of("late_answer");
      if (OptionsOf(seed).max_staleness == 0 && end != control) {
        return absl::StrCat("ends with ", end, ", undisturbed with ", control);
      }
    } catch (const SimulationFault& fault) {
      return fault.what();
    }
    return "";
  }
};

uint64_t NumberOf(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}
}  // namespace

TEST_CASE("whatever crashes, every prompt is trained on exactly once") {
  Campaign campaign;
  const uint64_t one = NumberOf("STRETTO_SIM_SEED", 0);
  campaign.first = one > 0 ? one : 1;
  campaign.count = one > 0 ? 1 : NumberOf("STRETTO_SIM_COUNT", 10000);
  campaign.control = Simulation({.seed = 1, .disturbed = false}).Run();
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&campaign] { campaign.Work(); });
  }
  for (std::thread& thread : threads) thread.join();
  INFO("replay with STRETTO_SIM_SEED=" << campaign.failed_seed);
  INFO(campaign.failure);
  REQUIRE_FALSE(campaign.has_failed);
  std::printf(
      "%lld runs, %lld troubles, %lld events, %lld times a silent member, %lld late answers\n",
      static_cast<long long>(campaign.count), static_cast<long long>(campaign.num_troubles),
      static_cast<long long>(campaign.num_events), static_cast<long long>(campaign.num_silent),
      static_cast<long long>(campaign.num_late));
  if (one > 0) return;
  const auto count = static_cast<int64_t>(campaign.count);
  CHECK(campaign.num_troubles > count);
  CHECK(campaign.num_silent > count / 10);
  CHECK(campaign.num_late > count / 10);
}
}  // namespace stretto::services
