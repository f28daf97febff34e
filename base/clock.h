// Time behind an interface, so that a simulator can stand in. Thread-safe.
#pragma once

#include <cstdint>

namespace stretto {
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic nanoseconds since an arbitrary point: for leases, deadlines, durations.
  virtual int64_t NowNs() const = 0;
  // Wall-clock microseconds since 1970 UTC: for people (logs, records), never for decisions.
  virtual int64_t WallUs() const = 0;
  // Blocks the caller for `duration_ns`.
  virtual void SleepNs(int64_t duration_ns) = 0;

  double NowSeconds() const { return static_cast<double>(NowNs()) * 1e-9; }
  // The machine's own clock; never destroyed.
  static Clock& Real();
};
}  // namespace stretto
