// Bodies as a whole: what isn't JSON, is too large or takes too long, of the OpenAI-compatible API.
#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/testing.h"
#include "services/generator/openai/openai_testing.h"
#include "services/generator/openai/openai_tokens.h"
#include "services/generator/openai/openai_writer.h"

namespace stretto::services {
TEST_CASE("a key that comes twice is refused") {
  for (const char* body :
       {R"({"prompt": "1", "temperature": 0, "temperature": 1})",
        R"({"prompt": "1", "guided_json": {"type": "object", "type": "null"}})"}) {
    const auto parsed = ParseCompletion(body, Prompts());
    INFO(parsed.status());
    CHECK(absl::StrContains(parsed.status().message(), "comes twice"));
  }
}

TEST_CASE("a number that is out of range is named by its field") {
  const std::string digits(400, '9');
  const auto refused = [](const std::string& field, const std::string& param) {
    const auto parsed = ParseCompletion("{\"prompt\": \"1\", " + field + "}", Prompts());
    INFO(field << " " << parsed.status());
    CHECK(ParamOf(parsed.status()) == param);
    CHECK(absl::StrContains(parsed.status().message(), "'" + param + "'"));
    CHECK(absl::StrContains(parsed.status().message(), "out of range"));
    CHECK(parsed.status().message().size() < 200);
    return std::string(parsed.status().message());
  };
  refused("\"max_tokens\": 1e400", "max_tokens");
  refused("\"temperature\": -1e400", "temperature");
  CHECK(absl::StrContains(refused(R"("logit_bias": {"5": 1, "6": )" + digits + "}", "logit_bias"),
                          "/logit_bias/6"));
  CHECK(absl::StrContains(
      refused(R"("guided_json": {"enum": [{"a": 1}, [2, )" + digits + "]]}", "guided_json"),
      "/guided_json/enum/1/1"));
  CHECK(absl::StrContains(refused("\"stop_token_ids\": [1e400]", "stop_token_ids"),
                          "/stop_token_ids/0"));
  CHECK(ParamOf(ParseCompletion("[1e400]", Prompts()).status()).empty());
}

// Reading took the square of the number of objects: minutes.
TEST_CASE("hundreds of thousands of objects are read in proportion to their number") {
  const int64_t start_ms = Clock::Real().NowNs() / 1'000'000;
  std::string list, message = R"({"role":"user","content":"1"})", messages = message;
  for (int i = 0; i < 400'000; ++i) list += "{},";
  for (int i = 0; i < 150'000; ++i) messages += "," + message;
  const auto schema =
      ParseCompletion(R"({"prompt": "1", "guided_json": {"enum": [)" + list + "1]}}", Prompts());
  REQUIRE_OK(schema);
  CHECK(schema->constraint->text.size() == list.size() + 12);
  const auto chat = ParseChat("{\"messages\": [" + messages + "]}", Prompts());
  REQUIRE_OK(chat);
  CHECK(chat->prompts[0].size() > 150'000);
  CHECK(Clock::Real().NowNs() / 1'000'000 - start_ms < 20'000);
}

TEST_CASE("reading ends when nobody wants it any more") {
  Json body{{"messages", std::vector<Json>(5000, {{"role", "user"}, {"content", "1"}})}};
  int num_asked = 0;
  const ReadBounds bounds{
      .check = [&] { return ++num_asked < 4 ? absl::OkStatus() : absl::CancelledError("gone"); }};
  CHECK(absl::IsCancelled(ParseChat(body.dump(), Prompts(), bounds).status()));
  CHECK(num_asked == 4);
  CHECK(absl::IsCancelled(Tokenize(body.dump(), Prompts(), 64, bounds).status()));
}

TEST_CASE("a conversation is refused by its number of messages only where none of them fits") {
  auto files = engine::OpenModel(std::string(STRETTO_SOURCE_DIR) + "/examples/tiny-model");
  REQUIRE_OK(files);
  const auto chatml =
      engine::PromptEncoder::Open(*files, {.chat_format = "chatml", .system_prompt = {}});
  REQUIRE_OK(chatml);
  Json body{{"messages", std::vector<Json>(300, {{"role", "user"}, {"content", ""}})}};
  const auto refusal = [&](int64_t max_model_len) {
    const auto parsed = ParseChat(body.dump(), **chatml, {.max_model_len = max_model_len});
    CHECK(ParamOf(parsed.status()) == "messages");
    return std::string(parsed.status().message());
  };
  // What isn't refused so gets to the tokenizer, which here has no token for the format's markers.
  CHECK(absl::StrContains(refusal(600), "<|im_start|>"));
  CHECK(absl::StrContains(refusal(599), "300 messages are at least 599 tokens"));
  body["truncate_prompt_tokens"] = 5;
  CHECK(absl::StrContains(refusal(599), "<|im_start|>"));
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
}  // namespace stretto::services
