// Real processes for integration tests: started with their output in a file, ended with the object.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace stretto::testing {
class Process {
 public:
  // `program`: a name in the build's bin folder. Services are given `--exit-with-parent`, so that
  // nothing outlives the test. Output of all lives of a name is appended to `log_file`.
  Process(const std::string& program, std::vector<std::string> arguments, std::string log_file);
  ~Process();  // kill -9, if it still runs
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // kill -9, and waits for the end.
  void Kill();
  // Exit code, or 128 + signal; -1 if it still runs after `timeout_ms`.
  int WaitForExit(int64_t timeout_ms);
  bool IsRunning();
  std::string Log() const;

 private:
  pid_t pid_ = -1;
  int exit_code_ = -1;
  std::string log_file_;
};

// A port that nobody listens at now.
int FreePort();
// Waits until something listens at 127.0.0.1:port, or `process` has ended, or the time is over.
bool WaitForPort(Process& process, int port, int64_t timeout_ms = 20000);
// A TCP connection to 127.0.0.1:port; aborts the test's process if there is none.
class Connection {
 public:
  // `receive_buffer_bytes`: of the kernel, so that a sender soon finds that nobody reads; 0: as is.
  explicit Connection(int port, int receive_buffer_bytes = 0);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  // Sends until all is sent or the other side has closed.
  void Send(const std::string& bytes) const;
  // Until the other side closes.
  std::string ReadAll() const;
  // Nothing more will be sent; nothing will be sent or read.
  void CloseSending() const;
  void CloseAll() const;

 private:
  int fd_;
};
// The answer to GET /path at 127.0.0.1:port, headers included; empty if there is none.
std::string HttpGet(int port, const std::string& path);
// Polls until `condition` holds; false when it doesn't within `timeout_ms`.
template <class Condition>
bool Eventually(const Condition& condition, int64_t timeout_ms = 20000);

void SleepMs(int64_t ms);
int64_t NowMs();

template <class Condition>
bool Eventually(const Condition& condition, int64_t timeout_ms) {
  const int64_t end_ms = NowMs() + timeout_ms;
  while (!condition()) {
    if (NowMs() > end_ms) return false;
    SleepMs(20);
  }
  return true;
}
}  // namespace stretto::testing
