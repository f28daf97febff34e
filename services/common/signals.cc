#include "services/common/signals.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>

#include "base/clock.h"
#include "services/common/log.h"

namespace stretto::services {
namespace {
constexpr int kExitSignal = 130;
constexpr int64_t kHangUpGraceNs = 10'000'000'000;

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  return set;
}
}  // namespace

Signals::Signals(StopSignal* stop) : stop_(stop) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of the write
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { Run(); });
}

Signals::~Signals() {
  ending_ = true;
  thread_.join();
}

void Signals::Run() {
  const sigset_t set = StopSignals();
  const timespec wait = {.tv_sec = 0, .tv_nsec = 50'000'000};
  bool asked = false;
  int64_t hung_up_ns = 0;
  while (!ending_) {
    const int signal = sigtimedwait(&set, nullptr, &wait);
    if (hung_up_ns != 0 && Clock::Real().NowNs() - hung_up_ns > kHangUpGraceNs) {
      LogWarning("nobody is left to wait for: ending at once");
      _exit(kExitSignal);
    }
    if (signal <= 0 || (signal == SIGINT && ignore_interrupt_)) continue;
    if (!graceful_ || (asked && signal != SIGHUP)) {
      LogWarning("signal ", signal, ": ending at once");
      _exit(kExitSignal);
    }
    if (signal == SIGHUP) {
      hung_up_ns = Clock::Real().NowNs();
    } else {
      asked = true;
    }
    stop_->Request();
  }
}
}  // namespace stretto::services
