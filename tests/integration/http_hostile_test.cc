// Clients that mean harm, or are merely broken, against the generator's HTTP port: whatever they
// send or leave out, they are told so with the right status, and nobody else waits for them.
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "absl/strings/str_split.h"
#include "tests/integration/http_server.h"

namespace stretto::testing {
namespace {
constexpr char kBody[] = R"({"prompt": "1", "max_tokens": 2})";
constexpr char kHead[] = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";

std::string Sized(const std::string& headers, const std::string& body) {
  return absl::StrCat(kHead, headers, "Content-Length: ", body.size(), "\r\n\r\n", body);
}
std::string Chunked(const std::string& chunks) {
  return absl::StrCat(kHead, "Transfer-Encoding: chunked\r\n\r\n", chunks);
}
std::string Chunk(const std::string& data) {
  return absl::StrCat(absl::Hex(data.size()), "\r\n", data, "\r\n");
}

// Every error has a JSON body, whoever made it.
void CheckError(const Answer& answer, int status) {
  INFO(answer.headers << "\n" << answer.body.substr(0, 500));
  CHECK(answer.status == status);
  CHECK(answer.body.size() < 2000);
  const Json json = answer.json();
  REQUIRE(json.is_object());
  REQUIRE(json["error"]["message"].is_string());
  CHECK(!json["error"]["message"].get<std::string>().empty());
}

// How often `code` was answered.
double Answered(const HttpServer& server, const std::string& code) {
  const std::string name = absl::StrCat("stretto_http_requests_total{code=\"", code, "\"} ");
  const std::string metrics = server.Get("/metrics").body;
  const size_t at = metrics.find(name);
  return at == std::string::npos ? 0 : std::atof(metrics.c_str() + at + name.size());
}
}  // namespace

TEST_CASE("where a request ends is never in doubt") {
  HttpServer server;
  SECTION("lengths that aren't one number") {
    for (const char* length : {"abc", "-1", "+5", "0x10", "5, 5", "", " ", "1e3",
                               "99999999999999999999", "9223372036854775808"}) {
      INFO(length);
      CheckError(server.Raw(absl::StrCat(kHead, "Content-Length: ", length, "\r\n\r\n", kBody)),
                 400);
    }
    CheckError(server.Raw(Sized("Content-Length: 5\r\n", kBody)), 400);
    CheckError(server.Raw(Sized("Transfer-Encoding: chunked\r\n", kBody)), 400);
    CheckError(server.Raw(absl::StrCat(kHead, "Transfer-Encoding: chunked\r\n",
                                       "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")),
               400);
    CheckError(server.Raw(absl::StrCat(kHead, "Transfer-Encoding: gzip\r\n\r\n")), 501);
    CheckError(server.Raw(absl::StrCat(kHead, "Content-Length: 9000000\r\n\r\n")), 413);
  }
  SECTION("chunks, in order and not") {
    CHECK(server.Raw(Chunked(Chunk(kBody) + "0\r\n\r\n")).status == 200);
    CHECK(server.Raw(Chunked("A;x=y\r\n{\"prompt\":\r\n7\r\n \"1\"  }\r\n0\r\nT: u\r\n\r\n"))
              .status == 200);
    for (const char* bad : {"5\nhello", "5\r\nhelloworld\r\n", "-5\r\n", "g\r\n", "\r\n",
                            "fffffffffffffffff\r\n", "5 5\r\n"}) {
      INFO(bad);
      CheckError(server.Raw(Chunked(bad)), 400);
    }
    CheckError(server.Raw(Chunked("900000\r\n")), 413);
    std::string large;
    for (int i = 0; i < 9; ++i) large += Chunk(std::string(1 << 20, ' '));
    CheckError(server.Raw(Chunked(large)), 413);
    CheckError(server.Raw(Chunked("0\r\n" + std::string(20000, 'x'))), 400);
  }
  SECTION("heads without measure or sense") {
    std::string many;
    for (int i = 0; i < 200; ++i) absl::StrAppend(&many, "X-", i, ": 1\r\n");
    CheckError(server.Raw(Sized(many, kBody)), 431);
    CheckError(server.Raw(Sized("X: " + std::string(1 << 20, 'x') + "\r\n", kBody)), 431);
    CheckError(server.Raw("GET /" + std::string(1 << 20, 'x') + " HTTP/1.1\r\n\r\n"), 414);
    CheckError(server.Raw(Sized(" folded: 1\r\n", kBody)), 400);
    CheckError(server.Raw(Sized("a : 1\r\n", kBody)), 400);
    CheckError(server.Raw(Sized("nothing\r\n", kBody)), 400);
    CheckError(server.Raw(Sized(std::string("x: \0\r\n", 6), kBody)), 400);
    CheckError(server.Raw(Sized("Host: y\r\n", kBody)), 400);
    CheckError(server.Raw(Sized("Expect: gold\r\n", kBody)), 417);
    CheckError(server.Raw("GET /health HTTP/1.1\r\n\r\n"), 400);
    CheckError(server.Raw("GET /health HTTP/1.1\nHost: x\n\n"), 400);
    CheckError(server.Raw("GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n"), 400);
    CheckError(server.Raw("GET /health HTTP/2.0\r\nHost: x\r\n\r\n"), 505);
    CheckError(server.Raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505);
    CheckError(server.Raw(std::string("\x16\x03\x01\x02\x00\x01", 6)), 400);  // TLS
  }
  SECTION("however many requests stand one behind the other, each has its answer") {
    Connection connection(server.http_port);
    std::string many;
    for (int i = 0; i < 2500; ++i) many += "GET /version HTTP/1.1\r\nHost: x\r\n\r\n";
    std::thread sender([&] { connection.Send(many + Sized("", kBody)); });
    const std::string answers = connection.ReadAll();
    sender.join();
    const std::vector<std::string> parts = absl::StrSplit(answers, "HTTP/1.1 200 OK\r\n");
    CHECK(parts.size() == 2502);
    CHECK(absl::StrContains(parts.back(), "Connection: close"));
    CHECK(absl::StrContains(parts.back(), "text_completion"));
  }
  SECTION("bodies belong to their request, and requests come one after another") {
    const std::string hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n";
    const std::string answers = [&] {
      Connection connection(server.http_port);
      connection.Send(
          absl::StrCat("GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: ", hidden.size(),
                       "\r\n\r\n", hidden, "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"));
      connection.Send(Sized("", kBody));
      return connection.ReadAll();
    }();
    INFO(answers);
    const std::vector<std::string> parts = absl::StrSplit(answers, "HTTP/1.1 200 OK\r\n");
    REQUIRE(parts.size() == 4);
    CHECK(absl::StrContains(parts[1], "\"ok\""));
    CHECK(absl::StrContains(parts[2], "max_model_len"));
    CHECK(absl::StrContains(parts[3], "text_completion"));
    // A client that waits to be told to go on.
    const std::string told = [&] {
      Connection connection(server.http_port);
      connection.Send(absl::StrCat(kHead, "Expect: 100-continue\r\nContent-Length: ",
                                   std::string(kBody).size(), "\r\n\r\n"));
      SleepMs(50);
      connection.Send(kBody);
      return connection.ReadAll();
    }();
    CHECK(absl::StartsWith(told, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"));
  }
  CHECK(server.Get("/health").status == 200);
}

TEST_CASE("methods and types") {
  HttpServer server;
  const auto ask = [&](const std::string& method, const std::string& path) {
    return server.Raw(
        absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
  };
  for (const char* method : {"GET", "PUT", "DELETE", "PATCH", "TRACE", "HEADLESS"}) {
    const Answer answer = ask(method, "/v1/completions");
    CheckError(answer, 405);
    CHECK(absl::StrContains(answer.headers, "Allow: POST, OPTIONS"));
  }
  const Answer trace = ask("TRACE", "/health");
  CheckError(trace, 405);
  CHECK(absl::StrContains(trace.headers, "Allow: GET, HEAD, OPTIONS"));
  const Answer options = ask("OPTIONS", "/v1/chat/completions");
  CHECK(options.status == 204);
  CHECK(options.body.empty());
  CHECK(absl::StrContains(options.headers, "Allow: POST, OPTIONS"));
  const Answer head = ask("HEAD", "/health");
  CHECK(head.status == 200);
  CHECK(head.body.empty());
  CHECK(absl::StrContains(head.headers, "Content-Length: 15"));
  CheckError(ask("GET", "/" + std::string(5000, 'x')), 404);

  // As `curl -d` sends it: JSON under a form's name, of any size.
  const std::string long_body = absl::StrCat(R"({"prompt": "1", "max_tokens": 2, "user": ")",
                                             std::string(100000, 'x'), "\"}");
  for (const char* type : {"Content-Type: application/x-www-form-urlencoded\r\n",
                           "Content-Type: text/plain\r\n", ""}) {
    CHECK(server.Raw(Sized(type, long_body)).status == 200);
  }
  CheckError(server.Raw(Sized("Content-Type: multipart/form-data; boundary=x\r\n", kBody)), 415);
  CheckError(server.Raw(Sized("Content-Encoding: gzip\r\n", "\x1f\x8b")), 415);
  CheckError(server.Raw(Sized("", "prompt=1&max_tokens=2")), 400);
  // HTTP/1.0 knows no chunks.
  const std::string old = [&] {
    Connection connection(server.http_port);
    connection.Send(
        "POST /v1/completions HTTP/1.0\r\nContent-Length: 35\r\n\r\n"
        R"({"prompt": "1", "stream": true    })");
    return connection.ReadAll();
  }();
  CHECK(!absl::StrContains(old, "chunked"));
  CHECK(absl::EndsWith(old, "data: [DONE]\n\n"));
}

// Connections that are more than a server keeps open at once and no more than this process may
// have: a server keeps 1024, or half of the descriptors that it may have.
int ManyConnections() {
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = limit.rlim_max;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  return static_cast<int>(std::min<rlim_t>(1300, limit.rlim_cur - 200));
}

TEST_CASE("connections that send nothing, or hardly anything, keep nobody waiting") {
  const int many = ManyConnections();
  REQUIRE(many > 400);
  HttpServer server;
  std::vector<std::unique_ptr<Connection>> held;
  for (int i = 0; i < many; ++i) {
    held.push_back(std::make_unique<Connection>(server.http_port));
    if (i % 4 == 1) held.back()->Send("POST /v1/comp");
    if (i % 4 == 2) held.back()->Send(absl::StrCat(kHead, "Content-Length: 1000\r\n\r\n{"));
    if (i % 4 == 3) held.back()->Send(absl::StrCat(kHead, "Transfer-Encoding: chunked\r\n\r\n5\r"));
    if (i != 300 && i != many - 1) continue;
    CHECK(server.Get("/health").status == 200);
    CHECK(server.Get("/metrics").status == 200);
    CHECK(server.Complete({{"prompt", "2"}, {"max_tokens", 4}}).status == 200);
  }
  // They are told, or simply closed, when their time is over; a head has ten seconds.
  Connection slow(server.http_port);
  std::atomic<bool> over = false;
  std::thread drip([&] {
    while (!over) {
      slow.Send("X");
      SleepMs(100);
    }
  });
  const int64_t begin_ms = NowMs();
  const Answer late = Parse(slow.ReadAll());
  over = true;
  CHECK(late.status == 408);
  CHECK(NowMs() - begin_ms >= 8000);
  drip.join();
}

TEST_CASE("whoever comes above the limit of connections is told so, and costs nobody an answer") {
  HttpServer server;
  const int limit = 1024, more = std::min(200, ManyConnections() - limit);
  if (more <= 0) {
    WARN("skipped: too few descriptors for more than 1024 connections");
    return;
  }
  const std::string body = Json{{"prompt", "2"}, {"max_tokens", 2}, {"seed", 1}}.dump();
  std::vector<std::unique_ptr<Connection>> clients;
  for (int i = 0; i < limit + more; ++i) {
    clients.push_back(std::make_unique<Connection>(server.http_port));
    clients.back()->Send(RawPost("/v1/completions", body));
  }
  std::map<int, int> count;
  for (const auto& client : clients) ++count[Parse(client->ReadAll()).status];
  INFO("200: " << count[200] << ", 503: " << count[503] << ", nothing: " << count[0]);
  CHECK(count[200] >= limit);
  CHECK(count[200] + count[503] == limit + more);
}

TEST_CASE("a short request can't ask for an answer without measure") {
  HttpServer server;
  // 200 tokens of a prompt, told 128 times with 21 log-probs each: sent choice by choice.
  Json body{{"prompt", std::vector<int32_t>(200, 21)},
            {"echo", true},
            {"max_tokens", 0},
            {"logprobs", 20},
            {"n", 128}};
  const Answer large = server.Complete(body);
  REQUIRE(large.status == 200);
  CHECK(absl::StrContains(large.headers, "Transfer-Encoding: chunked"));
  CHECK(large.body.size() > 5 << 20);
  const Json choices = large.json()["choices"];
  REQUIRE(choices.size() == 128);
  CHECK(choices[127]["logprobs"] == choices[0]["logprobs"]);
  // Ten such prompts are too many log-probs.
  body["n"] = 12;
  body["prompt"] = std::vector<std::vector<int32_t>>(10, std::vector<int32_t>(900, 21));
  const Answer refused = server.Complete(body);
  CheckError(refused, 400);
  CHECK(refused.json()["error"]["param"] == "echo");
}

TEST_CASE("a client that hangs up is counted as one, and its sequences end") {
  HttpServer server;
  Json body{{"prompt", "1"}, {"n", 100}, {"max_tokens", 250}, {"ignore_eos", true}};
  int expected = 0;
  for (const bool stream : {false, true}) {
    for (const bool half : {false, true}) {
      body["stream"] = stream;
      Connection connection(server.http_port);
      connection.Send(RawPost("/v1/completions", body.dump()));
      REQUIRE(Eventually([&] { return server.Status().num_running() > 0; }));
      if (half) {
        connection.CloseSending();
      } else {
        connection.CloseAll();
      }
      CHECK(Eventually([&] { return server.IsIdle(); }));
      ++expected;
      CHECK(Eventually([&] { return Answered(server, "499") == expected; }));
      if (half && !stream) CheckError(Parse(connection.ReadAll()), 499);
    }
  }
  CHECK(Answered(server, "500") == 0);
}

TEST_CASE("what the engine refuses is named as the client has named it, and quoted in brief") {
  HttpServer server;
  const auto param_of = [&](const char* field, const Json& value, bool chat = false) {
    Json body =
        chat ? Json{{"messages", {{{"role", "user"}, {"content", "1"}}}}} : Json{{"prompt", "1"}};
    body[field] = value;
    const Answer answer = chat ? server.Chat(body) : server.Complete(body);
    INFO(field << " " << answer.body.substr(0, 500));
    CheckError(answer, 400);
    const Json param = answer.json()["error"]["param"];
    return param.is_string() ? param.get<std::string>() : std::string();
  };
  for (const char* field : {"temperature", "top_p", "min_p", "presence_penalty",
                            "frequency_penalty", "repetition_penalty"}) {
    CHECK(param_of(field, -1000) == field);
  }
  CHECK(param_of("min_tokens", 1000) == "min_tokens");
  CHECK(param_of("stop_token_ids", {999999}) == "stop_token_ids");
  CHECK(param_of("stop_token_ids", std::vector<int>(2000, 1)) == "stop_token_ids");
  CHECK(param_of("stop", std::vector<std::string>(5000, "x")) == "stop");
  CHECK(param_of("stop", "") == "stop");
  CHECK(param_of("logit_bias", {{"999999", 1}}) == "logit_bias");
  CHECK(param_of("prompt", {999999}) == "prompt");
  CHECK(param_of("prompt", std::string(300, '1')) == "prompt");
  CHECK(param_of("messages", {{{"role", "user"}, {"content", std::string(300, '1')}}}, true) ==
        "messages");
  // Megabytes of names come back as a few words.
  const std::string huge(4 << 20, 'x');
  CheckError(server.Complete({{"prompt", "1"}, {huge, 1}}), 400);
  CheckError(server.Complete({{"prompt", "1"}, {"model", huge}}), 404);
  CheckError(server.Complete({{"prompt", "1"}, {"logit_bias", {{huge, 1}}}}), 400);
  CheckError(server.Complete({{"prompt", "1"}, {"stream", true}, {"stream_options", {{huge, 1}}}}),
             400);
  CheckError(server.Complete({{"prompt", "1"}, {"guided_json", {{huge, 1}}}}), 400);
  CheckError(server.Complete({{"prompt", "1"}, {"response_format", {{"type", huge}}}}), 400);
  CheckError(server.Chat({{"messages", {{{"role", huge + "!"}, {"content", "1"}}}}}), 400);
  CheckError(server.Post("/v1/completions", "{\"prompt\": \"1\" \"" + huge + "\"}"), 400);
  CheckError(server.Post("/v1/completions", "{\"n\": " + std::string(1 << 20, '1') + "}"), 400);
}

TEST_CASE("without a chat template completions are answered, and chats are told what is missing") {
  HttpServer server({"--chat-format", "auto"});
  CHECK(server.Complete({{"prompt", "1"}, {"max_tokens", 2}}).status == 200);
  const Answer chat = server.Chat({{"messages", {{{"role", "user"}, {"content", "1"}}}}});
  CheckError(chat, 400);
  CHECK(absl::StrContains(chat.body, "chat template"));
  CHECK(absl::StrContains(chat.body, "--chat-format"));
}

TEST_CASE("what ends an answer before min_tokens, and what its tokens count") {
  HttpServer server;
  // A match that can't go on ends the answer: the constraint is kept, min_tokens is not.
  const Answer matched = server.Complete(
      {{"prompt", "1"}, {"guided_choice", {"ab"}}, {"min_tokens", 10}, {"max_tokens", 20}});
  REQUIRE(matched.status == 200);
  CHECK(matched.json()["choices"][0]["text"] == "ab");
  CHECK(matched.json()["choices"][0]["finish_reason"] == "stop");
  // Tokens that a stop string takes back aren't counted.
  Json body{{"prompt", "1"}, {"guided_choice", {"abcd"}}, {"stop", "c"}};
  body["return_token_ids"] = true;
  const Json cut = server.Complete(body).json();
  CHECK(cut["choices"][0]["text"] == "ab");
  CHECK(cut["choices"][0]["token_ids"].size() == 2);
  CHECK(cut["usage"]["completion_tokens"] == 2);
  body["include_stop_str_in_output"] = true;
  CHECK(server.Complete(body).json()["usage"]["completion_tokens"] == 3);
}
}  // namespace stretto::testing
