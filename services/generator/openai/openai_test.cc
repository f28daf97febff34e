// The domain code of the OpenAI-compatible API: bodies to requests.
#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing.h"
#include "engine/inference/validation.h"
#include "services/generator/openai/openai_fields.h"
#include "services/generator/openai/openai_testing.h"
#include "services/generator/openai/openai_tokens.h"
#include "services/generator/openai/openai_writer.h"

namespace stretto::services {
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
                  {"seed", -2},
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
  CHECK(r->seed == UINT64_MAX - 1);
  CHECK(r->max_tokens_param == "max_tokens");
  CHECK(r->logprobs);
  CHECK(r->top_logprobs == 2);
  CHECK(r->stream);
  CHECK(r->include_usage);
}

TEST_CASE("a seed of -1 is none, as vLLM's clients mean it") {
  const auto seed = [](const Json& value) {
    return ParseCompletion(Json{{"prompt", "1"}, {"seed", value}}.dump(), Prompts())->seed;
  };
  CHECK_FALSE(seed(-1).has_value());
  CHECK_FALSE(seed(nullptr).has_value());
  CHECK(seed(0) == 0);
  CHECK(seed(INT64_MIN) == uint64_t{1} << 63);
}

TEST_CASE("a max_tokens that is given stays, without one the context decides") {
  const auto tokens = [](const Json& more, bool chat = false) {
    Json body = chat ? Json{{"messages", {{{"role", "user"}, {"content", "12345"}}}}}
                     : Json{{"prompt", "12345"}};
    body.update(more);
    const auto r =
        chat ? ParseChat(body.dump(), Prompts()) : ParseCompletion(body.dump(), Prompts());
    REQUIRE_OK(r);
    return SamplingOf(*r, 0, 12).max_tokens;
  };
  CHECK(tokens(Json::object()) == 7);
  CHECK(tokens({{"max_tokens", nullptr}}) == 7);
  CHECK(tokens({{"max_tokens", 5}}) == 5);
  CHECK(tokens({{"max_tokens", 5.0}}) == 5);
  CHECK(RefusalOf({{"prompt", "1"}, {"max_tokens", 5.5}}).param == "max_tokens");
  CHECK(RefusalOf({{"prompt", "1"}, {"max_tokens", 1e300}}).param == "max_tokens");
  CHECK(tokens({{"max_tokens", 1000}}) == 1000);  // which the engine refuses
  CHECK(tokens(Json::object(), true) == 0);       // what the context leaves
  CHECK(tokens({{"max_completion_tokens", 1000}}, true) == 1000);
}

TEST_CASE("what the engine refuses is told in the body's words") {
  OpenAiRequest request;
  request.chat = true;
  request.max_tokens_param = "max_completion_tokens";
  const auto told = [&](const char* field, const char* message) {
    const absl::Status status = InFieldsOfBody(engine::RefuseField(field, message), request);
    CHECK(absl::StrContains(status.message(), absl::StrCat("'", ParamOf(status), "': ")));
    return std::string(status.message());
  };
  CHECK(told("stop_strings", "stop_strings has 33 entries") == "'stop': stop has 33 entries");
  CHECK(told("stop_ids", "stop_ids[0] is -7") == "'stop_token_ids': stop_token_ids[0] is -7");
  CHECK(told("prompt_ids", "prompt_ids[3] is 61") == "'messages': messages[3] is 61");
  CHECK(told("min_tokens", "min_tokens is 5 and max_tokens 3") ==
        "'min_tokens': min_tokens is 5 and max_completion_tokens 3");
  const absl::Status other = absl::UnavailableError("stop_ids");
  CHECK(InFieldsOfBody(other, request) == other);
}

TEST_CASE("the last tokens of a prompt that is cut stay") {
  const auto cut = [](int keep, const Json& more = Json::object()) {
    Json body{{"prompt", "123456789"}, {"truncate_prompt_tokens", keep}, {"echo", true}};
    body.update(more);
    auto r = ParseCompletion(body.dump(), Prompts());
    REQUIRE_OK(r);
    TruncatePrompts(8, Prompts().tokenizer(), &*r);
    CHECK(Prompts().tokenizer().Decode(r->prompts[0], false) == r->prompt_texts[0]);
    return r->prompt_texts[0];
  };
  CHECK(cut(4) == "6789");
  CHECK(cut(100) == "123456789");
  CHECK(cut(-1) == "3456789");  // a token must follow
  CHECK(cut(-1, {{"max_tokens", 6}}) == "89");
  CHECK(RefusalOf({{"prompt", "1"}, {"truncate_prompt_tokens", 0}}).param ==
        "truncate_prompt_tokens");
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
                     {"prompt_logprobs", nullptr},
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
    refused("prompt_logprobs", 21, in_chat);
    refused("prompt_logprobs", -1, in_chat);
    refused("logits_processors", {"x"}, in_chat);
    refused("bad_words", {"x"}, in_chat);
    refused("best_of", 2, in_chat);
  }
  refused("suffix", "x", false);
  refused("tool_choice", "required", true);
  refused("echo", true, true);
  const auto kwargs = [&](const Json& value) {
    return RefusalOf({{"messages", user}, {"chat_template_kwargs", value}}, true);
  };
  CHECK(kwargs({{"enable_thinking", true}}).message ==
        "'chat_template_kwargs.enable_thinking': the chat format none has "
        "no thinking (enable_thinking is known)");
  CHECK(kwargs({{"thinking", true}}).param == "chat_template_kwargs");
  CHECK(absl::StrContains(kwargs({{"thinking", true}}).message, "enable_thinking is known"));
  // Each value is told once.
  CHECK(RefusalOf({{"prompt", "1"}, {"best_of", 2}}).message ==
        "'best_of': choices aren't drawn beyond 'n': expected 1, or leave it out");
}

TEST_CASE("how a conversation ends") {
  const engine::PromptEncoder& prompts = Prompts();
  const std::vector<engine::ChatMessage> messages{{"user", "1+1"}, {"assistant", "is \n"}};
  Json body{
      {"messages",
       {{{"role", "user"}, {"content", "1+1"}}, {{"role", "assistant"}, {"content", "is \n"}}}}};
  const auto parsed = [&](const Json& more) {
    Json whole = body;
    whole.update(more);
    const auto r = ParseChat(whole.dump(), prompts);
    REQUIRE_OK(r);
    return r->prompts[0];
  };
  const auto encoded = [&](engine::ChatEnd end) {
    return *prompts.EncodeMessages(messages, {.end = end, .enable_thinking = {}});
  };
  CHECK(parsed(Json::object()) == encoded(engine::ChatEnd::kAnswer));
  CHECK(parsed({{"add_generation_prompt", false}}) == encoded(engine::ChatEnd::kMessage));
  const auto open = encoded(engine::ChatEnd::kOpenMessage);
  CHECK(parsed({{"continue_final_message", true}}) == open);
  CHECK(parsed({{"continue_final_message", true}, {"add_generation_prompt", false}}) == open);
  CHECK(parsed({{"chat_template_kwargs", {{"enable_thinking", false}}}}) ==
        encoded(engine::ChatEnd::kAnswer));
  Json both = body;
  both.update({{"continue_final_message", true}, {"add_generation_prompt", true}});
  CHECK(RefusalOf(both, true).param == "continue_final_message");
  body.update({{"continue_final_message", true}});
  CHECK(Tokenize(body.dump(), prompts, 64)->json["tokens"] == Json(open));
  Json empty{{"messages", {{{"role", "user"}, {"content", " "}}}},
             {"continue_final_message", true}};
  CHECK(absl::StrContains(RefusalOf(empty, true).message, "nothing to go on"));
}

TEST_CASE("roles, and what an assistant may leave unsaid") {
  const auto parse = [](const Json& messages) {
    return ParseChat(Json{{"messages", messages}}.dump(), Prompts());
  };
  const Json user{{"role", "user"}, {"content", "1"}};
  REQUIRE_OK(parse({user, {{"role", "assistant"}, {"content", nullptr}}, user}));
  REQUIRE_OK(parse({user, {{"role", "assistant"}}, user}));
  REQUIRE_OK(parse({user, {{"role", "assistant"}, {"annotations", Json::array()}}, user}));
  CHECK_FALSE(parse({user, {{"role", "assistant"}, {"annotations", {1}}}, user}).ok());
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

TEST_CASE("fields of objects are named once") {
  const Json user{{{"role", "user"}, {"content", "1"}}};
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, Json>>{{"chat_template_kwargs", {{"a", 1}}},
                                                 {"response_format", {{"type", "text"}, {"a", 1}}},
                                                 {"structured_outputs", {{"a", 1}}},
                                                 {"stream_options", {{"a", 1}}}}) {
    const Refusal refusal = RefusalOf({{"messages", user}, {"stream", true}, {key, value}}, true);
    INFO(refusal.message);
    CHECK(refusal.param == key);
    CHECK(absl::StartsWith(refusal.message, "'" + key + ".a': "));
  }
}

TEST_CASE("two limits of an answer's tokens must agree") {
  Json body{{"messages", {{{"role", "user"}, {"content", "1"}}}},
            {"max_tokens", 5},
            {"max_completion_tokens", 5}};
  CHECK(ParseChat(body.dump(), Prompts()).ok());
  body["max_completion_tokens"] = 6;
  const Refusal refusal = RefusalOf(body, true);
  CHECK(refusal.param == "max_completion_tokens");
  CHECK(absl::StrContains(refusal.message, "is 6 beside a 'max_tokens' of 5"));
}

TEST_CASE("texts and conversations as ids, and back") {
  const auto answer = [](const Json& body) {
    auto tokens = Tokenize(body.dump(), Prompts(), 64);
    INFO(tokens.status());
    REQUIRE(tokens.ok());
    return tokens->json;
  };
  CHECK(ParamOf(Tokenize(R"({"prompt": ""})", Prompts(), 64).status()) == "prompt");
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
  const auto back = [](size_t num) {
    return Detokenize(Json{{"tokens", std::vector<int32_t>(num, 21)}}.dump(), Prompts()).status();
  };
  CHECK(back(100000).ok());
  CHECK(ParamOf(back((1 << 20) + 1)) == "tokens");
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
}  // namespace stretto::services
