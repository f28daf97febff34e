#include "tests/integration/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"

namespace stretto::testing {
namespace {
sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}
}  // namespace

Process::Process(const std::string& program, std::vector<std::string> arguments,
                 std::string log_file)
    : log_file_(std::move(log_file)) {
  arguments.insert(arguments.begin(), absl::StrCat(STRETTO_BINARY_DIR, "/bin/", program));
  if (program != "stretto") arguments.push_back(absl::StrCat("--exit-with-parent=", getpid()));
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const int log = open(log_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  STRETTO_CHECK(log >= 0);
  pid_ = fork();
  STRETTO_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(log);
}

Process::~Process() { Kill(); }

Process::Process(Process&& other) noexcept { *this = std::move(other); }
Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(exit_code_, other.exit_code_);
  std::swap(log_file_, other.log_file_);
  return *this;
}

void Process::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

void Process::Kill() {
  if (!IsRunning()) return;
  Signal(SIGKILL);
  WaitForExit(10000);
}

bool Process::IsRunning() { return pid_ > 0 && WaitForExit(0) < 0; }

int Process::WaitForExit(int64_t timeout_ms) {
  if (pid_ <= 0) return exit_code_;
  const int64_t end_ms = NowMs() + timeout_ms;
  while (true) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return exit_code_;
    }
    if (NowMs() >= end_ms) return -1;
    SleepMs(5);
  }
}

std::string Process::Log() const {
  std::ifstream file(log_file_);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

int FreePort() {
  // Below the range from which the system serves port 0, so that nobody is given it meanwhile.
  constexpr int kFirst = 18000, kNum = 14000;
  static int next = static_cast<int>(getpid()) * 37 % kNum;
  for (int i = 0; i < kNum; ++i) {
    const int port = kFirst + (next++ % kNum);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = Loopback(port);
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (is_free) return port;
  }
  STRETTO_CHECK(false);
  return -1;
}

bool WaitForPort(Process& process, int port, int64_t timeout_ms) {
  return Eventually(
             [&] {
               const int fd = ConnectTo(port);
               if (fd >= 0) close(fd);
               return fd >= 0 || !process.IsRunning();
             },
             timeout_ms) &&
         process.IsRunning();
}

Connection::Connection(int port, int receive_buffer_bytes) : fd_(ConnectTo(port)) {
  STRETTO_CHECK(fd_ >= 0);
  if (receive_buffer_bytes == 0) return;
  setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof(receive_buffer_bytes));
}
Connection::~Connection() { close(fd_); }

void Connection::Send(const std::string& bytes) const {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return;
    sent += static_cast<size_t>(count);
  }
}

std::string Connection::ReadAll() const {
  std::string bytes;
  char buffer[65536];
  ssize_t got = 0;
  while ((got = recv(fd_, buffer, sizeof(buffer), 0)) > 0) {
    bytes.append(buffer, static_cast<size_t>(got));
  }
  return bytes;
}

void Connection::CloseSending() const { shutdown(fd_, SHUT_WR); }
void Connection::CloseAll() const { shutdown(fd_, SHUT_RDWR); }

std::string HttpGet(int port, const std::string& path) {
  const int fd = ConnectTo(port);
  if (fd < 0) return "";
  const std::string request =
      absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  std::string answer;
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
    char buffer[65536];
    ssize_t got = 0;
    while ((got = recv(fd, buffer, sizeof(buffer), 0)) > 0) answer.append(buffer, got);
  }
  close(fd);
  return answer;
}

void SleepMs(int64_t ms) { Clock::Real().SleepNs(ms * 1'000'000); }
int64_t NowMs() { return Clock::Real().NowNs() / 1'000'000; }
}  // namespace stretto::testing
