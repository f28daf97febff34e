// Reads one HTTP/1.1 request (RFC 9112) from bytes as they come. Strict where leniency would let
// two readers disagree on where a request ends: lines end with CRLF, a body has one length (a
// number, or chunks, never both) and is read whole whatever the method; every part has a limit.
//
// Pure: no socket, no clock. One object a connection, used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "services/common/http_message.h"

namespace stretto::services {
struct HttpLimits {
  size_t max_head_bytes = size_t{16} << 10;  // request line and headers; trailers the same
  size_t max_headers = 100;
  size_t max_body_bytes = size_t{8} << 20;
};

class HttpParser {
 public:
  enum class State { kHead, kBody, kDone, kRefused };

  explicit HttpParser(const HttpLimits& limits) : limits_(limits) {}

  // Takes bytes from the front of `data` and returns how many: all, unless the request ends before
  // or is refused.
  size_t Feed(absl::string_view data);

  State state() const { return state_; }
  bool started() const { return started_; }  // a byte of the request has come
  size_t body_bytes() const { return request_.body.size(); }
  // kRefused: the status to answer with, and why. Where the next request would begin isn't known.
  int refusal_status() const { return refusal_status_; }
  const std::string& refusal() const { return refusal_; }
  // From kBody on: the client waits for "100 Continue" before it sends the body.
  bool expects_continue() const { return expects_continue_; }
  // kDone: whether the connection may go on afterwards; whether the client reads chunks.
  bool keep_alive() const { return keep_alive_; }
  bool reads_chunks() const { return minor_version_ > 0; }
  // kDone: the request. The parser then waits for the next one.
  HttpRequest Take();

 private:
  enum class Part { kHead, kSized, kChunkSize, kChunkData, kChunkEnd, kTrailers };

  size_t FeedHead(absl::string_view data);
  size_t FeedSized(absl::string_view data);
  size_t FeedLine(absl::string_view data);
  void EndOfLine();
  void ReadHead();
  bool ReadRequestLine(absl::string_view line);
  bool ReadTarget(absl::string_view target);
  bool ReadHeader(absl::string_view line);
  bool ReadMeaning();
  bool ReadBodyLength();
  void BeginChunk();
  // Always false.
  bool Refuse(int status, absl::string_view reason);

  HttpLimits limits_;
  State state_ = State::kHead;
  Part part_ = Part::kHead;
  bool started_ = false;
  int num_blanks_ = 0;  // bytes of empty lines before the request
  std::string head_;    // the head; then a line between chunks
  size_t num_trailer_bytes_ = 0;
  uint64_t left_ = 0;  // bytes of the body, or of the chunk
  int minor_version_ = 1;
  bool expects_continue_ = false, keep_alive_ = false;
  HttpRequest request_;
  int refusal_status_ = 0;
  std::string refusal_;
};
}  // namespace stretto::services
