#include "engine/collectives/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr int64_t kRetryNs = 20'000'000;
constexpr uint32_t kMaxMessageBytes = 1u << 20;

std::string ErrorText() { return std::strerror(errno); }

absl::Status WaitFor(int fd, short events, DeadlineNs deadline) {
  pollfd p{fd, events, 0};
  for (;;) {
    const int ready = poll(&p, 1, PollMs(deadline));
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return absl::DeadlineExceededError("no answer within the time given");
    if (errno != EINTR) return absl::InternalError(absl::StrCat("poll: ", ErrorText()));
  }
}

void MakeReady(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // bbr takes the delays of busy processors for the path's, and all but stops while ranks compute.
  char control[16] = "";
  socklen_t size = sizeof(control);
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &size) == 0 &&
      absl::string_view(control).substr(0, 3) == "bbr") {
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);  // where there is none, bbr it is
  }
}

struct AddressFree {
  void operator()(addrinfo* a) const { freeaddrinfo(a); }
};
using AddressList = std::unique_ptr<addrinfo, AddressFree>;

absl::StatusOr<AddressList> Resolve(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat(host, ":", port, ": ", gai_strerror(error)));
  }
  return AddressList(list);
}

int PortOf(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  char port[16] = "0";
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, port, sizeof(port),
              NI_NUMERICSERV);
  return std::atoi(port);
}

// One try.
absl::StatusOr<Socket> ConnectOnce(const addrinfo& a, DeadlineNs deadline) {
  Socket s(socket(a.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!s.open()) return absl::InternalError(absl::StrCat("socket: ", ErrorText()));
  MakeReady(s.fd());
  if (connect(s.fd(), a.ai_addr, a.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return absl::UnavailableError(ErrorText());
    RETURN_IF_ERROR(WaitFor(s.fd(), POLLOUT, deadline));
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return absl::UnavailableError(std::strerror(error));
  }
  return s;
}
}  // namespace

DeadlineNs AfterNs(int64_t duration_ns) { return Clock::Real().NowNs() + duration_ns; }

int PollMs(DeadlineNs deadline) {
  const int64_t left = deadline - Clock::Real().NowNs();
  return static_cast<int>(std::clamp<int64_t>((left + 999'999) / 1'000'000, 0, 1'000'000));
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Socket::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

absl::Status Socket::SendAll(absl::Span<const uint8_t> bytes, DeadlineNs deadline) const {
  while (!bytes.empty()) {
    const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      RETURN_IF_ERROR(WaitFor(fd_, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("connection lost: ", ErrorText()));
    }
  }
  return absl::OkStatus();
}

absl::Status Socket::ReceiveAll(absl::Span<uint8_t> bytes, DeadlineNs deadline) const {
  while (!bytes.empty()) {
    const ssize_t n = recv(fd_, bytes.data(), bytes.size(), 0);
    if (n > 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (n == 0) {
      return absl::UnavailableError("the other side closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      RETURN_IF_ERROR(WaitFor(fd_, POLLIN, deadline));
    } else if (errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("connection lost: ", ErrorText()));
    }
  }
  return absl::OkStatus();
}

absl::Status Socket::AwaitReadable(DeadlineNs deadline) const {
  return WaitFor(fd_, POLLIN, deadline);
}

absl::Status Socket::SendMessage(const std::string& message, DeadlineNs deadline) const {
  const auto size = static_cast<uint32_t>(message.size());
  std::vector<uint8_t> bytes(sizeof(size) + message.size());
  std::memcpy(bytes.data(), &size, sizeof(size));
  std::memcpy(bytes.data() + sizeof(size), message.data(), message.size());
  return SendAll(bytes, deadline);
}

absl::StatusOr<std::string> Socket::ReceiveMessage(DeadlineNs deadline) const {
  uint32_t size = 0;
  RETURN_IF_ERROR(ReceiveAll({reinterpret_cast<uint8_t*>(&size), sizeof(size)}, deadline));
  if (size > kMaxMessageBytes) return absl::InvalidArgumentError("not a message of a group");
  std::string message(size, '\0');
  RETURN_IF_ERROR(ReceiveAll({reinterpret_cast<uint8_t*>(message.data()), size}, deadline));
  return message;
}

absl::StatusOr<Listener> Listener::Open(const std::string& host, int port) {
  const std::string where = absl::StrCat(host, ":", port);
  ASSIGN_OR_RETURN(const AddressList list, Resolve(host, absl::StrCat(port), AI_PASSIVE));
  Listener listener;
  listener.socket_ = Socket(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int fd = listener.fd(), on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd < 0 || bind(fd, list->ai_addr, list->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
    return absl::UnavailableError(absl::StrCat("can't listen at ", where, ": ", ErrorText()));
  }
  MakeReady(fd);
  listener.address_ = absl::StrCat(host, ":", PortOf(fd));
  return listener;
}

absl::StatusOr<Socket> Listener::Accept(DeadlineNs deadline) const {
  for (;;) {
    const int fd = accept4(this->fd(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) {
      MakeReady(fd);
      return Socket(fd);
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      RETURN_IF_ERROR(WaitFor(this->fd(), POLLIN, deadline));
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return absl::UnavailableError(absl::StrCat("accept at ", address_, ": ", ErrorText()));
    }
  }
}

absl::StatusOr<Socket> ConnectTo(const std::string& address, DeadlineNs deadline) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is not host:port"));
  }
  const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  for (;;) {
    ASSIGN_OR_RETURN(const AddressList list, Resolve(host, port, 0));
    absl::StatusOr<Socket> s = ConnectOnce(*list, deadline);
    if (s.ok()) return s;
    if (PollMs(deadline) == 0) {
      return absl::UnavailableError(
          absl::StrCat("can't connect to ", address, ": ", s.status().message()));
    }
    Clock::Real().SleepNs(kRetryNs);
  }
}

void MessageWriter::Add(int64_t value) {
  text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void MessageWriter::Add(absl::string_view value) {
  Add(static_cast<int64_t>(value.size()));
  absl::StrAppend(&text_, value);
}

int64_t MessageReader::Integer() {
  int64_t value = 0;
  if (rest_.size() < sizeof(value)) {
    ok_ = false;
    return 0;
  }
  std::memcpy(&value, rest_.data(), sizeof(value));
  rest_.remove_prefix(sizeof(value));
  return value;
}

std::string MessageReader::String() {
  const int64_t size = Integer();
  if (size < 0 || size > static_cast<int64_t>(rest_.size())) {
    ok_ = false;
    return "";
  }
  std::string value(rest_.substr(0, static_cast<size_t>(size)));
  rest_.remove_prefix(static_cast<size_t>(size));
  return value;
}
}  // namespace stretto::engine
