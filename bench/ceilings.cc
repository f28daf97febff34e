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

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench/report.h"

namespace stretto::bench {
HWY_EXPORT(MultiplyAddMany);
HWY_EXPORT(ReadMany);

namespace {
std::atomic<float> sink;

#if defined(__x86_64__)
// As MultiplyAddMany, of pairs of bf16.
__attribute__((target("avx512f,avx512bw,avx512bf16"))) float MultiplyAddPairs(const float* starts,
                                                                              int64_t rounds,
                                                                              double* flops) {
  const auto x = (__m512bh)_mm512_set1_epi16(0x3f7f), y = (__m512bh)_mm512_set1_epi16(0x3a83);
  __m512 sums[10];
  for (int i = 0; i < 10; ++i) sums[i] = _mm512_set1_ps(starts[i]);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 10
    for (int j = 0; j < 10; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], x, y);
  }
  *flops = 10.0 * 64 * static_cast<double>(rounds);
  float total[16], result = 0;
  for (const __m512& sum : sums) {
    _mm512_storeu_ps(total, sum);
    result += total[0];
  }
  return result;
}
bool HasPairs() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16");
}
#else
float MultiplyAddPairs(const float*, int64_t, double*) { return 0; }
bool HasPairs() { return false; }
#endif

constexpr int64_t kFloats = int64_t{96} << 20;  // 384 MiB

// Runs fn(thread) on all threads at once; the seconds of the slowest.
template <class Fn>
double SecondsOf(int num_threads, const Fn& fn) {
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
  return *std::max_element(seconds.begin(), seconds.end());
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
}  // namespace

CeilingMeter::CeilingMeter(int num_threads) : num_threads_(num_threads) {
  constexpr size_t kBytes = kFloats * sizeof(float);
  buffer_ = static_cast<float*>(std::aligned_alloc(size_t{2} << 20, kBytes));
  madvise(buffer_, kBytes, MADV_HUGEPAGE);
  for (int64_t i = 0; i < kFloats; ++i) buffer_[i] = static_cast<float>(i & 15);
  Read();
  flops_.clear();
  bandwidths_.clear();
}

CeilingMeter::~CeilingMeter() { std::free(buffer_); }

Ceilings CeilingMeter::Read() {
  flops_.push_back(PeakFlops());
  bandwidths_.push_back(ReadBandwidth());
  return {flops_.back(), bandwidths_.back()};
}

Ceilings CeilingMeter::Median() const { return {MedianOf(flops_), MedianOf(bandwidths_)}; }

double CeilingMeter::PeakFlops() {
  std::atomic<double> flops{0};
  constexpr int64_t kRounds = 10'000'000;
  float starts[10];
  for (int i = 0; i < 10; ++i) starts[i] = 1 + 0.1f * static_cast<float>(i);
  const double seconds = SecondsOf(num_threads_, [&](int) {
    double mine = 0;
    sink = HasPairs() ? MultiplyAddPairs(starts, kRounds, &mine)
                      : HWY_DYNAMIC_DISPATCH(MultiplyAddMany)(starts, kRounds, &mine);
    flops = mine;
  });
  return flops * num_threads_ / seconds;
}

double CeilingMeter::ReadBandwidth() {
  const int64_t share = kFloats / num_threads_;
  const double seconds = SecondsOf(num_threads_, [&](int t) {
    sink = HWY_DYNAMIC_DISPATCH(ReadMany)(buffer_ + t * share, share);
  });
  return static_cast<double>(share) * num_threads_ * sizeof(float) / seconds;
}
}  // namespace stretto::bench
#endif  // HWY_ONCE
