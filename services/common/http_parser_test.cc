// Requests as bytes, cut anywhere, whole or broken.
#include "services/common/http_parser.h"

#include <catch2/catch.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/testing.h"

namespace stretto::services {
namespace {
using State = HttpParser::State;
const HttpLimits kLimits{.max_head_bytes = 400, .max_headers = 8, .max_body_bytes = 100};

struct Parsed {
  State state = State::kHead;
  int status = 0;
  bool keep_alive = false;
  HttpRequest request;
  size_t used = 0;
};

// Fed in pieces of `size`.
Parsed Parse(const std::string& bytes, size_t size) {
  HttpParser parser(kLimits);
  Parsed parsed;
  while (parsed.used < bytes.size() &&
         (parser.state() == State::kHead || parser.state() == State::kBody)) {
    const std::string piece = bytes.substr(parsed.used, size);
    const size_t used = parser.Feed(piece);
    REQUIRE((used == piece.size() || parser.state() == State::kDone ||
             parser.state() == State::kRefused));
    parsed.used += used;
  }
  parsed.state = parser.state();
  parsed.status = parser.refusal_status();
  parsed.keep_alive = parser.keep_alive();
  if (parsed.state == State::kDone) parsed.request = parser.Take();
  return parsed;
}

// The same however it is cut.
Parsed Parse(const std::string& bytes) {
  const Parsed whole = Parse(bytes, bytes.size() + 1);
  for (const size_t size : {1, 2, 3, 7}) {
    const Parsed cut = Parse(bytes, size);
    INFO(bytes << " in pieces of " << size);
    CHECK(cut.state == whole.state);
    CHECK(cut.status == whole.status);
    CHECK(cut.used == whole.used);
    CHECK(cut.request.body == whole.request.body);
    CHECK(cut.request.headers == whole.request.headers);
  }
  return whole;
}

int StatusOf(const std::string& bytes) {
  const Parsed parsed = Parse(bytes);
  return parsed.state == State::kRefused ? parsed.status : parsed.state == State::kDone ? 200 : 0;
}
}  // namespace

TEST_CASE("a request is read as it is, and nothing behind it") {
  const std::string head = "POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Y:\t z \r\n";
  const std::string bytes = head + "Content-Length: 5\r\n\r\nhello";
  const Parsed parsed = Parse("\r\n" + bytes + "GET /");
  REQUIRE(parsed.state == State::kDone);
  CHECK(parsed.used == bytes.size() + 2);
  CHECK(parsed.keep_alive);
  CHECK(parsed.request.method == "POST");
  CHECK(parsed.request.path == "/a b");
  CHECK(parsed.request.Header("x-y") == "z");
  CHECK(parsed.request.body == "hello");
  const Parsed chunked = Parse(
      head + "Transfer-Encoding: Chunked\r\n\r\n3\r\nhel\r\n02;a=b\r\nlo\r\n0\r\nT: u\r\n\r\nGET");
  REQUIRE(chunked.state == State::kDone);
  CHECK(chunked.request.body == "hello");
  CHECK(!Parse("GET / HTTP/1.0\r\n\r\n").keep_alive);
  CHECK(Parse("GET / HTTP/1.0\r\nConnection: x, Keep-Alive\r\n\r\n").keep_alive);
  CHECK(!Parse("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").keep_alive);
  CHECK(Parse("GET http://x/y HTTP/1.1\r\nHost: x\r\n\r\n").request.path == "/y");
}

TEST_CASE("limits count every byte") {
  const std::string head = "GET / HTTP/1.1\r\nHost: x\r\n";
  CHECK(StatusOf(head + "X: " + std::string(300, 'x') + "\r\n\r\n") == 200);
  CHECK(StatusOf(head + "X: " + std::string(400, 'x')) == 431);
  CHECK(StatusOf("GET /" + std::string(400, 'x')) == 414);
  std::string many;
  for (int i = 0; i < 7; ++i) many += "a: b\r\n";
  CHECK(StatusOf(head + many + "\r\n") == 200);
  CHECK(StatusOf(head + many + "a: b\r\n\r\n") == 431);
  CHECK(StatusOf(head + "Content-Length: 101\r\n\r\n") == 413);
  CHECK(StatusOf(head + "Content-Length: 100\r\n\r\n" + std::string(100, 'x')) == 200);
  const std::string chunked = head + "Transfer-Encoding: chunked\r\n\r\n";
  const std::string sixty = "3c\r\n" + std::string(60, 'x') + "\r\n";
  CHECK(StatusOf(chunked + sixty + "0\r\n\r\n") == 200);
  CHECK(StatusOf(chunked + sixty + sixty) == 413);
  for (const char* blank : {" ", "\t", "  "}) {
    CHECK(StatusOf(chunked + blank + sixty + "0\r\n\r\n") == 400);
    CHECK(StatusOf(chunked + blank + "0\r\n\r\n") == 400);
  }
  CHECK(StatusOf(chunked + "0 ;a=b\r\n\r\n") == 200);
  CHECK(StatusOf(chunked + "7fffffffffffffff\r\n") == 400);
  CHECK(StatusOf(chunked + "7ffffffffffffff\r\n") == 413);
  CHECK(StatusOf(chunked + "1" + std::string(300, ' ')) == 400);
  CHECK(StatusOf(chunked + "0\r\n" + std::string(401, 'x')) == 400);
  CHECK(StatusOf("\r\n\r\n\r\n") == 400);
}

TEST_CASE("a length that is given twice is named as it was given") {
  const auto reason = [](const std::string& headers) {
    HttpParser parser(kLimits);
    parser.Feed("POST / HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n");
    CHECK(parser.refusal_status() == 400);
    return parser.refusal().substr(parser.refusal().find('('));
  };
  const std::string length = "Content-Length: 5\r\n", chunked = "Transfer-Encoding: chunked\r\n";
  CHECK(reason(length + length) == "(Content-Length)");
  CHECK(reason(chunked + chunked) == "(Transfer-Encoding)");
  CHECK(reason(length + chunked) == "(Content-Length, Transfer-Encoding)");
}

TEST_CASE("whatever bytes come, the parser neither reads beyond them nor goes on after an end") {
  const uint64_t seed = testing::Seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  const std::vector<std::string> parts = {"GET",
                                          "POST",
                                          " ",
                                          "/",
                                          "/a%41",
                                          "%",
                                          " HTTP/1.1",
                                          "\r\n",
                                          "\r",
                                          "\n",
                                          "Host: x\r\n",
                                          "Content-Length: ",
                                          "5",
                                          "-1",
                                          "Transfer-Encoding: chunked\r\n",
                                          "0\r\n\r\n",
                                          "hello",
                                          ":",
                                          std::string(1, '\0'),
                                          "\xff",
                                          "Expect: 100-continue\r\n",
                                          "Connection: close\r\n",
                                          ";",
                                          "\t"};
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = random() % 2 ? "POST / HTTP/1.1\r\nHost: x\r\n" : "";
    for (uint64_t n = random() % 20; n > 0; --n) bytes += parts[random() % parts.size()];
    const Parsed whole = Parse(bytes, bytes.size() + 1);
    const Parsed cut = Parse(bytes, 1 + random() % 5);
    const bool same = whole.state == cut.state && whole.status == cut.status &&
                      whole.used == cut.used && whole.request.body == cut.request.body;
    if (same) continue;
    INFO(bytes);
    CHECK(same);
  }
}
}  // namespace stretto::services
