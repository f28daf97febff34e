#include "engine/device/cpu/memory.h"

#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace stretto::engine::cpu {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLarge = kHugePage;
constexpr size_t kFromSlab = size_t{64} << 10;
constexpr size_t kSlabBytes = 16 * kHugePage;
constexpr size_t kLargest = std::numeric_limits<size_t>::max() / 2;
constexpr size_t kMaxFreeBytes = size_t{256} << 20;

// Sizes are rounded so that similar requests find each other's freed blocks.
size_t RoundedSize(size_t bytes) {
  const size_t unit = bytes >= kLarge ? kHugePage : (bytes >= kFromSlab ? 16384 : 64);
  return (bytes + unit - 1) / unit * unit;
}

// A mapping of its own, which begins with a huge page: zeros that cost nothing before they are
// written.
void* Map(size_t rounded) {
  void* mapping = mmap(nullptr, rounded + kHugePage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* begin = static_cast<char*>(mapping);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  char* p = begin + before;
  if (before < kHugePage) munmap(p + rounded, kHugePage - before);
  madvise(p, rounded, MADV_HUGEPAGE);
  return p;
}

void* SystemAllocate(size_t rounded) {
  return rounded >= kLarge ? Map(rounded) : std::aligned_alloc(64, rounded);
}

void SystemFree(void* p, size_t rounded) {
  if (rounded >= kLarge) {
    munmap(p, rounded);
  } else {
    std::free(p);
  }
}
}  // namespace

BlockAllocator::~BlockAllocator() {
  for (const auto& [size, p] : free_) SystemFree(p, size);
  for (const auto& [p, slab] : slabs_) SystemFree(p, kSlabBytes);
  for (char* p : spare_slabs_) SystemFree(p, kSlabBytes);
}

void BlockAllocator::OpenSlab() {
  if (spare_slabs_.empty()) {
    open_slab_ = static_cast<char*>(SystemAllocate(kSlabBytes));
  } else {
    open_slab_ = spare_slabs_.back();
    spare_slabs_.pop_back();
  }
  if (open_slab_ != nullptr) slabs_[open_slab_] = {};
}

// What is not needed soon makes room.
void BlockAllocator::KeepOrFree(char* slab) {
  spare_slabs_.push_back(slab);
  for (; spare_slabs_.size() > slabs_.size(); spare_slabs_.pop_back()) {
    SystemFree(spare_slabs_.back(), kSlabBytes);
  }
}

void* BlockAllocator::AllocateFromSlab(size_t rounded) {
  if (open_slab_ == nullptr || slabs_[open_slab_].used + rounded > kSlabBytes) {
    OpenSlab();
    if (open_slab_ == nullptr) return nullptr;
  }
  Slab& slab = slabs_[open_slab_];
  char* p = open_slab_ + slab.used;
  slab.used += rounded;
  ++slab.num_blocks;
  return p;
}

bool BlockAllocator::FreeToSlab(void* p, size_t rounded) {
  auto* block = static_cast<char*>(p);
  auto it = slabs_.upper_bound(block);
  if (it == slabs_.begin()) return false;
  --it;
  auto& [begin, slab] = *it;
  if (block >= begin + kSlabBytes) return false;
  if (block + rounded == begin + slab.used) slab.used -= rounded;
  if (--slab.num_blocks > 0) return true;
  slab.used = 0;
  if (begin != open_slab_) {
    char* emptied = begin;
    slabs_.erase(it);
    KeepOrFree(emptied);
  }
  return true;
}

size_t BlockAllocator::num_slabs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slabs_.size();
}

size_t BlockAllocator::num_spare_slabs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return spare_slabs_.size();
}

void* BlockAllocator::Allocate(size_t bytes) {
  if (bytes > kLargest) return nullptr;
  const size_t rounded = RoundedSize(bytes == 0 ? 1 : bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (rounded >= kFromSlab && rounded < kLarge) return AllocateFromSlab(rounded);
    if (const auto it = free_.find(rounded); it != free_.end()) {
      void* p = it->second;
      free_.erase(it);
      free_bytes_ -= rounded;
      return p;
    }
  }
  return SystemAllocate(rounded);
}

void* BlockAllocator::AllocateZeros(size_t bytes) {
  const size_t rounded = RoundedSize(bytes == 0 ? 1 : bytes);
  if (rounded >= kLarge && bytes <= kLargest) return SystemAllocate(rounded);
  void* p = Allocate(bytes);
  if (p != nullptr) std::memset(p, 0, bytes);
  return p;
}

void BlockAllocator::Free(void* p, size_t bytes) {
  const size_t rounded = RoundedSize(bytes == 0 ? 1 : bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (rounded >= kFromSlab && rounded < kLarge && FreeToSlab(p, rounded)) return;
    if (free_bytes_ + rounded <= kMaxFreeBytes && free_.size() < 256) {
      free_.emplace(rounded, p);
      free_bytes_ += rounded;
      return;
    }
  }
  SystemFree(p, rounded);
}

namespace {
struct Scratch {
  std::array<void*, 6> data{};
  std::array<size_t, 6> bytes{};
  ~Scratch() {
    for (size_t i = 0; i < data.size(); ++i) SystemFree(data[i], bytes[i]);
  }
};
thread_local Scratch scratch;
}  // namespace

void* ThreadScratch(ScratchUse use, size_t bytes) {
  const auto i = static_cast<size_t>(use);
  if (scratch.bytes[i] < bytes) {
    SystemFree(scratch.data[i], scratch.bytes[i]);
    const size_t rounded = RoundedSize(bytes + bytes / 8);
    scratch.data[i] = SystemAllocate(rounded);
    STRETTO_CHECK_MSG(scratch.data[i] != nullptr, "out of memory for scratch space");
    scratch.bytes[i] = rounded;
  }
  return scratch.data[i];
}
}  // namespace stretto::engine::cpu
