// The time that leases, pauses and waits are measured in. It passes as the machine's does while the
// coordinator looks at it, and stands still while the coordinator can't: a process that was stopped
// or starved, a disk that hung, or a clock that jumps (by an hour, or back) must not make members
// look silent that nobody has listened to.
#pragma once

#include <algorithm>
#include <cstdint>

namespace stretto::services {
// Not thread-safe.
class RunClock {
 public:
  // Between two readings at most `max_gap_ns` pass.
  explicit RunClock(int64_t max_gap_ns) : max_gap_ns_(max_gap_ns) {}

  // `clock_ns`: what the machine's clock shows. The result never goes back.
  int64_t Read(int64_t clock_ns) {
    if (!has_read_) last_clock_ns_ = clock_ns;
    has_read_ = true;
    const int64_t passed_ns = clock_ns - last_clock_ns_;
    last_clock_ns_ = clock_ns;
    const int64_t counted_ns = std::clamp<int64_t>(passed_ns, 0, max_gap_ns_);
    if (passed_ns != counted_ns) {
      ++num_gaps_;
      last_gap_ns_ = passed_ns;
    }
    now_ns_ += counted_ns;
    return now_ns_;
  }
  // Readings that were further apart than allowed, or ran backwards; how far the last of them.
  int64_t num_gaps() const { return num_gaps_; }
  int64_t last_gap_ns() const { return last_gap_ns_; }

 private:
  int64_t max_gap_ns_;
  bool has_read_ = false;
  int64_t last_clock_ns_ = 0, now_ns_ = 0, num_gaps_ = 0, last_gap_ns_ = 0;
};
}  // namespace stretto::services
