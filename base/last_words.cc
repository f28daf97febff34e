#include "base/last_words.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>

namespace stretto {
namespace {
const char* program_name = "stretto";
int exit_code_of_files = 1;

// A signal handler reads them: no lock. More mappings than places go unnamed.
struct Mapping {
  std::atomic<const uint8_t*> begin{nullptr};
  std::atomic<size_t> size{0};
  std::atomic<const char*> path{nullptr};
};
std::array<Mapping, 256> mappings;

// Async-signal-safe.
void Say(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

const char* PathAt(const void* address) {
  const auto* at = static_cast<const uint8_t*>(address);
  for (const Mapping& m : mappings) {
    const uint8_t* begin = m.begin.load();
    if (begin != nullptr && at >= begin && at < begin + m.size.load()) return m.path.load();
  }
  return nullptr;
}

void OnBusError(int number, siginfo_t* info, void*) {
  const char* path = PathAt(info->si_addr);
  if (path == nullptr) {
    (void)signal(number, SIG_DFL);  // the instruction is met again
    return;
  }
  Say(program_name);
  Say(": ");
  Say(path);
  Say(": became shorter, or couldn't be read, while it was in use: put it in place whole (write it "
      "under another name, then rename it), and start again\n");
  _exit(exit_code_of_files);
}

[[noreturn]] void Give(const char* what, const char* why) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s (%s)\n", program_name, what, why);
  _exit(1);
}

[[noreturn]] void OnTerminate() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::bad_alloc& e) {
    Give(
        "there is no memory left for what was asked: give the process more (ulimit -v, the "
        "container's limit), or let it hold less (--kv-cache-mb, fewer requests at once)",
        e.what());
  } catch (const std::system_error& e) {
    if (e.code() == std::errc::resource_unavailable_try_again) {
      Give(
          "no more threads can be started: raise the limit (ulimit -u, the container's pids), or "
          "ask for fewer (--threads)",
          e.what());
    }
    std::fprintf(stderr, "%s: %s\n", program_name, e.what());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", program_name, e.what());
  } catch (...) {
  }
  std::abort();
}
}  // namespace

void InstallLastWords(const char* program, int file_exit_code) {
  program_name = program;
  exit_code_of_files = file_exit_code;
  std::set_terminate(OnTerminate);
  struct sigaction action {};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  (void)sigaction(SIGBUS, &action, nullptr);
}

void NoteMapping(const void* begin, size_t size, const char* path) {
  for (Mapping& m : mappings) {
    const uint8_t* free = nullptr;
    if (!m.begin.compare_exchange_strong(free, static_cast<const uint8_t*>(begin))) continue;
    m.path.store(path);
    m.size.store(size);
    return;
  }
}

void ForgetMapping(const void* begin) {
  for (Mapping& m : mappings) {
    if (m.begin.load() != begin) continue;
    m.size.store(0);
    m.path.store(nullptr);
    m.begin.store(nullptr);
    return;
  }
}
}  // namespace stretto
