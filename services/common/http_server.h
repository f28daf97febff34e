// HTTP/1.1 in front of an HttpHandler, made for clients that mean harm. It reads requests itself
// rather than through a library: the distribution's (cpp-httplib 0.11) bounds neither chunked
// bodies nor the number of headers, leaves a GET's body to be read as the next request, and gives
// each connection a thread, so that idle ones lock out everybody.
//
//   one thread: accept ─► read requests ─► quick ones answered at once ─► write
//                              │                                            ▲ back, for the next
//                              one └─► others wait in order ─► a thread each, up to a limit
//
// A connection that sends nothing, or sends or reads too slowly, costs a descriptor and its buffer
// until its time is over; where descriptors get scarce, the one that has been idle longest goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/common/http_parser.h"

namespace stretto::services {
struct HttpServerOptions {
  std::string bind = "127.0.0.1";
  int port = 0;  // 0: a free one
  HttpLimits limits;
  // At most half of the descriptors that the process may have. One more: an idle connection is
  // closed for it, or if none is, it is told 503.
  size_t max_connections = 1024;
  size_t max_running = 256;  // requests with a thread; more wait their turn
  // Of bodies that are read or in use, beyond the first 64 KiB of each; what finds no room is told
  // 503.
  size_t max_buffered_bytes = size_t{256} << 20;
  int64_t head_timeout_ms = 10'000;        // for a request's head, from its first byte
  int64_t request_timeout_ms = 30'000;     // for the whole request
  int64_t write_timeout_ms = 10'000;       // for an answer, and a second more for each 16 KiB
  int64_t keep_alive_timeout_ms = 30'000;  // between two requests
};

class HttpServer {
 public:
  // Serves at once. UNAVAILABLE: the port can't be had. `handler` outlives the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpHandler* handler,
                                                           const HttpServerOptions& options);
  virtual ~HttpServer() = default;
  virtual int port() const = 0;
  // Stop() comes soon: answers from now on say that their connection ends with them. Any thread.
  virtual void AnnounceEnd() = 0;
  // Takes no more connections; returns when those that are open have ended. Streams end where they
  // are; answers that are still computed are waited for.
  virtual void Stop() = 0;
};
}  // namespace stretto::services
