// A request and an answer of HTTP, as handlers see them. Plain values; no socket.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace stretto::services {
using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;   // as sent: methods are told apart by case
  std::string path;     // without the query, percent escapes decoded
  HttpHeaders headers;  // names in lower case, in the order of the request
  std::string body;
  // Asked now and then: whether the client has gone, or has closed its sending half. Work for it
  // then ends.
  std::function<bool()> gone = [] { return false; };

  // The first header of that (lower case) name; empty if there is none.
  absl::string_view Header(absl::string_view name) const {
    for (const auto& [key, value] : headers) {
      if (key == name) return value;
    }
    return "";
  }
};

// A body that grows. Destroying it ends the work behind it.
class BodyStream {
 public:
  virtual ~BodyStream() = default;
  // What is new; empty if nothing came within a short while; nothing at the end.
  virtual std::optional<std::string> Next() = 0;
};

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;
  std::string body;
  std::unique_ptr<BodyStream> stream;  // instead of `body`
};

// What a client is told that has gone, which one that has closed only its sending half can read.
// No number of HTTP's: that of nginx, which metrics and their readers know.
inline constexpr int kHttpClientGone = 499;

// Who answers. Thread-safe.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  virtual HttpReply Handle(const HttpRequest& request) = 0;
  // The answer to what never became a request (broken HTTP, a body too large), or found no room.
  virtual HttpReply Refuse(int status, const std::string& message) = 0;
  // Whether Handle() answers this at once, without waiting for anything and without a stream. It is
  // then answered by the thread that serves all connections, however busy the others are.
  virtual bool IsQuick(const HttpRequest& request) const = 0;
};
}  // namespace stretto::services
