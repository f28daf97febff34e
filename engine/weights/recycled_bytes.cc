#include "engine/weights/recycled_bytes.h"

#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace stretto::engine {
namespace {
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
    return new uint8_t[size];
  }

  void Return(uint8_t* p, size_t size) {
    {
      absl::MutexLock lock(&mutex_);
      num_used_ -= size;
      // What nobody has taken makes room.
      while (!spare_.empty() && num_spare_ + size > num_used_) {
        delete[] spare_.begin()->second;
        num_spare_ -= spare_.begin()->first;
        spare_.erase(spare_.begin());
      }
      if (num_spare_ + size <= num_used_) {
        spare_.emplace(size, p);
        num_spare_ += size;
        return;
      }
    }
    delete[] p;
  }

  size_t num_spare() {
    absl::MutexLock lock(&mutex_);
    return num_spare_;
  }

 private:
  absl::Mutex mutex_;
  std::multimap<size_t, uint8_t*> spare_ ABSL_GUARDED_BY(mutex_);  // by size
  size_t num_spare_ ABSL_GUARDED_BY(mutex_) = 0, num_used_ ABSL_GUARDED_BY(mutex_) = 0;
};
}  // namespace

std::shared_ptr<uint8_t> TakeBytes(size_t size) {
  return {Recycler::Get().Take(size), [size](uint8_t* p) { Recycler::Get().Return(p, size); }};
}

size_t NumSpareBytes() { return Recycler::Get().num_spare(); }
}  // namespace stretto::engine
