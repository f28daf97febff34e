// Non-blocking TCP sockets with deadlines, for handshakes and for the mesh of a group. Errors are
// statuses that name the address; a write to a closed connection raises no signal.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace stretto::engine {
// Monotonic nanoseconds at which a wait ends.
using DeadlineNs = int64_t;
DeadlineNs AfterNs(int64_t duration_ns);
// Milliseconds until then for poll(), rounded up; 0 when it is over.
int PollMs(DeadlineNs deadline);

// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { Close(); }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void Close();

  // Blocks until all is sent or received, or DEADLINE_EXCEEDED, or UNAVAILABLE.
  absl::Status SendAll(absl::Span<const uint8_t> bytes, DeadlineNs deadline) const;
  absl::Status ReceiveAll(absl::Span<uint8_t> bytes, DeadlineNs deadline) const;
  // Until there is something to receive, or the connection's end.
  absl::Status AwaitReadable(DeadlineNs deadline) const;
  // A message of at most 1 MiB, after its length in four bytes.
  absl::Status SendMessage(const std::string& message, DeadlineNs deadline) const;
  absl::StatusOr<std::string> ReceiveMessage(DeadlineNs deadline) const;

 private:
  int fd_ = -1;
};

// Listens at one address.
class Listener {
 public:
  // `host`: an address of this machine ("127.0.0.1", "::1") or a name; port 0: any free one.
  static absl::StatusOr<Listener> Open(const std::string& host, int port = 0);
  const std::string& address() const { return address_; }  // "host:port"
  int fd() const { return socket_.fd(); }
  // Blocks until somebody connects.
  absl::StatusOr<Socket> Accept(DeadlineNs deadline) const;

 private:
  Socket socket_;
  std::string address_;
};

// Tries again until something listens at `address` ("host:port") or the time is over.
absl::StatusOr<Socket> ConnectTo(const std::string& address, DeadlineNs deadline);

// Fields of handshake messages: integers as eight bytes, strings after their length.
class MessageWriter {
 public:
  void Add(int64_t value);
  void Add(absl::string_view value);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};
class MessageReader {
 public:
  explicit MessageReader(absl::string_view text) : rest_(text) {}
  // 0 or "" once the message has ended before its fields: see ok().
  int64_t Integer();
  std::string String();
  // All fields were there and nothing is left.
  bool ok() const { return ok_ && rest_.empty(); }

 private:
  absl::string_view rest_;
  bool ok_ = true;
};
}  // namespace stretto::engine
