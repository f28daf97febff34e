// Worker threads of one CPU device. ParallelFor gives each thread a run of indices of its own, the
// same in every loop of as many: what a thread wrote in one loop is in its caches, which may be far
// from the others', when it reads it in the next. A thread that is done with its own goes on with
// others'. So results must not depend on which thread computes what (they never do: each index
// writes its own output).
//
// A caller takes part in its own loop; workers spin for a few microseconds after a loop, in case
// the next one follows at once, then sleep. When another thread is inside ParallelFor already, a
// caller does its whole loop alone. Workers can be lent (engine/device/background.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace stretto::engine::cpu {
// Processors that this process may use: the affinity mask, cut by the cgroup's CPU quota. At
// least 1.
int AvailableProcessors();

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // the caller counts as one
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Loops that begin from now on do with one worker less, as far as there are any.
  void Lend() { num_lent_.fetch_add(1, std::memory_order_relaxed); }
  void TakeBack() { num_lent_.fetch_sub(1, std::memory_order_relaxed); }

  // Calls fn(i) for every i in [0, count), on any threads in any order; returns when all are done.
  // The last `num_last` of them are nobody's, and begun when all others are.
  template <class Fn>
  void ParallelFor(int64_t count, const Fn& fn, int64_t num_last = 0) {
    Run(
        count, num_last,
        [](const void* context, int64_t i) { (*static_cast<const Fn*>(context))(i); },
        static_cast<const void*>(&fn));
  }
  // Calls fn(begin, end) for runs of at least `grain` indices that together make [0, count).
  template <class Fn>
  void ParallelRanges(int64_t count, int64_t grain, const Fn& fn) {
    if (count <= 0) return;
    const int64_t most = (count + grain - 1) / grain;
    const int64_t wanted = num_threads() == 1 ? 1 : 4 * num_threads();
    const int64_t chunks = most < wanted ? most : wanted;
    ParallelFor(chunks, [&](int64_t i) { fn(count * i / chunks, count * (i + 1) / chunks); });
  }

 private:
  using Call = void (*)(const void* context, int64_t i);
  // Indices that are left of a run of them.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  void Run(int64_t count, int64_t num_last, Call call, const void* context);
  void Work(int thread);
  void TakeIndices(int thread);
  void TakeFrom(Share& share);
  int num_present() const {
    return static_cast<int>(workers_.size()) - num_lent_.load(std::memory_order_relaxed);
  }

  // state_: loop number · 2^16 + (open ? 2^15 : 0) + workers that have entered the loop.
  std::atomic<uint64_t> state_{0};
  std::atomic<uint32_t> wake_{0};  // changes with every loop that may need a sleeper
  std::atomic<int> num_sleeping_{0};
  std::atomic<int> num_left_{0};  // workers that have left the present loop
  std::atomic<int> num_lent_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> busy_{false};
  std::vector<Share> shares_;  // of threads, the caller's first; then what is nobody's
  Call call_ = nullptr;
  const void* context_ = nullptr;
  std::vector<std::thread> workers_;
};
}  // namespace stretto::engine::cpu
