// What one Generate call may ask of a generator, and what it is refused: every sampling parameter
// over gRPC, bad input, callers that never read.
#include <catch2/catch.hpp>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <limits>
#include <regex>
#include <thread>

#include "absl/strings/match.h"
#include "nlohmann/json.hpp"
#include "tests/integration/generator_server.h"

namespace stretto::testing {
namespace {
using Server = GeneratorServer;
using grpc::StatusCode;

// The test model's token of a byte.
int32_t TokenOf(char c) { return static_cast<uint8_t>(c) + 1; }

v1::GenerateRequest Make(int num_samples = 1, int max_tokens = 40) {
  v1::GenerateRequest request = MakeGenerateRequest(kPrompt, num_samples, max_tokens);
  request.set_return_text(true);
  return request;
}

bool SameBits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// All events of a call, put together.
struct Whole {
  grpc::Status status;
  std::vector<int32_t> ids;
  std::vector<float> logprobs, prompt_logprobs;
  std::vector<v1::TopLogprobs> top, prompt_top;
};
Whole Read(Server& server, const v1::GenerateRequest& request) {
  Whole whole;
  CallContext context;
  auto reader = server.stub->Generate(&context, request);
  v1::GenerateEvent event;
  while (reader->Read(&event)) {
    whole.ids.insert(whole.ids.end(), event.ids().begin(), event.ids().end());
    whole.logprobs.insert(whole.logprobs.end(), event.logprobs().begin(), event.logprobs().end());
    whole.top.insert(whole.top.end(), event.top_logprobs().begin(), event.top_logprobs().end());
    whole.prompt_logprobs.insert(whole.prompt_logprobs.end(), event.prompt_logprobs().begin(),
                                 event.prompt_logprobs().end());
    whole.prompt_top.insert(whole.prompt_top.end(), event.prompt_top_logprobs().begin(),
                            event.prompt_top_logprobs().end());
  }
  whole.status = reader->Finish();
  return whole;
}
}  // namespace

TEST_CASE("constrained output matches: an expression, a schema, an object") {
  Server server;
  const auto check = [&](v1::GenerateRequest request, const auto& matches) {
    const Generated result = Generate(*server.stub, request);
    INFO(result.status.error_message());
    REQUIRE(result.status.ok());
    int num_stopped = 0;
    for (const auto& [index, completion] : result.completions) {
      const std::string& text = result.texts.at(index);
      INFO("'" << text << "'");
      CHECK(completion.sampling_logprobs_size() == completion.ids_size());
      if (completion.finish_reason() != v1::FINISH_REASON_STOP) continue;
      ++num_stopped;
      CHECK(matches(text));
    }
    CHECK(num_stopped > 0);
    // The same bits alone.
    request.clear_samples();
    request.add_samples()->set_sample_index(1);
    const Generated alone = Generate(*server.stub, request);
    CHECK(alone.completions.at(1).SerializeAsString() ==
          result.completions.at(1).SerializeAsString());
  };
  v1::GenerateRequest request = Make(8, 100);
  v1::Constraint* constraint = request.mutable_sampling()->mutable_constraint();
  constraint->set_regex("answer: [0-9]{1,3}(?:\\.[0-9]{2})?");
  check(request, [](const std::string& text) {
    return std::regex_match(text, std::regex("answer: [0-9]{1,3}(\\.[0-9]{2})?"));
  });
  constraint->set_json_schema(
      R"({"type": "object", "required": ["ok", "n"], "properties": {
          "ok": {"type": "boolean"}, "n": {"type": "integer"}, "s": {"enum": ["ä", null]}}})");
  check(request, [](const std::string& text) {
    const auto json = nlohmann::json::parse(text, nullptr, false);
    return json.is_object() && json["ok"].is_boolean() && json["n"].is_number_integer() &&
           text.find("\"ok\"") < text.find("\"n\"");
  });
  constraint->set_json_object(true);
  request.mutable_sampling()->set_max_tokens(200);
  (*request.mutable_sampling()->mutable_logit_bias())[TokenOf('}')] = 6;
  check(request, [](const std::string& text) {
    return nlohmann::json::parse(text, nullptr, false).is_object();
  });
}

TEST_CASE("biases, penalties and kept stop strings") {
  Server server;
  v1::GenerateRequest request = Make(1, 12);
  v1::SamplingParams* sampling = request.mutable_sampling();
  (*sampling->mutable_logit_bias())[TokenOf('a')] = 1000;
  CHECK(Generate(*server.stub, request).texts.at(0) == std::string(12, 'a'));
  // Stop strings: left out, or kept.
  sampling->add_stop_strings("aaa");
  Generated result = Generate(*server.stub, request);
  CHECK(result.texts.at(0).empty());
  CHECK(result.completions.at(0).ids_size() == 0);
  sampling->set_keep_stop_string(true);
  result = Generate(*server.stub, request);
  CHECK(result.texts.at(0) == "aaa");
  CHECK(result.completions.at(0).ids_size() == 3);
  sampling->clear_stop_strings();
  // A penalty that outweighs the bias lets each of two favourites come once.
  (*sampling->mutable_logit_bias())[TokenOf('b')] = 1000;
  for (const auto& set : std::vector<std::function<void(v1::SamplingParams*)>>{
           [](auto* s) { s->set_presence_penalty(100), s->set_frequency_penalty(100); },
           [](auto* s) { s->set_repetition_penalty(100); }}) {
    v1::GenerateRequest penalized = request;
    penalized.mutable_sampling()->set_max_tokens(2);
    set(penalized.mutable_sampling());
    const std::string text = Generate(*server.stub, penalized).texts.at(0);
    CHECK((text == "ab" || text == "ba"));
  }
  // Unset is off.
  v1::GenerateRequest off = Make();
  const Generated plain = Generate(*server.stub, off);
  off.mutable_sampling()->set_repetition_penalty(1);
  CHECK(Same(plain, Generate(*server.stub, off)));
  CHECK(plain.completions.at(0).sampling_logprobs_size() == 0);
  off.mutable_sampling()->set_repetition_penalty(1.3f);
  CHECK(!Same(plain, Generate(*server.stub, off)));
}

TEST_CASE("the likeliest tokens, and a prompt's log-probs") {
  Server server;
  v1::GenerateRequest request = Make(1, 20);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  request.mutable_sampling()->set_top_logprobs(3);
  const Whole greedy = Read(server, request);
  REQUIRE(greedy.status.ok());
  REQUIRE(greedy.ids.size() == 20);
  REQUIRE(greedy.top.size() == 20);
  CHECK(greedy.prompt_logprobs.empty());
  for (size_t i = 0; i < 20; ++i) {
    REQUIRE(greedy.top[i].ids_size() == 3);
    CHECK(greedy.top[i].ids(0) == greedy.ids[i]);
    CHECK(SameBits(greedy.top[i].logprobs(0), greedy.logprobs[i]));
    CHECK(greedy.top[i].logprobs(1) >= greedy.top[i].logprobs(2));
  }
  // What was written is now a prompt: its log-probs are the same bits.
  request.mutable_prompt_ids()->Add(greedy.ids.begin(), greedy.ids.end());
  request.set_prompt_logprobs(true);
  const Whole scored = Read(server, request);
  REQUIRE(scored.status.ok());
  REQUIRE(scored.prompt_logprobs.size() == kPrompt.size() + 19);
  REQUIRE(scored.prompt_top.size() == scored.prompt_logprobs.size());
  for (size_t i = 0; i < 20; ++i) {
    const size_t at = kPrompt.size() - 1 + i;
    CHECK(SameBits(scored.prompt_logprobs[at], greedy.logprobs[i]));
    CHECK(scored.prompt_top[at].SerializeAsString() == greedy.top[i].SerializeAsString());
  }
}

TEST_CASE("bad input is refused with its reason; the batch it would have joined doesn't notice") {
  Server server;
  v1::GenerateRequest neighbour = MakeGenerateRequest(kPrompt, 60, 240);
  neighbour.mutable_sampling()->set_ignore_eos(true);
  const Generated alone = Generate(*server.stub, neighbour);
  REQUIRE(alone.status.ok());
  Generated beside;
  std::thread call([&] { beside = Generate(*server.stub, neighbour); });

  using Change = std::function<void(v1::GenerateRequest&)>;
  const auto refused = [&](const Change& change, const std::string& reason) {
    v1::GenerateRequest request = Make(2, 8);
    change(request);
    const grpc::Status status = Generate(*server.stub, request).status;
    INFO(reason << ": " << status.error_message().substr(0, 300));
    CHECK(status.error_code() == StatusCode::INVALID_ARGUMENT);
    CHECK(absl::StrContains(status.error_message(), reason));
    CHECK(status.error_message().size() < 1000);
  };
  const auto sampling_refused = [&](const std::function<void(v1::SamplingParams*)>& change,
                                    const std::string& reason) {
    refused([&](v1::GenerateRequest& r) { change(r.mutable_sampling()); }, reason);
  };
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), -1.0f, 1e-20f}) {
    sampling_refused([&](auto* s) { s->set_temperature(bad); }, "temperature");
  }
  for (const float bad : {std::nanf(""), -0.5f, 1.5f}) {
    sampling_refused([&](auto* s) { s->set_top_p(bad); }, "top_p");
    sampling_refused([&](auto* s) { s->set_min_p(bad); }, "min_p");
  }
  for (const float bad : {std::nanf(""), 1e30f, -1e30f}) {
    sampling_refused([&](auto* s) { s->set_repetition_penalty(bad); }, "repetition_penalty");
    sampling_refused([&](auto* s) { s->set_presence_penalty(bad); }, "presence_penalty");
    sampling_refused([&](auto* s) { s->set_frequency_penalty(bad); }, "frequency_penalty");
    sampling_refused([&](auto* s) { (*s->mutable_logit_bias())[3] = bad; }, "logit_bias");
  }
  sampling_refused([](auto* s) { s->set_max_tokens(-1); }, "max_tokens");
  sampling_refused([](auto* s) { s->set_min_tokens(-1); }, "min_tokens");
  sampling_refused([](auto* s) { s->set_min_tokens(9); }, "min_tokens");
  sampling_refused([](auto* s) { s->set_top_k(-1); }, "top_k");
  sampling_refused([](auto* s) { s->set_top_logprobs(-1); }, "top_logprobs");
  sampling_refused([](auto* s) { s->set_top_logprobs(33); }, "top_logprobs");
  sampling_refused([](auto* s) { s->add_stop_ids(257); }, "stop_ids");
  sampling_refused([](auto* s) { (*s->mutable_logit_bias())[-1] = 1; }, "logit_bias");
  sampling_refused([](auto* s) { s->add_stop_strings(""); }, "stop string");
  sampling_refused([](auto* s) { s->add_stop_strings(std::string(10 << 20, 'x')); }, "10485760");
  sampling_refused([](auto* s) { s->add_stop_strings("a\xFF"); }, "UTF-8");
  sampling_refused([](auto* s) { s->add_stop_strings("\xED\xA0\x80"); }, "UTF-8");

  const auto constraint_refused = [&](const std::function<void(v1::Constraint*)>& change,
                                      const std::string& reason) {
    sampling_refused([&](auto* s) { change(s->mutable_constraint()); }, reason);
  };
  constraint_refused([](auto*) {}, "sampling.constraint: it is empty");
  constraint_refused([](auto* c) { c->set_regex("a(b"); }, "regex: at character 2");
  constraint_refused([](auto* c) { c->set_regex("\xC3("); }, "UTF-8");
  constraint_refused([](auto* c) { c->set_regex("(a|b)*a(a|b){30}"); }, "complex");
  constraint_refused([](auto* c) { c->set_json_schema("{\"type\": \"strin\"}"); }, "#/type");
  constraint_refused([](auto* c) { c->set_json_schema("{"); }, "isn't JSON");
  constraint_refused([](auto* c) { c->set_json_schema(std::string(10 << 20, ' ')); }, "10485760");

  refused([](auto& r) { r.clear_prompt_ids(); }, "empty");
  refused([](auto& r) { r.add_prompt_ids(257); }, "prompt_ids[4] is 257");
  refused([](auto& r) { r.add_prompt_ids(-1); }, "-1");
  refused([](auto& r) { r.mutable_prompt_ids()->Resize(256, 5); }, "256");
  refused([](auto& r) { r.mutable_prompt_ids()->Resize(257, 5); }, "257");
  refused([](auto& r) { r.mutable_prompt_ids()->Resize(1 << 20, 5); }, "context");
  refused([](auto& r) { r.clear_samples(); }, "samples");

  // A prompt just below the context length has room for one token, and more isn't promised.
  v1::GenerateRequest longest = Make(1, 2);
  longest.mutable_prompt_ids()->Resize(255, 5);
  CHECK(CodeOf(server, longest) == StatusCode::INVALID_ARGUMENT);
  longest.mutable_sampling()->set_max_tokens(1);
  const Generated one = Generate(*server.stub, longest);
  CHECK(one.status.ok());
  CHECK(one.completions.at(0).ids_size() == 1);

  call.join();
  CHECK(Same(alone, beside));
  CHECK(server.Status().num_queued() == 0);
}

TEST_CASE("a caller that never reads holds nobody up, nor the end of the process") {
  Server server;
  v1::GenerateRequest request = Make(500, 240);
  request.mutable_sampling()->set_ignore_eos(true);
  request.mutable_sampling()->set_top_logprobs(32);
  CallContext context(120000);
  auto reader = server.stub->Generate(&context, request);
  CHECK(Eventually([&] { return server.Status().num_running() > 0; }));
  const Generated other = Generate(*server.stub, Make(2, 8));
  CHECK(other.status.ok());
  SECTION("it goes away") {
    context.TryCancel();
    CHECK(Eventually([&] {
      const v1::GeneratorStatus status = server.Status();
      return status.num_running() == 0 && status.num_queued() == 0;
    }));
    v1::GenerateEvent event;
    while (reader->Read(&event)) {
    }
    CHECK(reader->Finish().error_code() == StatusCode::CANCELLED);
  }
  SECTION("the process is asked to end") {
    server.process->Signal(SIGTERM);
    CHECK(server.process->WaitForExit(30000) == 0);
    context.TryCancel();
  }
}
}  // namespace stretto::testing
