#include "bench/ceilings.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/ceilings.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace stretto::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;

// Ten independent chains; the result keeps the compiler from dropping them, and their beginnings,
// which it cannot know, from computing one for all.
float MultiplyAddMany(const float* starts, int64_t rounds, double* flops) {
  const D d;
  const auto x = hn::Set(d, 0.999f), y = hn::Set(d, 0.001f);
  auto a0 = hn::Set(d, starts[0]), a1 = hn::Set(d, starts[1]), a2 = hn::Set(d, starts[2]),
       a3 = hn::Set(d, starts[3]), a4 = hn::Set(d, starts[4]), a5 = hn::Set(d, starts[5]),
       a6 = hn::Set(d, starts[6]), a7 = hn::Set(d, starts[7]), a8 = hn::Set(d, starts[8]),
       a9 = hn::Set(d, starts[9]);
  for (int64_t i = 0; i < rounds; ++i) {
    a0 = hn::MulAdd(a0, x, y);
    a1 = hn::MulAdd(a1, x, y);
    a2 = hn::MulAdd(a2, x, y);
    a3 = hn::MulAdd(a3, x, y);
    a4 = hn::MulAdd(a4, x, y);
    a5 = hn::MulAdd(a5, x, y);
    a6 = hn::MulAdd(a6, x, y);
    a7 = hn::MulAdd(a7, x, y);
    a8 = hn::MulAdd(a8, x, y);
    a9 = hn::MulAdd(a9, x, y);
  }
  *flops = 20.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
  a0 =
      hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  return hn::GetLane(hn::Add(a0, hn::Add(a8, a9)));
}

float ReadMany(const float* p, int64_t count) {
  const D d;
  const auto n = static_cast<int64_t>(hn::Lanes(d));
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0;
  for (int64_t i = 0; i + 4 * n <= count; i += 4 * n) {
    a0 = hn::Add(a0, hn::LoadU(d, p + i));
    a1 = hn::Add(a1, hn::LoadU(d, p + i + n));
    a2 = hn::Add(a2, hn::LoadU(d, p + i + 2 * n));
    a3 = hn::Add(a3, hn::LoadU(d, p + i + 3 * n));
  }
  return hn::GetLane(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)));
}
}  // namespace HWY_NAMESPACE
}  // namespace stretto::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "bench/report.h"

namespace stretto::bench {
HWY_EXPORT(MultiplyAddMany);
HWY_EXPORT(ReadMany);

namespace {
std::atomic<float> sink;

// Runs fn(thread) on all threads at once; the best of five times.
template <class Fn>
double BestSeconds(int num_threads, const Fn& fn) {
  double best = 1e300;
  for (int trial = 0; trial < 5; ++trial) {
    std::atomic<int> ready{0};
    std::vector<double> seconds(static_cast<size_t>(num_threads));
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        ready.fetch_add(1);
        while (ready.load() < num_threads) {
        }
        const double start = SecondsNow();
        fn(t);
        seconds[static_cast<size_t>(t)] = SecondsNow() - start;
      });
    }
    for (std::thread& t : threads) t.join();
    best = std::min(best, *std::max_element(seconds.begin(), seconds.end()));
  }
  return best;
}
}  // namespace

double PeakFlops(int num_threads) {
  std::atomic<double> flops{0};
  constexpr int64_t kRounds = 20'000'000;
  float starts[10];
  for (int i = 0; i < 10; ++i) starts[i] = 1 + 0.1f * static_cast<float>(i);
  const double seconds = BestSeconds(num_threads, [&](int) {
    double mine = 0;
    sink = HWY_DYNAMIC_DISPATCH(MultiplyAddMany)(starts, kRounds, &mine);
    flops = mine;
  });
  return flops * num_threads / seconds;
}

double ReadBandwidth(int num_threads) {
  constexpr int64_t kCount = int64_t{96} << 20;  // floats: 384 MiB
  constexpr size_t kBytes = kCount * sizeof(float);
  auto* p = static_cast<float*>(std::aligned_alloc(size_t{2} << 20, kBytes));
  madvise(p, kBytes, MADV_HUGEPAGE);
  for (int64_t i = 0; i < kCount; ++i) p[i] = static_cast<float>(i & 15);
  const int64_t share = kCount / num_threads;
  const double seconds = BestSeconds(
      num_threads, [&](int t) { sink = HWY_DYNAMIC_DISPATCH(ReadMany)(p + t * share, share); });
  std::free(p);
  return static_cast<double>(share) * num_threads * sizeof(float) / seconds;
}
}  // namespace stretto::bench
#endif  // HWY_ONCE
