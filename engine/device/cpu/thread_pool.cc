#include "engine/device/cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

namespace stretto::engine::cpu {
namespace {
constexpr uint64_t kOpen = uint64_t{1} << 15;
constexpr uint64_t kLoop = uint64_t{1} << 16;
constexpr uint64_t kEntered = kOpen - 1;
constexpr int kSpins = 2000;  // some tens of microseconds

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The quota of cgroup v2 ("max 100000" or "150000 100000") or v1 in processors; 0 when none is set.
double CgroupQuota() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period) {
    return quota == "max" || period <= 0 ? 0 : std::strtod(quota.c_str(), nullptr) / period;
  }
  std::ifstream quota_v1("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_v1("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double q = 0;
  if (quota_v1 >> q && period_v1 >> period && q > 0 && period > 0) return q / period;
  return 0;
}
}  // namespace

int AvailableProcessors() {
  int n = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
  const double quota = CgroupQuota();
  if (quota > 0) n = std::min(n, static_cast<int>(std::ceil(quota)));
  return std::max(n, 1);
}

ThreadPool::ThreadPool(int num_threads) : shares_(static_cast<size_t>(num_threads) + 1) {
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { Work(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::TakeFrom(Share& share) {
  // Looked at before it is changed: most shares of others are empty by then.
  while (share.next.load(std::memory_order_relaxed) < share.end) {
    const int64_t i = share.next.fetch_add(1, std::memory_order_relaxed);
    if (i < share.end) call_(context_, i);
  }
}

void ThreadPool::TakeIndices(int thread) {
  const int n = num_threads();
  for (int i = 0; i < n; ++i) TakeFrom(shares_[static_cast<size_t>((thread + i) % n)]);
  TakeFrom(shares_.back());
}

void ThreadPool::Run(int64_t count, int64_t num_last, Call call, const void* context) {
  if (count <= 0) return;
  if (count == 1 || num_present() <= 0 || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < count; ++i) call(context, i);
    return;
  }
  call_ = call;
  context_ = context;
  const int64_t n = num_threads(), first_of_last = count - num_last;
  for (int64_t t = 0; t <= n; ++t) {
    Share& share = shares_[static_cast<size_t>(t)];
    share.next.store(t < n ? first_of_last * t / n : first_of_last, std::memory_order_relaxed);
    share.end = t < n ? first_of_last * (t + 1) / n : count;
  }
  num_left_.store(0, std::memory_order_relaxed);
  const uint64_t loop = state_.load(std::memory_order_relaxed) / kLoop + 1;
  state_.store(loop * kLoop + kOpen);
  wake_.fetch_add(1);
  if (num_sleeping_.load() > 0) wake_.notify_all();
  TakeIndices(0);
  // Who has not entered by now need not: the work is handed out. Who has must be waited for.
  const uint64_t closed = state_.fetch_and(~kOpen);
  const int entered = static_cast<int>(closed & kEntered);
  for (int spins = 0; num_left_.load(std::memory_order_acquire) < entered; ++spins) {
    if (spins < kSpins) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  busy_.store(false, std::memory_order_release);
}

void ThreadPool::Work(int thread) {
  uint64_t seen = 0;  // the last loop this thread took part in
  while (!stop_.load(std::memory_order_acquire)) {
    const uint32_t ticket = wake_.load();
    uint64_t state = state_.load();
    bool entered = false;
    while ((state & kOpen) != 0 && state / kLoop != seen &&
           static_cast<int>(state & kEntered) < num_present()) {
      if (state_.compare_exchange_weak(state, state + 1)) {
        entered = true;
        break;
      }
    }
    if (entered) {
      seen = state / kLoop;
      TakeIndices(thread);
      num_left_.fetch_add(1, std::memory_order_release);
      continue;
    }
    int spins = 0;
    while (spins < kSpins && wake_.load(std::memory_order_relaxed) == ticket) {
      Pause();
      ++spins;
    }
    if (wake_.load() != ticket) continue;
    num_sleeping_.fetch_add(1);
    if (wake_.load() == ticket && !stop_.load()) wake_.wait(ticket);
    num_sleeping_.fetch_sub(1);
  }
}
}  // namespace stretto::engine::cpu
