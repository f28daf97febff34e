#include "cli/conversation.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "base/testing.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;

Json Plain(const std::string& line, const std::vector<std::string>& answers) {
  const auto plain = PlainLine(line, answers);
  REQUIRE_OK(plain);
  return Json::parse(*plain);
}
std::string Refusal(const std::string& line, const std::vector<std::string>& answers) {
  const auto plain = PlainLine(line, answers);
  REQUIRE_FALSE(plain.ok());
  return std::string(plain.status().message());
}
const std::vector<std::string> kOne = {"completion"}, kPair = {"chosen", "rejected"};
const Json kHi = Json::parse(R"([{"role":"user","content":"hi"}])");

TEST_CASE("lines with texts stay") {
  const std::string line = R"({"prompt":"a","completion":"b","answer":3})";
  CHECK(Plain(line, kOne) == Json::parse(line));
}

TEST_CASE("conversations become a prompt and texts") {
  const std::string asked = R"({"role":"user","content":"hi"})";
  const std::string said = R"({"role":"assistant","content":"ho"})";
  const std::string other = R"({"role":"assistant","content":"no"})";
  CHECK(Plain(R"({"messages":[)" + asked + "," + said + "]}", kOne) ==
        Json{{"messages", kHi}, {"completion", "ho"}});
  CHECK(Plain(R"({"prompt":[)" + asked + R"(],"completion":[)" + said + "]}", kOne) ==
        Json{{"messages", kHi}, {"completion", "ho"}});
  const Json pair = {{"messages", kHi}, {"chosen", "ho"}, {"rejected", "no"}};
  CHECK(Plain(R"({"prompt":[)" + asked + R"(],"chosen":[)" + said + R"(],"rejected":[)" + other +
                  "]}",
              kPair) == pair);
  CHECK(Plain(R"({"chosen":[)" + asked + "," + said + R"(],"rejected":[)" + asked + "," + other +
                  "]}",
              kPair) == pair);
}

TEST_CASE("what is no dataset line is refused with the reason") {
  CHECK_THAT(Refusal("\xff", kOne), Catch::Contains("not valid JSON"));
  CHECK_THAT(Refusal("[1]", kOne), Catch::Contains("JSON object"));
  CHECK_THAT(Refusal(R"({"prompt":"x","completion":"a","completion":"b"})", kOne),
             Catch::Contains("the key 'completion' comes twice"));
  CHECK_THAT(Refusal(R"({"messages":[{"role":"user","content":"x"},
                         {"role":"assistant","content":"","tool_calls":[]}]})",
                     kOne),
             Catch::Contains("`tool_calls`"));
  CHECK_THAT(Refusal(R"({"text":"x"})", kOne), Catch::Contains("`completion`"));
  CHECK_THAT(Refusal(R"({"messages":[{"role":"user","content":"x"}]})", kOne),
             Catch::Contains("the last is the assistant's"));
  CHECK_THAT(Refusal(R"({"prompt":"x","chosen":"a"})", kPair), Catch::Contains("`rejected`"));
  CHECK_THAT(
      Refusal(R"({"chosen":[{"role":"user","content":"1"},{"role":"assistant","content":"a"}],
                         "rejected":[{"role":"user","content":"2"},
                                     {"role":"assistant","content":"b"}]})",
              kPair),
      Catch::Contains("different prompts"));
}
}  // namespace
}  // namespace stretto::cli
