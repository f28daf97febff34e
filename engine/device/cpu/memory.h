// Host memory of a CPU device: 64-byte aligned blocks, all but small ones on huge pages (walks
// through the tables of 4 KiB pages slow products down by several percent), and a short list of
// freed blocks that are handed out again (fresh pages cost a fault each). And scratch memory of
// threads, kept between operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace stretto::engine::cpu {
// Thread-safe.
class BlockAllocator {
 public:
  BlockAllocator() = default;
  ~BlockAllocator();
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  // nullptr when the system has no memory. Contents undefined.
  void* Allocate(size_t bytes);
  // Zeros; large blocks are fresh ones that haven't been touched.
  void* AllocateZeros(size_t bytes);
  void Free(void* p, size_t bytes);
  // Slabs that blocks lie in, each 32 MiB; and those that are kept for the next blocks, at most as
  // many.
  size_t num_slabs() const;
  size_t num_spare_slabs() const;

 private:
  // Huge pages that blocks smaller than one are cut from, front to back. Memory comes back when all
  // blocks of a slab have been freed, so that whole sets, a version's weights, leave none behind
  // but what the next version takes.
  struct Slab {
    size_t used = 0, num_blocks = 0;
  };
  void* AllocateFromSlab(size_t rounded);
  void OpenSlab();
  void KeepOrFree(char* slab);
  // Whether p was a slab's.
  bool FreeToSlab(void* p, size_t rounded);

  // std::mutex rather than absl's: thread sanitizers see it without an instrumented library.
  mutable std::mutex mutex_;
  std::multimap<size_t, void*> free_;  // by rounded size
  size_t free_bytes_ = 0;
  std::map<char*, Slab> slabs_;
  char* open_slab_ = nullptr;  // the one that is cut from
  std::vector<char*> spare_slabs_;
};

// Uses of scratch memory that may be alive at the same time in one thread.
enum class ScratchUse : uint8_t { kShared, kA, kC, kScores, kKeys, kMore };

// At least `bytes` of memory of the calling thread, 64-byte aligned, contents undefined; good until
// the thread asks for the same use again. Grows and is kept; freed with the thread.
void* ThreadScratch(ScratchUse use, size_t bytes);
inline float* FloatScratch(ScratchUse use, size_t count) {
  return static_cast<float*>(ThreadScratch(use, count * sizeof(float)));
}

// Makes a line this processor's own before it is written. A hint.
inline void PrefetchForWriting(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));  // NOLINT(hicpp-no-assembler)
#else
  __builtin_prefetch(p, 1);
#endif
}
}  // namespace stretto::engine::cpu
