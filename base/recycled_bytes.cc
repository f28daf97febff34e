#include "base/recycled_bytes.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <new>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace stretto {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;

uint8_t* Allocate(size_t size) {
  if (size < kHugePage) return new uint8_t[size];
  void* p = ::operator new (size, std::align_val_t{kHugePage});
  madvise(p, size, MADV_HUGEPAGE);  // a hint
  return static_cast<uint8_t*>(p);
}

void Release(uint8_t* p, size_t size) {
  if (size < kHugePage) {
    delete[] p;
  } else {
    ::operator delete (p, std::align_val_t{kHugePage});
  }
}

class Recycler {
 public:
  // Lives as long as the process: versions may be let go at its very end.
  static Recycler& Get() {
    static Recycler& recycler = *new Recycler;
    return recycler;
  }

  uint8_t* Take(size_t size) {
    {
      absl::MutexLock lock(&mutex_);
      num_used_ += size;
      if (const auto it = spare_.find(size); it != spare_.end()) {
        uint8_t* p = it->second;
        spare_.erase(it);
        num_spare_ -= size;
        return p;
      }
    }
    return Allocate(size);
  }

  void Return(uint8_t* p, size_t size) {
    {
      absl::MutexLock lock(&mutex_);
      num_used_ -= size;
      // What nobody has taken makes room.
      const size_t most = std::max(num_used_, num_reserved_);
      while (!spare_.empty() && num_spare_ + size > most) {
        Release(spare_.begin()->second, spare_.begin()->first);
        num_spare_ -= spare_.begin()->first;
        spare_.erase(spare_.begin());
      }
      if (num_spare_ + size <= most) {
        spare_.emplace(size, p);
        num_spare_ += size;
        return;
      }
    }
    Release(p, size);
  }

  void Reserve(size_t size) {
    absl::MutexLock lock(&mutex_);
    num_reserved_ += size;
  }

  size_t num_spare() {
    absl::MutexLock lock(&mutex_);
    return num_spare_;
  }

 private:
  absl::Mutex mutex_;
  std::multimap<size_t, uint8_t*> spare_ ABSL_GUARDED_BY(mutex_);  // by size
  size_t num_spare_ ABSL_GUARDED_BY(mutex_) = 0, num_used_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t num_reserved_ ABSL_GUARDED_BY(mutex_) = 0;
};
}  // namespace

std::shared_ptr<uint8_t> TakeBytes(size_t size) {
  return {Recycler::Get().Take(size), [size](uint8_t* p) { Recycler::Get().Return(p, size); }};
}

void ReserveBytes(const std::vector<size_t>& sizes, const std::atomic<bool>& stop) {
  constexpr size_t kPage = 4096;
  std::vector<std::shared_ptr<uint8_t>> all;
  for (const size_t size : sizes) {
    if (stop) return;
    Recycler::Get().Reserve(size);
    uint8_t* p = all.emplace_back(TakeBytes(size)).get();
    for (size_t at = 0; at < size; at += kPage) static_cast<volatile uint8_t*>(p)[at] = 0;
  }
}

size_t NumSpareBytes() { return Recycler::Get().num_spare(); }
}  // namespace stretto
