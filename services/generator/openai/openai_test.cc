// The domain code of the OpenAI-compatible API: bodies to requests, updates to answers.
#include <algorithm>
#include <catch2/catch.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing.h"
#include "nlohmann/json.hpp"
#include "services/generator/openai/openai_fields.h"
#include "services/generator/openai/openai_request.h"
#include "services/generator/openai/openai_tokens.h"
#include "services/generator/openai/openai_writer.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;

const engine::PromptEncoder& Prompts() {
  static const engine::PromptEncoder* encoder = [] {
    auto files = engine::OpenModel(std::string(STRETTO_SOURCE_DIR) + "/examples/tiny-model");
    REQUIRE(files.ok());
    auto made = engine::PromptEncoder::Open(*files, {.chat_format = "none", .system_prompt = ""});
    REQUIRE(made.ok());
    return made->release();
  }();
  return *encoder;
}

struct Refusal {
  std::string message, param;
};
Refusal RefusalOf(const Json& body, bool chat = false) {
  const auto parsed =
      chat ? ParseChat(body.dump(), Prompts()) : ParseCompletion(body.dump(), Prompts());
  INFO(body.dump());
  REQUIRE(!parsed.ok());
  CHECK(parsed.status().code() == absl::StatusCode::kInvalidArgument);
  return {std::string(parsed.status().message()), ParamOf(parsed.status())};
}

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

TEST_CASE("what an answer must match, in every spelling") {
  using Kind = engine::ConstraintSpec::Kind;
  const auto parsed = [](const std::string& field, bool chat = false) {
    const std::string prompt =
        chat ? R"("messages": [{"role": "user", "content": "1"}])" : R"("prompt": "1")";
    const std::string body = "{" + prompt + ", " + field + "}";
    auto r = chat ? ParseChat(body, Prompts()) : ParseCompletion(body, Prompts());
    INFO(body);
    REQUIRE_OK(r);
    return *r;
  };
  // A schema's properties stay in their order.
  const std::string schema = R"({"properties":{"z":{},"a":{}}})";
  for (const bool chat : {false, true}) {
    for (const std::string& field :
         {R"("guided_json": )" + schema, R"("guided_json": )" + Json(schema).dump(),
          R"("structured_outputs": {"json": )" + schema + "}",
          R"("response_format": {"type": "json_schema", "json_schema": {"schema": )" + schema +
              "}}"}) {
      const OpenAiRequest r = parsed(field, chat);
      REQUIRE(r.constraint.has_value());
      CHECK(r.constraint->kind == Kind::kJsonSchema);
      CHECK(r.constraint->text == schema);
      CHECK(absl::StartsWith(field, absl::StrCat("\"", r.constraint_param, "\"")));
    }
    CHECK(parsed(R"("guided_regex": "a+")", chat).constraint->text == "a+");
    CHECK(parsed(R"("structured_outputs": {"regex": "a+"})", chat).constraint->kind ==
          Kind::kRegex);
    CHECK(parsed(R"x("guided_choice": ["a.b", "(c|d)"])x", chat).constraint->text ==
          "a\\.b|\\(c\\|d\\)");
    CHECK(parsed(R"("guided_choice": ["", "yes"])", chat).constraint->text == "|yes");
    CHECK(parsed(R"("response_format": {"type": "json_object"})", chat).constraint->kind ==
          Kind::kJsonObject);
    CHECK(!parsed(R"("response_format": {"type": "text"})", chat).constraint.has_value());
    CHECK(!parsed(R"("structured_outputs": {"json_object": false})", chat).constraint.has_value());
  }
  const Refusal two = RefusalOf({{"prompt", "1"}, {"guided_regex", "a"}, {"guided_json", "{}"}});
  CHECK(two.param == "guided_json");
  CHECK(absl::StrContains(two.message, "guided_regex"));
  CHECK(RefusalOf({{"prompt", "1"}, {"guided_grammar", "a"}}).param == "guided_grammar");
  // Objects in order find their keys slowly: a schema of very many is refused, and nothing but the
  // schema is read in order.
  Json many = Json::object();
  for (int i = 0; i < 60000; ++i) many[std::to_string(i)] = 1;
  CHECK(absl::StrContains(RefusalOf({{"prompt", "1"}, {"guided_json", many}}).message, "4096"));
  CHECK(RefusalOf({{"prompt", "1"}, {"guided_json", "{}"}, {"many", many}}).param == "many");
}

TEST_CASE("a completion's fields") {
  const Json body{{"model", "m"},
                  {"prompt", "1+2="},
                  {"max_tokens", 7},
                  {"temperature", 0.5},
                  {"top_p", 0.25},
                  {"top_k", -1},
                  {"min_p", 0.125},
                  {"n", 3},
                  {"seed", -1},
                  {"stop", "\n"},
                  {"presence_penalty", 1.5},
                  {"frequency_penalty", -1.5},
                  {"repetition_penalty", 1.25},
                  {"logit_bias", {{"5", -100}, {"6", 2.5}}},
                  {"logprobs", 2},
                  {"min_tokens", 1},
                  {"stop_token_ids", {9}},
                  {"user", "somebody"},
                  {"suffix", nullptr},
                  {"best_of", 3},
                  {"stream", true},
                  {"stream_options", {{"include_usage", true}}}};
  const auto r = ParseCompletion(body.dump(), Prompts());
  INFO(r.status());
  REQUIRE(r.ok());
  CHECK(r->model == "m");
  REQUIRE(r->prompts.size() == 1);
  CHECK(r->prompts[0] == *Prompts().EncodeRaw("1+2=", true));
  const engine::SamplingParams& s = r->sampling;
  CHECK(s.max_tokens == 7);
  CHECK(s.temperature == 0.5f);
  CHECK(s.top_p == 0.25f);
  CHECK(s.top_k == 0);
  CHECK(s.min_p == 0.125f);
  CHECK(s.presence_penalty == 1.5f);
  CHECK(s.frequency_penalty == -1.5f);
  CHECK(s.repetition_penalty == 1.25f);
  CHECK(s.logit_bias == std::vector<std::pair<int32_t, float>>{{5, -100.0f}, {6, 2.5f}});
  CHECK(s.stop_strings == std::vector<std::string>{"\n"});
  CHECK(s.stop_ids == std::vector<int32_t>{9});
  CHECK(s.min_tokens == 1);
  CHECK(r->n == 3);
  CHECK(r->seed == UINT64_MAX);
  CHECK(r->logprobs);
  CHECK(r->top_logprobs == 2);
  CHECK(r->stream);
  CHECK(r->include_usage);
}

TEST_CASE("prompts come as text, ids, or lists of them") {
  const auto parse = [](const Json& prompt) {
    auto r = ParseCompletion(Json{{"prompt", prompt}, {"echo", true}}.dump(), Prompts());
    REQUIRE(r.ok());
    return *std::move(r);
  };
  const std::vector<int32_t> ids = *Prompts().EncodeRaw("12", true);
  CHECK(parse("12").prompts == std::vector<std::vector<int32_t>>{ids});
  CHECK(parse(ids).prompts == std::vector<std::vector<int32_t>>{ids});
  CHECK(parse(ids).prompt_texts == std::vector<std::string>{"12"});
  CHECK(parse({"12", "12"}).prompts == std::vector<std::vector<int32_t>>{ids, ids});
  CHECK(parse({ids, ids}).prompts == std::vector<std::vector<int32_t>>{ids, ids});
  const auto only = ParseCompletion(R"({"prompt":"1","echo":true,"max_tokens":0})", Prompts());
  REQUIRE(only.ok());
  CHECK(only->prompt_only);
}

TEST_CASE("a chat's messages") {
  const Json body{
      {"messages",
       {{{"role", "developer"}, {"content", "Add."}},
        {{"role", "user"},
         {"content", {{{"type", "text"}, {"text", "1+"}}, {{"type", "text"}, {"text", "2"}}}}}}},
      {"max_completion_tokens", 5},
      {"logprobs", true},
      {"top_logprobs", 4},
      {"response_format", {{"type", "text"}}},
      {"tool_choice", "none"}};
  const auto r = ParseChat(body.dump(), Prompts());
  INFO(r.status());
  REQUIRE(r.ok());
  CHECK(r->chat);
  CHECK(r->prompts[0] == *Prompts().EncodeMessages({{"system", "Add."}, {"user", "1+2"}}));
  CHECK(r->sampling.max_tokens == 5);
  CHECK(r->top_logprobs == 4);
}

TEST_CASE("what is refused is named") {
  CHECK(RefusalOf({{"prompt", "1"}, {"temprature", 1}}).param == "temprature");
  CHECK(RefusalOf({{"max_tokens", 1}}).param == "prompt");
  CHECK(RefusalOf({{"prompt", ""}}).param == "prompt");
  CHECK(RefusalOf({{"prompt", Json::array()}}).param == "prompt");
  CHECK(RefusalOf({{"prompt", {1, "a"}}}).param == "prompt");
  CHECK(RefusalOf({{"prompt", {1, 4294967297}}}).param == "prompt");
  CHECK(RefusalOf({{"prompt", {1, UINT64_MAX}}}).param == "prompt");
  CHECK(RefusalOf({{"prompt", "1"}, {"stop_token_ids", {INT64_MAX}}}).param == "stop_token_ids");
  // More than 64 bits hold isn't quoted as if it had been written so.
  const auto huge_n = ParseCompletion(R"({"prompt": "1", "n": 100000000000000000000})", Prompts());
  CHECK(absl::StrContains(huge_n.status().message(), "found about 1e+20"));
  CHECK(RefusalOf({{"prompt", "1"}, {"n", UINT64_MAX}}).message.find("18446744073709551615") !=
        std::string::npos);
  CHECK(RefusalOf({{"prompt", "1"}, {"max_tokens", 0}}).param == "max_tokens");
  CHECK(RefusalOf({{"prompt", "1"}, {"n", 0}}).param == "n");
  CHECK(RefusalOf({{"prompt", "1"}, {"n", 1.5}}).param == "n");
  CHECK(RefusalOf({{"prompt", "1"}, {"seed", 1e30}}).param == "seed");
  CHECK(RefusalOf({{"prompt", "1"}, {"temperature", "hot"}}).param == "temperature");
  CHECK(RefusalOf({{"prompt", "1"}, {"temperature", 1e-300}}).param == "temperature");
  CHECK(RefusalOf({{"prompt", "1"}, {"temperature", 1e300}}).param == "temperature");
  CHECK(RefusalOf({{"prompt", "1"}, {"stop", {1}}}).param == "stop");
  for (const char* id : {"x", " 5", "05", "+5", "5 ", "99999999999", ""}) {
    CHECK(RefusalOf({{"prompt", "1"}, {"logit_bias", {{id, 1}}}}).param == "logit_bias");
  }
  Json many = Json::object();
  for (int i = 0; i < 5000; ++i) many[std::to_string(i)] = 1;
  CHECK(RefusalOf({{"prompt", "1"}, {"logit_bias", many}}).param == "logit_bias");
  CHECK(RefusalOf({{"prompt", "1"}, {"best_of", 2}}).param == "best_of");
  CHECK(RefusalOf({{"prompt", "1"}, {"stream_options", {{"include_usage", true}}}}).param ==
        "stream_options");
  CHECK(RefusalOf({{"prompt", std::vector<std::string>(65, "1")}, {"n", 2}}).param == "prompt");
  CHECK(RefusalOf({{"messages", Json::array()}}, true).param == "messages");
  CHECK(RefusalOf({{"messages", {{{"role", "user"}}}}}, true).message.find("messages[0].content") !=
        std::string::npos);
  CHECK(RefusalOf({{"messages", {{{"content", "a"}}}}}, true).message.find("messages[0].role") !=
        std::string::npos);
  CHECK(
      RefusalOf({{"messages", {{{"role", "user"}, {"content", {{{"type", "image_url"}}}}}}}}, true)
          .param == "messages");
  const Json user{{{"role", "user"}, {"content", "1"}}};
  CHECK(RefusalOf({{"messages", user}, {"tools", {{{"type", "function"}}}}}, true).param ==
        "tools");
  CHECK(RefusalOf({{"messages", user}, {"top_logprobs", 2}}, true).param == "top_logprobs");
}

TEST_CASE("fields that change nothing are taken, with any other value refused by name") {
  const Json user{{{"role", "user"}, {"content", "1"}}};
  const Json neutral{{"best_of", 1},
                     {"use_beam_search", false},
                     {"length_penalty", 1.0},
                     {"skip_special_tokens", true},
                     {"spaces_between_special_tokens", true},
                     {"include_stop_str_in_output", false},
                     {"prompt_logprobs", 0},
                     {"logits_processors", nullptr},
                     {"bad_words", Json::array()},
                     {"allowed_token_ids", nullptr},
                     {"truncate_prompt_tokens", nullptr},
                     {"guided_grammar", nullptr},
                     {"user", "u"},
                     {"store", false},
                     {"metadata", {{"a", "b"}}},
                     {"service_tier", "auto"},
                     {"echo", false}};
  Json completion = neutral, chat = neutral;
  completion.update({{"prompt", "1"}, {"suffix", ""}, {"add_special_tokens", true}});
  chat.update({{"messages", user},
               {"tools", Json::array()},
               {"tool_choice", "auto"},
               {"parallel_tool_calls", true},
               {"functions", nullptr},
               {"modalities", {"text"}},
               {"add_generation_prompt", true},
               {"chat_template_kwargs", Json::object()}});
  REQUIRE_OK(ParseCompletion(completion.dump(), Prompts()));
  REQUIRE_OK(ParseChat(chat.dump(), Prompts()));
  const auto refused = [&](const std::string& key, const Json& value, bool in_chat) {
    Json body = in_chat ? Json{{"messages", user}} : Json{{"prompt", "1"}};
    body[key] = value;
    INFO(key);
    CHECK(RefusalOf(body, in_chat).param == key);
  };
  for (const bool in_chat : {false, true}) {
    refused("use_beam_search", true, in_chat);
    refused("skip_special_tokens", false, in_chat);
    refused("prompt_logprobs", 5, in_chat);
    refused("logits_processors", {"x"}, in_chat);
    refused("bad_words", {"x"}, in_chat);
    refused("truncate_prompt_tokens", 5, in_chat);
    refused("best_of", 2, in_chat);
  }
  refused("suffix", "x", false);
  refused("tool_choice", "required", true);
  refused("echo", true, true);
  refused("continue_final_message", true, true);
}

TEST_CASE("roles, and what an assistant may leave unsaid") {
  const auto parse = [](const Json& messages) {
    return ParseChat(Json{{"messages", messages}}.dump(), Prompts());
  };
  const Json user{{"role", "user"}, {"content", "1"}};
  REQUIRE_OK(parse({user, {{"role", "assistant"}, {"content", nullptr}}, user}));
  REQUIRE_OK(parse({user, {{"role", "assistant"}}, user}));
  CHECK_FALSE(parse({{{"role", "user"}, {"content", nullptr}}}).ok());
  for (const char* role : {"tool", "wizard", "User", "a\x1b[2J"}) {
    const auto refused = parse({{{"role", role}, {"content", "1"}}});
    INFO(refused.status());
    CHECK(ParamOf(refused.status()) == "messages");
    CHECK(absl::StrContains(refused.status().message(),
                            "expected system, developer, user or assistant"));
    CHECK_FALSE(absl::StrContains(refused.status().message(), "\x1b"));
  }
}

TEST_CASE("a key that comes twice is refused") {
  for (const char* body :
       {R"({"prompt": "1", "temperature": 0, "temperature": 1})",
        R"({"prompt": "1", "guided_json": {"type": "object", "type": "null"}})"}) {
    const auto parsed = ParseCompletion(body, Prompts());
    INFO(parsed.status());
    CHECK(absl::StrContains(parsed.status().message(), "comes twice"));
  }
}

TEST_CASE("texts and conversations as ids, and back") {
  const auto answer = [](const Json& body) {
    auto tokens = Tokenize(body.dump(), Prompts(), 64);
    INFO(tokens.status());
    REQUIRE(tokens.ok());
    return tokens->json;
  };
  const std::vector<int32_t> ids = *Prompts().EncodeRaw("1+2=", true);
  const Json text = answer({{"prompt", "1+2="}});
  CHECK(text["tokens"] == Json(ids));
  CHECK(text["count"] == ids.size());
  CHECK(text["max_model_len"] == 64);
  CHECK(text["token_strs"].is_null());
  CHECK(answer({{"prompt", "1+2="}, {"return_token_strs", true}})["token_strs"].size() ==
        ids.size());
  CHECK(answer({{"messages", {{{"role", "user"}, {"content", "1+2="}}}}})["tokens"] ==
        Json(*Prompts().EncodeMessages({{"user", "1+2="}})));
  const auto back = Detokenize(Json{{"tokens", ids}, {"model", "m"}}.dump(), Prompts());
  REQUIRE_OK(back);
  CHECK(back->json["prompt"] == "1+2=");
  CHECK(back->model == "m");
  const auto fault = [](const absl::StatusOr<TokensAnswer>& tokens) {
    CHECK(absl::IsInvalidArgument(tokens.status()));
    return ParamOf(tokens.status());
  };
  CHECK(fault(Tokenize("{}", Prompts(), 64)) == "prompt");
  CHECK(fault(Tokenize(R"({"prompt": "1", "messages": []})", Prompts(), 64)) == "prompt");
  CHECK(fault(Tokenize(R"({"prompt": "1", "add_generation_prompt": false})", Prompts(), 64)) ==
        "add_generation_prompt");
  CHECK(fault(Detokenize("{}", Prompts())) == "tokens");
  CHECK(fault(Detokenize(R"({"tokens": [1, 99999999]})", Prompts())) == "tokens");
  CHECK(fault(Detokenize(R"({"tokens": [-1]})", Prompts())) == "tokens");
}

TEST_CASE("a text of millions of tokens is not told as ids") {
  const auto tokenize = [](size_t num_bytes) {
    return Tokenize(Json{{"prompt", std::string(num_bytes, '1')}}.dump(), Prompts(), 256).status();
  };
  CHECK(tokenize(100000).ok());
  const absl::Status status = tokenize((1 << 20) + 1);
  CHECK(absl::IsInvalidArgument(status));
  CHECK(ParamOf(status) == "prompt");
}

TEST_CASE("bodies that are no JSON objects") {
  const auto message = [](const std::string& body) {
    const auto parsed = ParseCompletion(body, Prompts());
    REQUIRE(!parsed.ok());
    return std::string(parsed.status().message());
  };
  CHECK(absl::StrContains(message("{\"prompt\": "), "column 12"));
  CHECK(absl::StrContains(message("{\"prompt\": \"\xC3\x28\"}"), "UTF-8"));
  CHECK(absl::StrContains(message("{\"prompt\": \"\xE6\x97\"}"), "UTF-8"));
  CHECK(absl::StrContains(message("[1]"), "array"));
  CHECK(absl::StrContains(message(std::string(1 << 20, '[')), "deep"));
  CHECK(absl::StrContains(message("{\"temperature\": 1e999}"), "1e999"));
  CHECK(!message("").empty());
  // The answer that quotes it is valid JSON.
  CHECK(Json::parse(ErrorJson(ParseCompletion("\xFF\xFE", Prompts()).status()))["error"]["type"] ==
        "invalid_request_error");
}

TEST_CASE("errors have OpenAI's form") {
  const Json error = Json::parse(ErrorJson(ParamError("n", "too many")));
  CHECK(error == Json{{"error",
                       {{"message", "too many"},
                        {"type", "invalid_request_error"},
                        {"param", "n"},
                        {"code", nullptr}}}});
  CHECK(HttpStatusOf(absl::InvalidArgumentError("")) == 400);
  CHECK(HttpStatusOf(absl::NotFoundError("")) == 404);
  CHECK(HttpStatusOf(absl::ResourceExhaustedError("")) == 429);
  CHECK(HttpStatusOf(absl::UnavailableError("")) == 503);
  CHECK(HttpStatusOf(absl::InternalError("")) == 500);
  CHECK(HttpStatusOf(absl::CancelledError("")) == 499);
  // What is quoted is short, and whole characters.
  CHECK(Brief("abc", 3) == "abc");
  CHECK(Brief("abcd", 3) == "abc\u2026");
  CHECK(Brief("ab\u00e4d", 3) == "ab\u2026");
  const std::string huge(1 << 20, 'x');
  CHECK(ErrorJson(ParamError(huge, huge)).size() < 2000);
  CHECK(RefusalOf({{"prompt", "1"}, {huge, 1}}).message.size() < 200);
  CHECK(RefusalOf({{"prompt", "1"}, {"logit_bias", {{huge, 1}}}}).message.size() < 200);
}

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
  request.top_logprobs = 1;
  request.prompts = {{10, 11}};
  OpenAiWriter writer(request, Prompts().tokenizer(), {.id = "x", .model = "m"});
  std::string stream = writer.Begin();
  CHECK(writer.TakeChunks().empty());
  writer.Add(0, Tokens(0, {40}, "\xC3\xA4"));
  stream += writer.TakeChunks();
  writer.Add(0, Tokens(0, {41}, "b"));
  writer.Add(0, End(SampleUpdate(), engine::FinishReason::kStop));
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
  update.prompt_logprobs = {{-1.0f, {{7, -0.25f}}}, {-2.0f, {{42, -2.0f}}}};
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
    first.prompt_logprobs.push_back({-1.5F, std::move(top)});
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
