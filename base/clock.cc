#include "base/clock.h"

#include <chrono>
#include <thread>

namespace stretto {
namespace {
class RealClock final : public Clock {
 public:
  int64_t NowNs() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  int64_t WallUs() const override {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
  void SleepNs(int64_t duration_ns) override {
    std::this_thread::sleep_for(std::chrono::nanoseconds(duration_ns));
  }
};
}  // namespace

Clock& Clock::Real() {
  static RealClock* clock = new RealClock;
  return *clock;
}
}  // namespace stretto
