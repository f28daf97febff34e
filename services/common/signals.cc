#include "services/common/signals.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>

#include "services/common/log.h"

namespace stretto::services {
namespace {
constexpr int kExitSignal = 130;

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}
}  // namespace

Signals::Signals(StopSignal* stop) : stop_(stop) {
  std::signal(SIGPIPE, SIG_IGN);
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
  while (!ending_) {
    const int signal = sigtimedwait(&set, nullptr, &wait);
    if (signal <= 0) continue;
    if (!graceful_ || asked) {
      LogWarning("signal ", signal, ": ending at once");
      _exit(kExitSignal);
    }
    asked = true;
    stop_->Request();
  }
}
}  // namespace stretto::services
