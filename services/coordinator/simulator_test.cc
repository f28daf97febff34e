// The core under thousands of simulated runs, and what it costs in time where each kind of work
// takes as long as on large hardware.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

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
          .min_trainers = seed % 7 < 3 ? num_trainers : 1,
          // Of two or four: two share a copy of the model in some runs.
          .ranks_per_copy = num_trainers % 2 == 0 && seed % 11 < 6 ? 2 : 1,
          .replaces_without_signal = seed % 5 == 0};
}

// What runs of many seeds have in common; several threads share the seeds.
struct Campaign {
  uint64_t first = 1, count = 0;
  // The hashes without disturbance and staleness; with every group, and without those that have no
  // signal.
  std::string controls[2];
  std::atomic<uint64_t> next{0};
  std::atomic<bool> has_failed{false};
  std::string failure;
  uint64_t failed_seed = 0;
  std::atomic<int64_t> num_troubles{0}, num_events{0};
  std::atomic<int64_t> num_silent{0}, num_late{0}, num_saved_behind{0}, num_copies_lost{0},
      num_ahead{0}, num_brought_forward{0};

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
      num_saved_behind += simulation.num_saved_behind();
      num_copies_lost += simulation.num_copies_lost();
      num_ahead += simulation.num_ahead();
      num_brought_forward += simulation.num_brought_forward();
      num_silent += count_of("silent_member");
      num_late += count_of("late_answer");
      const std::string& control = controls[options.replaces_without_signal ? 1 : 0];
      if (options.max_staleness == 0 && end != control) {
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
  for (const bool replaces : {false, true}) {
    campaign.controls[replaces ? 1 : 0] =
        Simulation({.seed = 1, .disturbed = false, .replaces_without_signal = replaces}).Run();
  }
  CHECK(campaign.controls[0] != campaign.controls[1]);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&campaign] { campaign.Work(); });
  }
  for (std::thread& thread : threads) thread.join();
  INFO("replay with STRETTO_SIM_SEED=" << campaign.failed_seed);
  INFO(campaign.failure);
  REQUIRE_FALSE(campaign.has_failed);
  std::printf(
      "%lld runs, %lld troubles, %lld events, %lld times a silent member, %lld late answers, "
      "%lld times a copy of the model less, %lld steps ahead, %lld groups brought forward\n",
      static_cast<long long>(campaign.count), static_cast<long long>(campaign.num_troubles),
      static_cast<long long>(campaign.num_events), static_cast<long long>(campaign.num_silent),
      static_cast<long long>(campaign.num_late), static_cast<long long>(campaign.num_copies_lost),
      static_cast<long long>(campaign.num_ahead),
      static_cast<long long>(campaign.num_brought_forward));
  if (one > 0) return;
  const auto count = static_cast<int64_t>(campaign.count);
  CHECK(campaign.num_troubles > count);
  CHECK(campaign.num_silent > count / 10);
  CHECK(campaign.num_late > count / 10);
  CHECK(campaign.num_saved_behind > count / 10);
  CHECK(campaign.num_copies_lost > count / 100);
  CHECK(campaign.num_ahead > count / 10);
  CHECK(campaign.num_brought_forward > count / 10);
}

// Seconds of each step of a model of 70 billion parameters, 128 completions of 512 tokens:
// generation 30 to 45 s, rewards 5 to 8 s and reference 4 to 6 s, training 8 to 12 s, the swap 0 to
// 3 s.
std::vector<double> StepsOf70B(int64_t max_staleness) {
  SimOptions options{.seed = 7, .max_staleness = max_staleness, .disturbed = false};
  options.num_generators = 1;
  options.times = {.generate = {30'000, 45'000},
                   .score = {9'000, 14'000},
                   .commit = {0, 3'000},
                   .train = {8'000, 12'000},
                   .is_batched = true};
  CoreOptions core = SmallRun(options);
  core.num_steps = 40;
  core.prompts_per_step = 16;
  core.group_size = 8;
  core.max_samples_in_flight = 128;
  core.max_scores_in_flight = 16;
  core.checkpoint_every = 0;
  core.num_eval_prompts = 0;
  core.num_train_lines = 1'000'000;
  Simulation simulation(options, core);
  (void)simulation.Run();
  std::vector<double> seconds;
  for (int64_t step = 3; step <= core.num_steps; ++step) {  // the first ones fill the pipeline
    const auto& at = simulation.version_ms();
    seconds.push_back(static_cast<double>(at.at(step) - at.at(step - 1)) * 1e-3);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

double Mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value;
  return sum / static_cast<double>(x.size());
}

TEST_CASE("with the service times of a 70B model, steps take as long as they do there") {
  const std::vector<double> one_pool = StepsOf70B(0), overlapped = StepsOf70B(1);
  std::printf("a step of a 70B model   mean   fastest   median   slowest\n");
  for (const auto& [name, x] : {std::pair("one pool", &one_pool), {"overlapped", &overlapped}}) {
    std::printf("%-20s %5.1f s  %5.1f s  %5.1f s   %5.1f s\n", name, Mean(*x), x->front(),
                (*x)[x->size() / 2], x->back());
  }
  CHECK(one_pool.front() >= 47);  // the sum of the shortest
  CHECK(one_pool.back() <= 75);
  CHECK(Mean(one_pool) >= 50);
  CHECK(Mean(one_pool) <= 75);
  CHECK(Mean(overlapped) >= 35);
  CHECK(Mean(overlapped) <= 50);
  CHECK(overlapped.back() <= 50);
}
}  // namespace stretto::services
