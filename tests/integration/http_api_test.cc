// What the OpenAI-compatible API promises of its numbers, fields and paths: a real process.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <map>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/http_server.h"

namespace stretto::testing {
using Server = HttpServer;

TEST_CASE("one number is the context, over HTTP and gRPC") {
  Server server;
  CHECK(server.Get("/v1/models").json()["data"][0]["max_model_len"] == 256);
  const auto stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", server.port));
  for (const int num_prompt : {1, 200, 255}) {
    const std::vector<int32_t> prompt(static_cast<size_t>(num_prompt), 21);
    const int left = 256 - num_prompt;
    Json body{{"prompt", prompt}, {"max_tokens", left}, {"ignore_eos", true}};
    const Answer all = server.Complete(body);
    INFO(all.body.substr(0, 300));
    REQUIRE(all.status == 200);
    CHECK(all.json()["usage"]["completion_tokens"] == left);
    body["max_tokens"] = left + 1;
    const Answer more = server.Complete(body);
    CHECK(more.status == 400);
    CHECK(more.json()["error"]["param"] == "max_tokens");
    CHECK(absl::StrContains(more.body, absl::StrCat("together 257, more than a context of 256")));
    const grpc::Status refused = Generate(*stub, MakeGenerateRequest(prompt, 1, left + 1)).status;
    CHECK(refused.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(absl::StrContains(refused.error_message(), "together 257"));
    body.erase("max_tokens");
    CHECK(server.Complete(body).json()["usage"]["completion_tokens"] == std::min(left, 16));
  }
  const Answer chat = server.Chat(
      {{"messages", {{{"role", "user"}, {"content", "1"}}}}, {"max_completion_tokens", 256}});
  CHECK(chat.json()["error"]["param"] == "max_completion_tokens");
  CHECK(absl::StrContains(chat.body, "max_completion_tokens is 256"));
}

TEST_CASE("what ended an answer, special tokens, and log-probs of a prompt") {
  Server server;
  const auto choice = [&server](Json body) {
    body.update({{"prompt", "1+1="}, {"max_tokens", 30}, {"seed", 1}});
    const Answer answer = server.Complete(body);
    INFO(answer.body);
    REQUIRE(answer.status == 200);
    return answer.json()["choices"][0];
  };
  // The test model's token of a byte is one more than it; 256 bytes, then what is special.
  const Json by_text = choice({{"logit_bias", {{"98", 1000}}}, {"stop", {"x", "aa"}}});
  CHECK(by_text["stop_reason"] == "aa");
  CHECK(by_text["finish_reason"] == "stop");
  CHECK(choice({{"logit_bias", {{"98", 1000}}}, {"stop_token_ids", {98}}})["stop_reason"] == 98);
  CHECK(choice({{"logit_bias", {{"98", 1000}}}})["stop_reason"].is_null());
  const Json eos = choice({{"logit_bias", {{"0", 1000}}}, {"skip_special_tokens", false}});
  CHECK(eos["finish_reason"] == "stop");
  CHECK(eos["stop_reason"].is_null());
  CHECK(eos["text"] == "");
  const Json shown = choice({{"logit_bias", {{"0", 1000}}},
                             {"skip_special_tokens", false},
                             {"include_stop_str_in_output", true}});
  CHECK(shown["text"] == server.Post("/detokenize", R"({"tokens": [0]})").json()["prompt"]);
  CHECK(shown["text"] != "");
  const Json ignored =
      choice({{"logit_bias", {{"0", 1000}}}, {"skip_special_tokens", false}, {"ignore_eos", true}});
  CHECK(ignored["text"].get<std::string>().size() == 30 * shown["text"].get<std::string>().size());
  CHECK(choice({{"logit_bias", {{"0", 1000}}}, {"ignore_eos", true}})["text"] == "");

  const Json logprobs = choice({{"prompt_logprobs", 2}, {"logprobs", 1}, {"echo", true}});
  const Json& told = logprobs["prompt_logprobs"];
  REQUIRE(told.size() == 4);
  CHECK(told[0].is_null());
  const int32_t second = '+' + 1;
  CHECK(told[1][absl::StrCat(second)]["logprob"] == logprobs["logprobs"]["token_logprobs"][1]);
  CHECK(logprobs["logprobs"]["top_logprobs"][1].size() <= 2);
  const Answer chat = server.Chat({{"messages", {{{"role", "user"}, {"content", "1+1="}}}},
                                   {"prompt_logprobs", 0},
                                   {"max_tokens", 1}});
  CHECK(chat.json()["prompt_logprobs"][1][absl::StrCat(second)]["logprob"] ==
        told[1][absl::StrCat(second)]["logprob"]);
}

TEST_CASE("a prompt with a seed is answered in a list as alone") {
  Server server;
  const auto texts = [&server](const Json& prompt, Json more) {
    more.update({{"prompt", prompt}, {"max_tokens", 12}, {"ignore_eos", true}});
    const Answer answer = server.Complete(more);
    INFO(answer.body);
    REQUIRE(answer.status == 200);
    std::vector<std::string> all;
    const Json whole = answer.json();
    for (const Json& choice : whole["choices"]) all.push_back(choice["text"]);
    return all;
  };
  const std::vector<std::string> alone = texts("1+2=", {{"seed", 4}, {"n", 2}});
  const std::vector<std::string> list = texts({"9-", "1+2=", "1+2="}, {{"seed", 4}, {"n", 2}});
  REQUIRE(list.size() == 6);
  CHECK(alone[0] != alone[1]);
  for (const size_t i : {2, 3, 4, 5}) CHECK(list[i] == alone[i % 2]);
  const std::vector<std::string> drawn = texts({"1+2=", "1+2="}, Json::object());
  CHECK(drawn[0] != drawn[1]);
}

TEST_CASE("of those that wait a lower priority is begun first, as in vLLM") {
  Server server({"--max-running", "1"});
  std::vector<std::thread> clients;
  std::atomic<int> num_ended = 0;
  std::map<int, std::atomic<int>> place;  // by priority
  for (const int priority : {0, 5, -5, 2}) place[priority] = -1;
  const auto ask = [&](int priority, unsigned n) {
    clients.emplace_back([&, priority, n, at = &place.at(priority)] {
      const Answer answer = server.Complete({{"prompt", "1"},
                                             {"n", n},
                                             {"max_tokens", 240},
                                             {"ignore_eos", true},
                                             {"priority", priority}});
      if (answer.status == 200) *at = num_ended++;
    });
  };
  for (int i = 0; i < 4; ++i) ask(0, 128);  // one after the other, for seconds
  const bool waits = Eventually([&] { return server.Status().num_queued() > 0; });
  // Later ones are longer, so that answers come well apart, however late a client is woken.
  const std::map<int, unsigned> num_completions = {{5, 64}, {-5, 1}, {2, 64}};
  unsigned num_asked = 0;
  for (const int priority : {5, -5, 2}) {
    ask(priority, num_completions.at(priority));
    num_asked += num_completions.at(priority);
  }
  SleepMs(250);
  // Else the test has come too late.
  const bool still_waits = server.Status().num_queued() > 128u + num_asked;
  for (std::thread& client : clients) client.join();
  REQUIRE(waits);
  REQUIRE(still_waits);
  CHECK(place[-5] >= 0);
  CHECK(place[-5] < place[2]);
  CHECK(place[2] < place[5]);
}

TEST_CASE("a form that is being compiled doesn't hold up the end") {
  Server server({"--grace-ms", "20000"});
  // The work of about a second.
  const Json body{{"prompt", "1"},
                  {"guided_regex", "(a|b|[0-9]{1,400}){1,60}(a|b|[0-9]{1,400}){1,61}"}};
  Connection connection(server.http_port);
  connection.Send(RawPost("/v1/completions", body.dump()));
  SleepMs(100);
  const int64_t signal_ms = NowMs();
  server.process->Signal(SIGTERM);
  const Answer answer = Parse(connection.ReadAll());
  CHECK(server.process->WaitForExit(20000) == 0);
  CHECK(NowMs() - signal_ms < 5000);
  INFO(answer.body);
  CHECK((answer.status == 503 || answer.status == 400));  // a quick machine has refused it
}

TEST_CASE("every path says what it answers, and what is meant by another") {
  Server server;
  const auto ask = [&server](const std::string& method, const std::string& path) {
    return server.Raw(
        absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
  };
  for (const std::string path :
       {"/v1/models", "/v1/models/policy", "/health", "/metrics", "/version"}) {
    INFO(path);
    CHECK(ask("HEAD", path).status == 200);
    CHECK(ask("HEAD", path).body.empty());
    CHECK(ask("PUT", path).status == 405);
    const Answer options = ask("OPTIONS", path);
    CHECK(options.status == 204);
    CHECK(absl::StrContains(options.headers, "Allow: GET, HEAD, OPTIONS"));
  }
  for (const std::string path :
       {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}) {
    INFO(path);
    const Answer head = ask("HEAD", path);
    CHECK(head.status == 405);
    CHECK(head.body.empty());
    CHECK(absl::StrContains(head.headers, "Allow: POST, OPTIONS"));
    const Answer options = ask("OPTIONS", path);
    CHECK(options.status == 204);
    CHECK(absl::StrContains(options.headers, "Allow: POST, OPTIONS"));
  }
  const auto hint = [&](const std::string& path) {
    const Answer answer = ask("GET", path);
    CHECK(answer.status == 404);
    return answer.json()["error"]["message"].get<std::string>();
  };
  CHECK(absl::EndsWith(hint("/v1/models/"), "expected /v1/models"));
  CHECK(absl::EndsWith(hint("//v1/models"), "expected /v1/models"));
  CHECK(absl::EndsWith(hint("/v1/v1/chat/completions"), "expected /v1/chat/completions"));
  CHECK(absl::EndsWith(hint("/completions/"), "expected /v1/completions"));
  CHECK(absl::EndsWith(hint("/v1/models/policy/"), "expected /v1/models/policy"));
  CHECK(absl::EndsWith(hint("/v1/health"), "expected /health"));
  CHECK(absl::StrContains(hint("/"), "/v1/chat/completions, /v1/models"));
  CHECK(absl::EndsWith(hint("/v1/models/other"), "expected policy"));
  CHECK(ask("OPTIONS", "/nowhere").status == 404);
}

TEST_CASE("ids of texts, and how long completions take") {
  const Server server;
  const Answer tokens = server.Post("/tokenize", R"({"model": "policy", "prompt": "1+1="})");
  REQUIRE(tokens.status == 200);
  CHECK(tokens.json()["count"] == tokens.json()["tokens"].size());
  const Json ids{{"tokens", tokens.json()["tokens"]}};
  CHECK(server.Post("/detokenize", ids.dump()).json()["prompt"] == "1+1=");
  CHECK(server.Post("/tokenize", R"({"model": "other", "prompt": "1"})").status == 404);
  CHECK(server.Get("/tokenize").status == 405);
  REQUIRE(server.Complete({{"prompt", "1+1="}, {"max_tokens", 5}, {"ignore_eos", true}, {"n", 2}})
              .status == 200);
  const std::string metrics = server.Get("/metrics").body;
  const auto count = [&metrics](const std::string& name) {
    const std::string line = absl::StrCat("\n", name, "_count{api=\"http\"} ");
    const size_t at = metrics.find(line);
    return at == std::string::npos ? -1 : std::atoi(metrics.c_str() + at + line.size());
  };
  CHECK(absl::StrContains(
      metrics, "stretto_generator_completions_total{api=\"http\",finish_reason=\"length\"} 2"));
  CHECK(absl::StrContains(
      metrics, "stretto_generator_completions_total{api=\"grpc\",finish_reason=\"stop\"} 0"));
  for (const char* name :
       {"stretto_generator_blocks", "process_resident_memory_bytes", "process_cpu_seconds_total",
        "process_open_fds", "process_start_time_seconds", "process_max_fds"}) {
    INFO(name);
    const size_t at = metrics.find(absl::StrCat("\n", name, " "));
    REQUIRE(at != std::string::npos);
    CHECK(std::atof(metrics.c_str() + metrics.find(' ', at)) > 0);
  }
  // Its end is there as soon as the answer is.
  CHECK(absl::StrContains(metrics, "\nstretto_generator_running 0\n"));
  CHECK(absl::StrContains(metrics, "\nstretto_generator_tokens_total 10\n"));
  CHECK(count("stretto_generator_queue_seconds") == 2);
  CHECK(count("stretto_generator_time_to_first_token_seconds") == 2);
  CHECK(count("stretto_generator_inter_token_seconds") == 8);
  CHECK(count("stretto_generator_request_seconds") == 2);
}
}  // namespace stretto::testing
