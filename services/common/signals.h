// SIGTERM and SIGINT as a request to stop. SIGPIPE is ignored.
#pragma once

#include <atomic>
#include <thread>

#include "services/common/stop_signal.h"

namespace stretto::services {
// Blocks both signals in this thread (and so in every later one) and waits for them in a thread of
// its own: nothing runs in a signal handler.
class Signals {
 public:
  // `stop` outlives this.
  explicit Signals(StopSignal* stop);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Until this is called a signal ends the process at once (exit code 130): nothing has been begun
  // that would need an end. After it the first one requests the stop, the second ends the process.
  void SetGraceful() { graceful_ = true; }

 private:
  void Run();

  StopSignal* stop_;
  std::atomic<bool> graceful_{false};
  std::atomic<bool> ending_{false};
  std::thread thread_;
};
}  // namespace stretto::services
