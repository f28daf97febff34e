// The generator's OpenAI-compatible API: a real process, real sockets.
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "tests/integration/http_server.h"

namespace stretto::testing {
namespace {
using Server = HttpServer;

std::vector<Json> Events(const std::string& body) {
  std::vector<Json> events;
  for (const absl::string_view part : absl::StrSplit(body, "\n\n")) {
    if (part.empty()) continue;
    REQUIRE(absl::StartsWith(part, "data: "));
    const std::string data(part.substr(6));
    events.push_back(data == "[DONE]" ? Json(data) : Json::parse(data));
  }
  return events;
}

const std::vector<int32_t> kPrompt = {21, 14, 20, 32};
}  // namespace

TEST_CASE("completions over HTTP are those of gRPC, whole and streamed") {
  Server server;
  const Json body{
      {"model", "policy"}, {"prompt", kPrompt}, {"max_tokens", 20}, {"n", 3},
      {"seed", 7},         {"logprobs", 2},     {"echo", true},     {"return_token_ids", true}};
  const Answer whole = server.Complete(body);
  INFO(whole.body);
  REQUIRE(whole.status == 200);
  const Json answer = whole.json();
  REQUIRE(answer["choices"].size() == 3);

  v1::GenerateRequest request = MakeGenerateRequest(kPrompt, 3, 20);
  request.mutable_prompt_id()->set_index(0);
  const auto stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", server.port));
  const Generated generated = Generate(*stub, request);
  REQUIRE(generated.status.ok());
  for (const auto& [index, completion] : generated.completions) {
    const Json& choice = answer["choices"][index];
    CHECK(choice["token_ids"] ==
          Json(std::vector<int32_t>(completion.ids().begin(), completion.ids().end())));
    const Json& logprobs = choice["logprobs"]["token_logprobs"];
    REQUIRE(logprobs.size() == kPrompt.size() + static_cast<size_t>(completion.ids_size()));
    CHECK(logprobs[0].is_null());
    for (int i = 0; i < completion.ids_size(); ++i) {
      const float value = logprobs[kPrompt.size() + static_cast<size_t>(i)].get<float>();
      const float expected = completion.logprobs(i);
      CHECK(std::memcmp(&value, &expected, sizeof(value)) == 0);
    }
    const bool stopped = completion.finish_reason() == v1::FINISH_REASON_STOP;
    CHECK(choice["finish_reason"] == (stopped ? "stop" : "length"));
  }

  SECTION("asked again, with another company, it is the same") {
    Json again = body;
    again["n"] = 1;
    CHECK(server.Complete(again).json()["choices"][0] == answer["choices"][0]);
  }
  SECTION("the stream's pieces are the whole") {
    Json streamed = body;
    streamed["stream"] = true;
    streamed["stream_options"] = {{"include_usage", true}};
    const Answer stream = server.Complete(streamed);
    REQUIRE(stream.status == 200);
    CHECK(absl::StrContains(stream.headers, "text/event-stream"));
    const std::vector<Json> events = Events(stream.body);
    REQUIRE(events.size() >= 4);
    CHECK(events.back() == "[DONE]");
    CHECK(events[events.size() - 2]["usage"]["completion_tokens"] ==
          answer["usage"]["completion_tokens"]);
    std::vector<std::string> texts(3), reasons(3);
    std::vector<size_t> num_logprobs(3);
    for (size_t e = 0; e + 2 < events.size(); ++e) {
      for (const Json& choice : events[e]["choices"]) {
        const auto index = choice["index"].get<size_t>();
        texts.at(index) += choice["text"].get<std::string>();
        num_logprobs.at(index) += choice["logprobs"]["tokens"].size();
        if (choice["finish_reason"].is_string()) reasons.at(index) = choice["finish_reason"];
      }
    }
    for (size_t i = 0; i < 3; ++i) {
      CHECK(texts[i] == answer["choices"][i]["text"]);
      CHECK(reasons[i] == answer["choices"][i]["finish_reason"]);
      CHECK(num_logprobs[i] == answer["choices"][i]["logprobs"]["tokens"].size());
    }
  }
  SECTION("a chat") {
    const Json messages{{{"role", "user"}, {"content", "1+1="}}};
    const Answer chat = server.Chat({{"messages", messages}, {"max_tokens", 8}, {"seed", 1}});
    INFO(chat.body);
    REQUIRE(chat.status == 200);
    CHECK(chat.json()["choices"][0]["message"]["role"] == "assistant");
    const Answer stream =
        server.Chat({{"messages", messages}, {"max_tokens", 8}, {"seed", 1}, {"stream", true}});
    std::string text;
    for (const Json& event : Events(stream.body)) {
      if (event.is_string()) continue;
      text += event["choices"][0]["delta"].value("content", "");
    }
    CHECK(text == chat.json()["choices"][0]["message"]["content"]);
  }
  SECTION("an echoed prompt alone, with a stop string, and several prompts") {
    const Answer echo =
        server.Complete({{"prompt", "12+3="}, {"echo", true}, {"max_tokens", 0}, {"logprobs", 1}});
    REQUIRE(echo.status == 200);
    CHECK(echo.json()["choices"][0]["text"] == "12+3=");
    CHECK(echo.json()["choices"][0]["logprobs"]["tokens"].size() == 5);
    CHECK(echo.json()["usage"]["completion_tokens"] == 0);
    const Answer several = server.Complete({{"prompt", {"1", "2"}}, {"n", 2}, {"max_tokens", 4}});
    REQUIRE(several.status == 200);
    CHECK(several.json()["choices"].size() == 4);
  }
}

TEST_CASE("constrained output over HTTP") {
  Server server;
  const auto text_of = [](const Answer& answer, size_t choice = 0) {
    INFO(answer.body);
    REQUIRE(answer.status == 200);
    const Json json = answer.json();
    const Json& c = json["choices"][choice];
    CHECK(c["finish_reason"] == "stop");
    return c.contains("text") ? c["text"].get<std::string>()
                              : c["message"]["content"].get<std::string>();
  };
  // The order of the properties is the schema's, which a map of names would have lost.
  const std::string ordered = R"({"type": "object", "required": ["z", "a"],
      "properties": {"z": {"type": "boolean"}, "a": {"enum": [1, 2]}}})";
  const auto obeys = [](const std::string& text) {
    const Json json = Json::parse(text, nullptr, false);
    INFO(text);
    return json.is_object() && json.size() == 2 && json["z"].is_boolean() &&
           (json["a"] == 1 || json["a"] == 2) && text.find("\"z\"") < text.find("\"a\"");
  };
  const std::string head = R"({"seed": 3, "max_tokens": 60, )";
  const std::string prompt = R"("prompt": "1+1=", )";
  const std::string messages = R"("messages": [{"role": "user", "content": "1+1="}], )";
  const std::string format =
      R"("response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true,
         "schema": )" +
      ordered + "}}}";
  CHECK(obeys(text_of(server.Post("/v1/chat/completions", head + messages + format))));
  const std::string whole = text_of(server.Post("/v1/completions", head + prompt + format));
  CHECK(obeys(whole));
  for (const std::string& same :
       {"\"guided_json\": " + ordered + "}", "\"structured_outputs\": {\"json\": " + ordered + "}}",
        "\"guided_json\": " + Json(ordered).dump() + "}"}) {
    CHECK(text_of(server.Post("/v1/completions", head + prompt + same)) == whole);
  }
  const std::vector<Json> events =
      Events(server.Post("/v1/completions", head + prompt + "\"stream\": true, " + format).body);
  std::string streamed;
  for (const Json& event : events) {
    if (event.is_object()) streamed += event["choices"][0]["text"].get<std::string>();
  }
  CHECK(streamed == whole);

  Json body{{"prompt", "1"}, {"max_tokens", 60}, {"seed", 1}};
  body["guided_regex"] = "[0-9]{3}-[xy]{2}";
  const std::string matched = text_of(server.Complete(body));
  CHECK(matched.size() == 6);
  CHECK(matched[3] == '-');
  body.erase("guided_regex");
  body["structured_outputs"] = {{"choice", {"so (it) goes.", "yes|no", "\u00e4"}}};
  const std::string choice = text_of(server.Complete(body));
  CHECK((choice == "so (it) goes." || choice == "yes|no" || choice == "\u00e4"));
  body.erase("structured_outputs");
  body["response_format"] = {{"type", "json_object"}};
  body["logit_bias"] = {{"126", 20}};  // closes what is open
  CHECK(Json::parse(text_of(server.Complete(body)), nullptr, false).is_object());
  body["response_format"] = {{"type", "text"}};
  CHECK(server.Complete(body).status == 200);
}

TEST_CASE("what HTTP requests are refused, and how") {
  Server server;
  const auto error_of = [](const Answer& answer, int status) {
    INFO(answer.body.substr(0, 500));
    CHECK(answer.status == status);
    CHECK(answer.body.size() < 2000);
    const Json json = answer.json();
    REQUIRE(json.is_object());
    REQUIRE(json["error"]["message"].is_string());
    return json["error"];
  };
  // A neighbour in the batch.
  const Json neighbour{
      {"prompt", "7"}, {"n", 30}, {"max_tokens", 240}, {"ignore_eos", true}, {"seed", 5}};
  const Json alone = server.Complete(neighbour).json()["choices"];
  Json beside;
  std::thread call([&] { beside = server.Complete(neighbour).json()["choices"]; });

  CHECK(error_of(server.Post("/v1/completions", "{"), 400)["type"] == "invalid_request_error");
  error_of(server.Post("/v1/completions", "{\"prompt\": \"\xFF\"}"), 400);
  error_of(server.Post("/v1/completions", R"({"prompt": "\ud800"})"), 400);
  error_of(server.Post("/v1/completions", "{\"prompt\": " + std::string(100000, '[')), 400);
  for (const char* bad : {"NaN", "Infinity", "1e999", "1e300", "-1", "\"1\""}) {
    error_of(server.Post("/v1/completions",
                         absl::StrCat(R"({"prompt": "1", "temperature": )", bad, "}")),
             400);
  }
  const auto bad_field = [&](const char* field, const Json& value) {
    INFO(field << " " << value.dump().substr(0, 100));
    Json body{{"prompt", "1"}};
    body[field] = value;
    const Json error = error_of(server.Complete(body), 400);
    CHECK(absl::StrContains(error["message"].get<std::string>(),
                            field == std::string("stop") ? "stop string" : field));
  };
  for (const char* count : {"max_tokens", "min_tokens", "n", "logprobs", "top_k"}) {
    bad_field(count, -2);
    bad_field(count, 1.5);
  }
  bad_field("max_tokens", 0);
  bad_field("top_p", 1.5);
  bad_field("presence_penalty", 1e30);
  bad_field("logit_bias", {{"257", 1}});
  bad_field("prompt", "");
  bad_field("prompt", Json::array());
  bad_field("prompt", Json::array({Json::array()}));
  bad_field("prompt", {-1});
  bad_field("prompt", {257});
  bad_field("stop", std::string(2 << 20, 'x'));
  bad_field("colour", 1);
  // Longer than the context, as long, and just shorter.
  error_of(server.Complete({{"prompt", std::string(300, '1')}}), 400);
  error_of(server.Complete({{"prompt", std::string(256, '1')}}), 400);
  CHECK(server.Complete({{"prompt", std::string(255, '1')}}).status == 200);
  error_of(server.Complete({{"prompt", "1"}, {"stop", std::string(10 << 20, 'x')}}), 413);

  const auto bad_constraint = [&](const char* field, const Json& value, const char* reason) {
    INFO(field << " " << value.dump().substr(0, 100));
    Json body{{"prompt", "1"}};
    body[field] = value;
    const Json error = error_of(server.Complete(body), 400);
    CHECK(error["param"] == field);
    CHECK(absl::StrContains(error["message"].get<std::string>(), reason));
  };
  bad_constraint("guided_regex", "a(b", "at character 2");
  bad_constraint("guided_regex", "(a|b)*a(a|b){30}", "complex");
  bad_constraint("guided_regex", 3, "expected a regular expression");
  bad_constraint("guided_json", {{"type", "strin"}}, "#/type");
  bad_constraint("guided_json", "{", "isn't JSON");
  bad_constraint("guided_json", {{"enum", {std::string(5 << 20, 'x')}}}, "bytes");
  bad_constraint("guided_choice", {1}, "list of strings");
  bad_constraint("structured_outputs", {{"grammar", "x"}}, "grammar");
  bad_constraint("structured_outputs", {{"regex", "a"}, {"json_object", true}}, "already");
  bad_constraint("response_format", {{"type", "xml"}}, "json_object");
  bad_constraint("response_format", {{"type", "json_schema"}}, "'schema'");
  bad_constraint("response_format",
                 {{"type", "json_schema"}, {"json_schema", {{"schema", {{"type", "x"}}}}}},
                 "#/type");

  error_of(server.Complete({{"prompt", "1"}, {"model", "gpt-4"}}), 404);
  error_of(server.Post("/v1/embeddings", "{}"), 404);
  error_of(server.Get("/nowhere"), 404);
  error_of(server.Get("/v1/completions"), 405);
  error_of(server.Post("/metrics", "{}"), 405);
  error_of(server.Post("/v1/completions", std::string((8 << 20) + 1, ' ')), 413);
  {
    Connection connection(server.http_port);
    connection.Send("this is not HTTP\r\n\r\n");
    CHECK(Parse(connection.ReadAll()).status == 400);
  }
  call.join();
  CHECK(beside == alone);
  CHECK(server.Complete({{"prompt", "1"}, {"max_tokens", 2}}).status == 200);
  CHECK(server.Get("/health").status == 200);
  CHECK(server.Get("/v1/models").json()["data"][0]["id"] == "policy");
  CHECK(server.Get("/v1/models/policy").json()["max_model_len"] == 256);
  const Answer metrics = server.Get("/metrics");
  CHECK(metrics.status == 200);
  CHECK(absl::StrContains(metrics.headers, "text/plain"));
  CHECK(absl::StrContains(metrics.body, "stretto_http_requests_total{code=\"404\"} 3"));
  CHECK(absl::StrContains(metrics.body, "# TYPE stretto_generator_tokens_total counter"));
  // Of a prompt of 40 tokens that is asked for again, two blocks of 16 are there already.
  const auto count = [&](const std::string& name) {
    const std::string text = server.Get("/metrics").body;
    const size_t at = text.find(absl::StrCat("\nstretto_generator_prefix_cache_", name, "_total "));
    return at == std::string::npos ? -1 : std::atoi(text.c_str() + text.find(' ', at));
  };
  const uint64_t before = server.Status().prefix_hit_tokens();
  const Json again{{"prompt", std::vector<int32_t>(40, 21)}, {"max_tokens", 1}};
  REQUIRE(server.Complete(again).status == 200);
  REQUIRE(server.Complete(again).status == 200);
  const uint64_t hits = server.Status().prefix_hit_tokens();
  CHECK(hits == before + 32);
  CHECK(Eventually([&] { return count("hit_tokens") == static_cast<int>(hits); }));
  CHECK(count("query_tokens") >= 80);
  CHECK(Eventually([&] { return server.IsIdle(); }));
}

TEST_CASE("full queues answer 429 with a time to try again; draining 503") {
  Server server({"--max-queued", "4", "--max-running", "1"});
  // More than ever fits is no matter of time.
  const Answer never = server.Complete({{"prompt", "1"}, {"n", 8}, {"max_tokens", 4}});
  CHECK(never.status == 400);
  CHECK(absl::StrContains(never.body, "at most 4 completions"));
  // Of several at once one at most is taken while another runs. A machine that is slow to send them
  // may have ended the first before the next.
  const Json endless{{"prompt", "1"}, {"n", 4}, {"max_tokens", 250}, {"ignore_eos", true}};
  Answer full;
  REQUIRE(Eventually([&] {
    std::vector<std::unique_ptr<Connection>> busy(6);
    for (auto& connection : busy) {
      connection = std::make_unique<Connection>(server.http_port);
      connection->Send(RawPost("/v1/completions", endless.dump()));
    }
    for (const auto& connection : busy) {
      const Answer answer = Parse(connection->ReadAll());
      if (answer.status == 429) full = answer;
    }
    return full.status == 429;
  }));
  CHECK(absl::StrContains(full.headers, "Retry-After: 1"));
  CHECK(full.json()["error"]["code"] == "rate_limit_exceeded");
  CHECK(absl::StrContains(full.body, "completions with "));
  REQUIRE(Eventually([&] { return server.IsIdle(); }));
  CHECK(server.Complete({{"prompt", "1"}, {"n", 2}, {"max_tokens", 4}}).status == 200);
  const auto stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", server.port));
  CallContext context;
  v1::DrainResponse response;
  REQUIRE(stub->Drain(&context, {}, &response).ok());
  CHECK(server.Complete({{"prompt", "1"}, {"max_tokens", 4}}).status == 503);
  CHECK(server.Get("/health").status == 503);
}

TEST_CASE("clients that go away or never read") {
  Server server;
  const Json endless{{"prompt", "1"},      {"n", 100},       {"max_tokens", 250},
                     {"ignore_eos", true}, {"logprobs", 20}, {"seed", 1}};
  SECTION("one that goes away, waiting for the whole or for a stream, frees what it had begun") {
    for (const bool stream : {false, true}) {
      Json body = endless;
      body["stream"] = stream;
      auto connection = std::make_unique<Connection>(server.http_port);
      connection->Send(RawPost("/v1/completions", body.dump()));
      CHECK(Eventually([&] { return server.Status().num_running() > 0; }));
      connection.reset();
      CHECK(Eventually([&] { return server.IsIdle(); }));
    }
    // 100 × 250 tokens would have been generated twice.
    CHECK(server.Status().tokens_generated() < 2 * 25000);
  }
  SECTION("one that never reads holds nobody up") {
    Json body = endless;
    body["stream"] = true;
    Connection silent(server.http_port, /*receive_buffer_bytes=*/4096);
    silent.Send(RawPost("/v1/completions", body.dump()));
    CHECK(Eventually([&] { return server.Status().num_running() > 0; }));
    CHECK(server.Complete({{"prompt", "2"}, {"max_tokens", 4}}).status == 200);
    CHECK(server.Get("/health").status == 200);
    CHECK(Eventually([&] { return server.IsIdle(); }, 60000));
  }
  SECTION("many that send nothing hold nobody up") {
    std::vector<std::unique_ptr<Connection>> idle;
    for (int i = 0; i < 100; ++i) {
      idle.push_back(std::make_unique<Connection>(server.http_port));
      if (i % 2 == 0) idle.back()->Send("POST /v1/comp");
    }
    CHECK(server.Complete({{"prompt", "2"}, {"max_tokens", 4}}).status == 200);
  }
  SECTION("a SIGTERM ends the process although clients wait") {
    Json body = endless;
    body["stream"] = true;
    Connection silent(server.http_port, /*receive_buffer_bytes=*/4096);
    silent.Send(RawPost("/v1/completions", body.dump()));
    Connection idle(server.http_port), half(server.http_port);
    half.Send("POST /v1/comp");
    CHECK(Eventually([&] { return server.Status().num_running() > 0; }));
    server.process->Signal(SIGTERM);
    CHECK(server.process->WaitForExit(30000) == 0);
  }
}

TEST_CASE("at its end a server finishes what runs, as long as it is given") {
  Json body{{"prompt", "1"}, {"n", 100}, {"max_tokens", 240}, {"ignore_eos", true}, {"seed", 1}};
  const auto end_amid = [&](Server& server, bool stream) {
    body["stream"] = stream;
    Connection connection(server.http_port);
    std::string request = RawPost("/v1/completions", body.dump());
    // The end of the server is the connection's, too.
    if (!stream) request = absl::StrReplaceAll(request, {{"Connection: close\r\n", ""}});
    connection.Send(request);
    REQUIRE(Eventually([&] { return server.Status().num_running() > 0; }));
    server.process->Signal(SIGTERM);
    return Parse(connection.ReadAll());
  };
  SECTION("time enough: whole answers and streams end as they would have; nobody new is taken") {
    for (const bool stream : {false, true}) {
      Server server({"--grace-ms", "60000"});
      std::atomic<int> health = 0, refused = 0;
      std::thread other([&] {
        Eventually([&] { return (health = server.Get("/health").status) != 200; });
        refused = server.Complete({{"prompt", "2"}, {"max_tokens", 2}}).status;
      });
      const Answer answer = end_amid(server, stream);
      other.join();
      CHECK(server.process->WaitForExit(10000) == 0);
      CHECK(health == 503);
      CHECK(refused == 503);
      INFO(answer.headers << answer.body.substr(0, 300));
      REQUIRE(answer.status == 200);
      CHECK(absl::StrContains(answer.headers, "Connection: close"));
      size_t num_ended = 0;
      if (stream) {
        const std::vector<Json> events = Events(answer.body);
        CHECK(events.back() == "[DONE]");
        for (const Json& event : events) {
          if (event.is_object()) num_ended += event["choices"][0]["finish_reason"] == "length";
        }
      } else {
        const Json whole = answer.json();
        for (const Json& choice : whole["choices"]) {
          num_ended += choice["finish_reason"] == "length";
        }
      }
      CHECK(num_ended == 100);
    }
  }
  SECTION("no time: who waits is told so at once") {
    Server server({"--grace-ms", "0"});
    const Answer answer = end_amid(server, /*stream=*/false);
    CHECK(answer.status == 503);
    CHECK(absl::StrContains(answer.body, "stopping"));
    CHECK(server.process->WaitForExit(10000) == 0);
  }
}

TEST_CASE("web pages of origins that are named may read the answers") {
  const auto ask = [](const Server& server, const std::string& method, const std::string& origin) {
    return server.Raw(
        absl::StrCat(method, " /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: ", origin,
                     "\r\nAccess-Control-Request-Method: POST\r\n", "Connection: close\r\n\r\n"));
  };
  const std::string here = "http://localhost:3000", allow = "Access-Control-Allow-Origin: ";
  {
    Server server;
    CHECK(!absl::StrContains(ask(server, "OPTIONS", here).headers, allow));
  }
  {
    Server server({"--cors-origin", here, "--api-key", "k"});
    const Answer preflight = ask(server, "OPTIONS", here);  // which carries no key
    CHECK(preflight.status == 204);
    CHECK(absl::StrContains(preflight.headers, allow + here));
    CHECK(absl::StrContains(preflight.headers, "Access-Control-Allow-Methods: GET, HEAD, POST"));
    CHECK(absl::StrContains(preflight.headers, "Authorization, Content-Type"));
    CHECK(absl::StrContains(preflight.headers, "Vary: Origin"));
    const Answer refused = ask(server, "GET", here);  // a script may read why
    CHECK(refused.status == 401);
    CHECK(absl::StrContains(refused.headers, allow + here));
    CHECK(!absl::StrContains(ask(server, "OPTIONS", "http://elsewhere").headers, allow));
  }
  Server server({"--cors-origin", "*"});
  CHECK(absl::StrContains(ask(server, "OPTIONS", "null").headers, allow + "*"));
}

TEST_CASE("with an API key, whoever has none is told nothing but whether the server is well") {
  const Server server({"--api-key", "open-sesame"});
  const auto ask = [&server](const std::string& request_line, const std::string& header,
                             const std::string& body = "") {
    return server.Raw(absl::StrCat(request_line, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
                                   header, "Content-Length: ", body.size(), "\r\n\r\n", body));
  };
  const std::string body = R"({"prompt": "1+1=", "max_tokens": 2})";
  for (const std::string header :
       {"", "Authorization: Bearer open-sesamE\r\n", "Authorization: Basic open-sesame\r\n"}) {
    INFO(header);
    for (const char* line :
         {"POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize",
          "GET /v1/models", "GET /version", "GET /nothing"}) {
      INFO(line);
      const Answer answer = ask(line, header, line[0] == 'P' ? body : "");
      CHECK(answer.status == 401);
      CHECK(absl::StrContains(answer.headers, "WWW-Authenticate: Bearer"));
      CHECK(answer.json()["error"]["code"] == "invalid_api_key");
      CHECK_FALSE(absl::StrContains(answer.body, "sesame"));
    }
    CHECK(ask("GET /health", header).status == 200);
    CHECK(ask("GET /metrics", header).status == 200);
  }
  const std::string good = "Authorization: Bearer open-sesame\r\n";
  CHECK(ask("POST /v1/completions", good, body).status == 200);
  CHECK(ask("GET /version", good).json()["version"].is_string());
  CHECK(ask("GET /nothing", good).status == 404);
}
}  // namespace stretto::testing
