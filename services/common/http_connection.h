// One client of an HttpServer: its socket, what was read and not yet used, what is yet to be
// written. Owned by the server's thread, or by the thread that answers its request; never by both.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "services/common/http_parser.h"

namespace stretto::services {
int64_t HttpNowMs();

class HttpConnection {
 public:
  enum class State {
    kReading,    // a request, or waiting for one
    kWriting,    // an answer that the server's thread gives
    kAnswering,  // waits for a thread that answers, or has one
    kLingering,  // closed for us: lets the client read the answer to what it still sends
  };

  // Takes over the (non-blocking) socket.
  HttpConnection(int fd, const HttpLimits& limits) : parser(limits), fd_(fd) {}
  ~HttpConnection();
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  int fd() const { return fd_; }
  // Neither blocks. False: the client has closed the connection, or its sending half; it is broken.
  bool Receive();
  bool SendPending();
  // Puts an answer behind what is to be written.
  void Queue(const HttpReply& reply);
  bool has_pending() const { return num_sent_ < pending_.size(); }
  // Something has arrived that the parser hasn't seen.
  bool HasUnread() const;

  // Blocks until all is taken. False: the client has gone or is too slow, or `stopping` ends it.
  bool SendAll(absl::string_view bytes, int64_t timeout_ms, const std::atomic<bool>& stopping);
  // The same for an answer, and the chunks of its stream.
  bool SendReply(HttpReply& reply, int64_t timeout_ms, const std::atomic<bool>& stopping);
  // The client has closed the connection, or its sending half.
  bool Gone() const;
  // Nothing will be written any more.
  void ShutDownSending();

  State state = State::kReading;
  HttpParser parser;
  std::string received;  // not yet given to the parser
  HttpRequest request;   // being answered
  bool keep_alive = true, reads_chunks = true, wants_body = true;
  bool has_sent_continue = false;
  int64_t since_ms = 0;     // in this state; kReading: since the request began
  int64_t deadline_ms = 0;  // of this state
  size_t charged_bytes = 0;

 private:
  std::string Head(const HttpReply& reply) const;

  const int fd_;
  std::string pending_;
  size_t num_sent_ = 0;
};
}  // namespace stretto::services
