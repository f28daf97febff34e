// SIGTERM and SIGINT as a request to stop, SIGHUP as the end of the parent (--exit-with-parent) or
// of the terminal. SIGPIPE is ignored.
#pragma once

#include <atomic>
#include <thread>

#include "services/common/stop_signal.h"

namespace stretto::services {
// Blocks the signals in this thread (and so in every later one) and waits for them in a thread of
// its own: nothing runs in a signal handler.
class Signals {
 public:
  // `stop` outlives this.
  explicit Signals(StopSignal* stop);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Until this is called a signal ends the process at once (exit code 130): nothing has been begun
  // that would need an end. After it SIGTERM and SIGINT request the stop, and the second of them
  // ends the process. SIGHUP requests it too, and ends the process if that takes more than 10 s.
  void SetGraceful() { graceful_ = true; }
  // SIGINT is ignored from now on: Ctrl-C goes to all processes of a terminal, and a parent that
  // stops its children in order must be the only one that heeds it.
  void IgnoreInterrupt() { ignore_interrupt_ = true; }

 private:
  void Run();

  StopSignal* stop_;
  std::atomic<bool> graceful_{false};
  std::atomic<bool> ignore_interrupt_{false};
  std::atomic<bool> ending_{false};
  std::thread thread_;
};
}  // namespace stretto::services
