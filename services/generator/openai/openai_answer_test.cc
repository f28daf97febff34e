// The domain code of the OpenAI-compatible API: updates to answers.
#include <algorithm>
#include <catch2/catch.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/testing.h"
#include "services/generator/openai/openai_testing.h"
#include "services/generator/openai/openai_writer.h"

namespace stretto::services {
namespace {
// The events of a stream, without their framing; "[DONE]" as a JSON string.
std::vector<Json> Events(const std::string& stream) {
  std::vector<Json> events;
  for (const absl::string_view part : absl::StrSplit(stream, "\n\n")) {
    if (part.empty()) continue;
    REQUIRE(absl::StartsWith(part, "data: "));
    const std::string data(part.substr(6));
    events.push_back(data == "[DONE]" ? Json(data) : Json::parse(data));
  }
  return events;
}

SampleUpdate Tokens(uint32_t sample, std::vector<int32_t> ids, std::string text) {
  SampleUpdate update;
  update.sample_index = sample;
  for (size_t i = 0; i < ids.size(); ++i) {
    update.logprobs.push_back(-0.5f - static_cast<float>(i));
    update.versions.push_back(3);
    update.top_logprobs.push_back({{ids[i], update.logprobs.back()}, {66, -4.0f}});
  }
  update.ids = std::move(ids);
  update.text = std::move(text);
  return update;
}
SampleUpdate End(SampleUpdate update, engine::FinishReason reason) {
  update.finished = reason;
  return update;
}
}  // namespace

TEST_CASE("a completion's answer") {
  OpenAiRequest request;
  request.prompts = {{10, 11}, {12}};
  request.n = 2;
  request.logprobs = true;
  request.top_logprobs = 2;
  request.return_token_ids = true;
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  const std::string a = Prompts().tokenizer().TokenBytes(40);
  const std::string b = Prompts().tokenizer().TokenBytes(41);
  writer.Add(3, Tokens(1, {40}, a));
  writer.Add(3, End(Tokens(1, {41}, b), engine::FinishReason::kLength));
  for (const size_t choice : {0, 1, 2}) {
    writer.Add(choice, End(Tokens(0, {40}, a), engine::FinishReason::kStop));
  }
  REQUIRE(writer.failure().ok());
  const Json json = Json::parse(writer.Whole());
  CHECK(json["id"] == "cmpl-x");
  CHECK(json["object"] == "text_completion");
  CHECK(json["model"] == "m");
  CHECK(json["system_fingerprint"] == "policy-version-3");
  REQUIRE(json["choices"].size() == 4);
  const Json& last = json["choices"][3];
  CHECK(last["index"] == 3);
  CHECK(last["text"] == a + b);
  CHECK(last["finish_reason"] == "length");
  CHECK(last["logprobs"]["tokens"] == Json({a, b}));
  CHECK(last["logprobs"]["token_logprobs"] == Json({-0.5, -0.5}));
  CHECK(last["logprobs"]["text_offset"] == Json({0, 1}));
  CHECK(last["logprobs"]["top_logprobs"][0].size() == 2);
  CHECK(last["token_ids"] == Json({40, 41}));
  CHECK(last["policy_versions"] == Json({3, 3}));
  CHECK(last["prompt_token_ids"] == Json({12}));
  CHECK(json["choices"][0]["finish_reason"] == "stop");
  CHECK(json["usage"]["prompt_tokens"] == 3);
  CHECK(json["usage"]["completion_tokens"] == 5);
  CHECK(json["usage"]["total_tokens"] == 8);
}

TEST_CASE("a chat's stream") {
  OpenAiRequest request;
  request.chat = request.stream = request.include_usage = request.logprobs = true;
  request.sampling.stop_strings = {"a", "b."};
  request.top_logprobs = 1;
  request.prompts = {{10, 11}};
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  std::string stream = writer.Begin();
  CHECK(writer.TakeChunks().empty());
  writer.Add(0, Tokens(0, {40}, "\xC3\xA4"));
  stream += writer.TakeChunks();
  writer.Add(0, Tokens(0, {41}, "b"));
  SampleUpdate end = End(SampleUpdate(), engine::FinishReason::kStop);
  end.stop_string = 1;
  writer.Add(0, end);
  stream += writer.TakeChunks();
  stream += writer.End();
  const std::vector<Json> events = Events(stream);
  REQUIRE(events.size() == 5);
  CHECK(events[0]["choices"][0]["delta"]["role"] == "assistant");
  CHECK(events[0]["object"] == "chat.completion.chunk");
  CHECK(events[0]["id"] == "chatcmpl-x");
  CHECK(events[1]["choices"][0]["delta"] == Json{{"content", "\xC3\xA4"}});
  CHECK(events[1]["choices"][0]["finish_reason"].is_null());
  CHECK(events[1]["choices"][0]["logprobs"]["content"].size() == 1);
  CHECK(events[1]["usage"].is_null());
  CHECK(events[2]["choices"][0]["delta"] == Json{{"content", "b"}});
  CHECK(events[2]["choices"][0]["finish_reason"] == "stop");
  CHECK(events[2]["choices"][0]["stop_reason"] == "b.");
  CHECK(events[3]["choices"].empty());
  CHECK(events[3]["usage"]["completion_tokens"] == 2);
  CHECK(events[4] == "[DONE]");
}

TEST_CASE("an echoed prompt with its log-probs") {
  OpenAiRequest request;
  request.prompts = {{40, 41, 42}};
  request.prompt_texts = {"abc"};
  request.echo = request.prompt_only = request.logprobs = true;
  request.top_logprobs = 1;
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  SampleUpdate update = End(Tokens(0, {50}, "z"), engine::FinishReason::kLength);
  update.prompt_logprobs = {{-1.0f, 2, {{7, -0.25f}}}, {-2.0f, 1, {{42, -2.0f}}}};
  writer.Add(0, update);
  const Json choice = Json::parse(writer.Whole())["choices"][0];
  CHECK(choice["text"] == "abc");
  CHECK(choice["logprobs"]["token_logprobs"] == Json({nullptr, -1.0, -2.0}));
  CHECK(choice["logprobs"]["tokens"].size() == 3);
  CHECK(choice["logprobs"]["top_logprobs"][0].is_null());
  CHECK(choice["logprobs"]["top_logprobs"][1].size() == 2);
  CHECK(choice["logprobs"]["top_logprobs"][2].size() == 1);
  CHECK(choice["finish_reason"] == "length");
}

TEST_CASE("a prompt's log-probs by themselves, as vLLM writes them") {
  OpenAiRequest request;
  request.prompts = {{40, 41, 42}};
  request.prompt_logprobs = 1;
  SampleUpdate update = End(Tokens(0, {50}, "z"), engine::FinishReason::kStop);
  update.stop_id = 50;
  update.prompt_logprobs = {{-1.0f, 9, {{7, -0.25f}, {8, -0.5f}}}, {-2.0f, 1, {{42, -2.0f}}}};
  for (const bool chat : {false, true}) {
    request.chat = chat;
    OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
    writer.Add(0, update);
    const Json json = Json::parse(writer.Whole());
    const Json& choice = json["choices"][0];
    CHECK(choice["stop_reason"] == 50);
    const Json& logprobs = chat ? json["prompt_logprobs"] : choice["prompt_logprobs"];
    REQUIRE(logprobs.size() == 3);
    CHECK(logprobs[0].is_null());
    CHECK(logprobs[1].size() == 2);
    CHECK(logprobs[1]["41"]["logprob"] == -1.0);
    CHECK(logprobs[1]["41"]["rank"] == 9);
    CHECK(logprobs[1]["7"]["rank"] == 1);
    CHECK(logprobs[2] == Json{{"42",
                               {{"logprob", -2.0},
                                {"rank", 1},
                                {"decoded_token", Prompts().tokenizer().TokenBytes(42)}}}});
    CHECK(choice["logprobs"].is_null());
  }
  CHECK(RefusalOf({{"prompt", "1"}, {"prompt_logprobs", 1}, {"stream", true}}).param ==
        "prompt_logprobs");
  const Json large{{"prompt", std::vector<int32_t>(1000, 40)}, {"prompt_logprobs", 20}, {"n", 128}};
  CHECK(RefusalOf(large).param == "prompt_logprobs");
}

TEST_CASE("choices that repeat a prompt's log-probs are written one by one") {
  OpenAiRequest request;
  request.prompts = {std::vector<int32_t>(500, 40)};
  request.prompt_texts = {std::string(500, 'a')};
  request.echo = request.prompt_only = request.logprobs = request.return_token_ids = true;
  request.top_logprobs = 20;
  request.n = 64;
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  SampleUpdate first = End(SampleUpdate(), engine::FinishReason::kLength);
  for (int i = 0; i < 499; ++i) {
    std::vector<engine::TokenLogprob> top;
    for (int32_t id = 40; id < 60; ++id) top.push_back({id, -0.5F});
    first.prompt_logprobs.push_back({-1.5F, 1, std::move(top)});
  }
  writer.Add(0, first);
  for (size_t i = 1; i < 64; ++i) {
    writer.Add(i, End(SampleUpdate(), engine::FinishReason::kLength));
  }
  std::string whole;
  size_t largest = 0;
  while (const std::optional<std::string> piece = writer.NextPiece()) {
    largest = std::max(largest, piece->size());
    whole += *piece;
  }
  CHECK(largest * 60 < whole.size());
  const Json choices = Json::parse(whole)["choices"];
  REQUIRE(choices.size() == 64);
  for (const Json& choice : choices) {
    CHECK(choice["logprobs"] == choices[0]["logprobs"]);
    CHECK(choice["text"] == request.prompt_texts[0]);
    CHECK(choice["prompt_token_ids"].size() == 500);
  }
  CHECK(choices[0]["logprobs"]["top_logprobs"].size() == 500);
  CHECK(choices[0]["logprobs"]["text_offset"][499] == 499);
}

TEST_CASE("a stream of many choices comes in pieces") {
  OpenAiRequest request;
  request.prompts = {std::vector<int32_t>(4000, 40)};
  request.prompt_texts = {std::string(100000, 'a')};
  request.echo = request.stream = true;
  request.n = 100;
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  std::string stream;
  int num_pieces = 0;
  for (; writer.HasChunks(); ++num_pieces) {
    const std::string piece = writer.TakeChunks();
    CHECK(piece.size() < 3 << 19);
    stream += piece;
  }
  CHECK(num_pieces > 5);
  CHECK(Events(stream).size() == 100);
}

TEST_CASE("an answer has so many log-probs and no more") {
  const Json prompt(std::vector<int32_t>(1000, 40));
  const auto echo = [&](int n) {
    return Json{{"prompt", prompt}, {"echo", true}, {"logprobs", 20}, {"max_tokens", 0}, {"n", n}};
  };
  const Refusal refusal = RefusalOf(echo(128));
  CHECK(refusal.param == "echo");
  CHECK(absl::StrContains(refusal.message, "2688000 log-probs"));
  CHECK(ParseCompletion(echo(64).dump(), Prompts()).ok());
  Json without = echo(128);
  without.erase("logprobs");
  CHECK(ParseCompletion(without.dump(), Prompts()).ok());

  // Of tokens that are generated, those of a stream are sent as they come.
  for (const bool stream : {false, true}) {
    OpenAiRequest request;
    request.prompts = {{40}};
    request.logprobs = true;
    request.top_logprobs = 20;
    request.stream = stream;
    OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
    for (int i = 0; i < 9; ++i) {
      CHECK(writer.failure().ok());
      writer.Add(0, Tokens(0, std::vector<int32_t>(11200, 41), ""));
    }
    CHECK(writer.failure().ok() == stream);
    if (!stream) CHECK(ParamOf(writer.failure()) == "logprobs");
  }
}

TEST_CASE("a choice that fails makes the answer an error") {
  OpenAiRequest request;
  request.prompts = {{40}};
  request.stream = true;
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  SampleUpdate update = End(Tokens(0, {50}, "z"), engine::FinishReason::kError);
  update.error = "not finite";
  writer.Add(0, update);
  CHECK(writer.failure().code() == absl::StatusCode::kInternal);
  CHECK(Events(writer.End())[0]["error"]["message"] == "not finite");
}

TEST_CASE("half a character in a token's text is no half character in the answer") {
  OpenAiRequest request;
  request.prompts = {{40}};
  request.logprobs = true;
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  for (int32_t id = 0; id < Prompts().tokenizer().vocab_size(); ++id) {
    writer.Add(0, Tokens(0, {id}, ""));
  }
  writer.Add(0, End(SampleUpdate(), engine::FinishReason::kLength));
  CHECK(!Json::parse(writer.Whole(), nullptr, false).is_discarded());
}
}  // namespace stretto::services
