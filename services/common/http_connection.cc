#include "services/common/http_connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace stretto::services {
namespace {
constexpr size_t kReadBytes = size_t{64} << 10;
constexpr int64_t kTickMs = 100;          // how soon a wait notices the end of the process
constexpr int64_t kLeastBytesPerMs = 16;  // that a client reads of a long answer
constexpr char kLastChunk[] = "0\r\n\r\n";

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

const char* ReasonOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case kHttpClientGone:
      return "Client Closed Request";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Status";
  }
}
}  // namespace

int64_t HttpNowMs() { return Clock::Real().NowNs() / 1'000'000; }

HttpConnection::~HttpConnection() { close(fd_); }

bool HttpConnection::Receive() {
  // A connection that has sent little has little memory.
  thread_local std::array<char, kReadBytes> buffer;
  const ssize_t got = recv(fd_, buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (got > 0) received.append(buffer.data(), static_cast<size_t>(got));
  return got > 0 || (got < 0 && WouldBlock());
}

bool HttpConnection::HasUnread() const {
  char next = 0;
  return !received.empty() || recv(fd_, &next, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

bool HttpConnection::SendPending() {
  while (has_pending()) {
    const ssize_t count = send(fd_, pending_.data() + num_sent_, pending_.size() - num_sent_,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) return WouldBlock();
    num_sent_ += static_cast<size_t>(count);
  }
  pending_.clear();
  num_sent_ = 0;
  return true;
}

std::string HttpConnection::Head(const HttpReply& reply) const {
  std::string head = absl::StrCat("HTTP/1.1 ", reply.status, " ", ReasonOf(reply.status), "\r\n");
  if (reply.status != 204) absl::StrAppend(&head, "Content-Type: ", reply.content_type, "\r\n");
  for (const auto& [name, value] : reply.headers) {
    absl::StrAppend(&head, name, ": ", value, "\r\n");
  }
  if (reply.stream == nullptr) {
    if (reply.status != 204) absl::StrAppend(&head, "Content-Length: ", reply.body.size(), "\r\n");
  } else if (reads_chunks) {
    absl::StrAppend(&head, "Transfer-Encoding: chunked\r\n");
  }
  return absl::StrCat(head, "Connection: ", keep_alive ? "keep-alive" : "close", "\r\n\r\n");
}

void HttpConnection::Queue(const HttpReply& reply) {
  pending_ += Head(reply);
  if (wants_body) pending_ += reply.body;
}

bool HttpConnection::SendAll(absl::string_view bytes, int64_t timeout_ms,
                             const std::atomic<bool>& stopping) {
  const int64_t end_ms =
      HttpNowMs() + timeout_ms + static_cast<int64_t>(bytes.size()) / kLeastBytesPerMs;
  while (!bytes.empty()) {
    const ssize_t count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
      continue;
    }
    if (!WouldBlock()) return false;
    pollfd entry{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (poll(&entry, 1, kTickMs) > 0) continue;
    if (stopping || HttpNowMs() >= end_ms) return false;
  }
  return true;
}

bool HttpConnection::SendReply(HttpReply& reply, int64_t timeout_ms,
                               const std::atomic<bool>& stopping) {
  if (reply.stream != nullptr && !reads_chunks) keep_alive = false;  // its end is the connection's
  const std::string head = Head(reply);
  if (!wants_body) return SendAll(head, timeout_ms, stopping);
  if (reply.stream == nullptr && reply.body.size() <= kReadBytes) {
    return SendAll(absl::StrCat(head, reply.body), timeout_ms, stopping);  // in one packet, perhaps
  }
  if (!SendAll(head, timeout_ms, stopping)) return false;
  if (reply.stream == nullptr) return SendAll(reply.body, timeout_ms, stopping);
  while (const std::optional<std::string> bytes = reply.stream->Next()) {
    if (Gone()) return false;
    if (bytes->empty()) continue;
    const std::string chunk =
        reads_chunks ? absl::StrCat(absl::Hex(bytes->size()), "\r\n", *bytes, "\r\n") : *bytes;
    if (!SendAll(chunk, timeout_ms, stopping)) return false;
  }
  return !reads_chunks || SendAll(kLastChunk, timeout_ms, stopping);
}

bool HttpConnection::Gone() const {
  pollfd entry{.fd = fd_, .events = POLLRDHUP, .revents = 0};
  return poll(&entry, 1, 0) > 0;
}

void HttpConnection::ShutDownSending() { shutdown(fd_, SHUT_WR); }
}  // namespace stretto::services
