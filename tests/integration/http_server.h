// A generator with its OpenAI-compatible API, as a process of its own, for tests that speak HTTP to
// it over sockets of theirs.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
using Json = nlohmann::json;

struct Answer {
  int status = 0;  // 0: none
  std::string headers, body;
  Json json() const { return Json::parse(body, nullptr, false); }
};

// The data of a chunked body.
inline std::string Unchunk(const std::string& raw) {
  std::string body;
  size_t at = 0;
  while (at < raw.size()) {
    const size_t line_end = raw.find("\r\n", at);
    if (line_end == std::string::npos) break;
    const size_t size = std::strtoul(raw.c_str() + at, nullptr, 16);
    if (size == 0) break;
    body += raw.substr(line_end + 2, size);
    at = line_end + 2 + size + 2;
  }
  return body;
}

inline Answer Parse(const std::string& raw) {
  Answer answer;
  const size_t end = raw.find("\r\n\r\n");
  if (end == std::string::npos || !absl::StartsWith(raw, "HTTP/1.1 ")) return answer;
  answer.status = std::atoi(raw.c_str() + 9);
  answer.headers = raw.substr(0, end);
  answer.body = raw.substr(end + 4);
  if (absl::StrContains(answer.headers, "chunked")) answer.body = Unchunk(answer.body);
  return answer;
}

inline std::string RawPost(const std::string& path, const std::string& body) {
  return absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                      "Content-Type: application/json\r\nContent-Length: ", body.size(), "\r\n\r\n",
                      body);
}

struct HttpServer {
  explicit HttpServer(std::vector<std::string> more = {})
      : port(FreePort()), http_port(FreePort()) {
    WriteTestModel(folder.File("model"));
    std::vector<std::string> arguments = {"--model",
                                          folder.File("model"),
                                          "--port",
                                          absl::StrCat(port),
                                          "--dtype",
                                          "bf16",
                                          "--threads",
                                          "1",
                                          "--kv-cache-mb",
                                          "16",
                                          "--http-port",
                                          absl::StrCat(http_port),
                                          "--served-model-name",
                                          "policy"};
    if (std::find(more.begin(), more.end(), "--chat-format") == more.end()) {
      more.insert(more.end(), {"--chat-format", "none"});
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    process = std::make_unique<Process>("stretto-generator", arguments, folder.File("log"));
    const bool up = WaitForPort(*process, port);
    INFO(process->Log());
    REQUIRE(up);
  }
  Answer Get(const std::string& path) const { return Parse(HttpGet(http_port, path)); }
  Answer Post(const std::string& path, const std::string& body) const {
    Connection connection(http_port);
    connection.Send(RawPost(path, body));
    return Parse(connection.ReadAll());
  }
  // The answer to bytes as they are, until the server closes the connection.
  Answer Raw(const std::string& bytes) const {
    Connection connection(http_port);
    connection.Send(bytes);
    return Parse(connection.ReadAll());
  }
  Answer Complete(const Json& body) const { return Post("/v1/completions", body.dump()); }
  Answer Chat(const Json& body) const { return Post("/v1/chat/completions", body.dump()); }
  v1::GeneratorStatus Status() const {
    const auto stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", port));
    CallContext context;
    v1::GeneratorStatus status;
    REQUIRE(stub->GetGeneratorStatus(&context, {}, &status).ok());
    return status;
  }
  bool IsIdle() const {
    const v1::GeneratorStatus status = Status();
    return status.num_running() == 0 && status.num_queued() == 0;
  }

  TempDir folder;
  int port, http_port;
  std::unique_ptr<Process> process;
};
}  // namespace stretto::testing
