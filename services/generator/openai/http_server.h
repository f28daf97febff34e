// HTTP/1.1 in front of an OpenAiApi. Each connection has a thread of its own, up to a limit beyond
// which connections wait to be accepted; whoever sends or reads too slowly is cut off, so that no
// client can hold up another. The only file that includes the HTTP library is http_server.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace stretto::services {
class OpenAiApi;

struct HttpServerOptions {
  std::string bind = "127.0.0.1";
  int port = 0;  // 0: a free one
  size_t max_body_bytes = size_t{8} << 20;
  int max_connections = 256;
  int64_t request_timeout_ms = 30'000;     // for a request to arrive
  int64_t write_timeout_ms = 10'000;       // without a byte taken by the client
  int64_t keep_alive_timeout_ms = 30'000;  // between two requests of a connection
};

class HttpServer {
 public:
  // Serves at once. UNAVAILABLE: the port can't be had. `api` outlives the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(OpenAiApi* api,
                                                           const HttpServerOptions& options);
  virtual ~HttpServer() = default;
  virtual int port() const = 0;
  // Takes no more connections; returns when those that are open have ended. Streams end where they
  // are; answers that are still computed are waited for.
  virtual void Stop() = 0;
};
}  // namespace stretto::services
