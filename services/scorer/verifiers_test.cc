#include "services/scorer/verifiers.h"

#include <catch2/catch.hpp>

#include "base/testing.h"
#include "nlohmann/json.hpp"
#include "services/common/numbers.h"

namespace stretto::services {
namespace {
using nlohmann::json;

std::vector<std::string> Texts(absl::string_view text) {
  std::vector<std::string> texts;
  for (const NumberInText& number : FindNumbers(text)) texts.push_back(number.text);
  return texts;
}
using List = std::vector<std::string>;

absl::StatusOr<double> Run(const RewardSpec& spec, const std::string& completion,
                           const json& line = json::object(), int64_t num_tokens = 0) {
  auto verifier = MakeVerifier(spec, 100);
  REQUIRE_OK(verifier);
  return (*verifier)->Verify({.completion = completion, .num_tokens = num_tokens, .line = &line});
}

double Reward(const RewardSpec& spec, const std::string& completion,
              const json& line = json::object(), int64_t num_tokens = 0) {
  const absl::StatusOr<double> reward = Run(spec, completion, line, num_tokens);
  REQUIRE_OK(reward);
  return *reward;
}

RewardSpec Spec(const std::string& type) {
  RewardSpec spec;
  spec.type = type;
  return spec;
}
}  // namespace

TEST_CASE("numbers are found as people write them") {
  CHECK(Texts("The answer is 12.") == List{"12"});
  CHECK(Texts("12,345,678 and 1,23 and 1234,567") == List{"12345678", "1", "23", "1234", "567"});
  CHECK(Texts("1,2345") == List{"1", "2345"});
  CHECK(Texts("10-5=5") == List{"10", "5", "5"});
  CHECK(Texts("x = -5, (3)-4, +7") == List{"-5", "3", "4", "7"});
  CHECK(Texts("\xe2\x88\x92"
              "8 degrees") == List{"-8"});
  CHECK(Texts("3.50 .5 5. 2e3 2e 1.5E-3") == List{"3.50", "0.5", "5", "2e3", "2", "1.5E-3"});
  CHECK(Texts("v1.2.3") == List{"1.2", "0.3"});
  CHECK(Texts("--5") == List{"-5"});
  CHECK(Texts("") == List{});
  CHECK(Texts("no digits - at all") == List{});
  CHECK(Texts(std::string("7\0008", 3)) == List{"7", "8"});
}

TEST_CASE("a text that is one number and nothing else") {
  CHECK(OnlyNumber(" -1,000\n") == absl::optional<std::string>("-1000"));
  CHECK(OnlyNumber("5").has_value());
  CHECK(!OnlyNumber("5.").has_value());
  CHECK(!OnlyNumber("5 6").has_value());
  CHECK(!OnlyNumber("= 5").has_value());
  CHECK(!OnlyNumber("").has_value());
}

TEST_CASE("integers are compared exactly at any size") {
  CHECK(CanonicalInteger("007") == absl::optional<std::string>("7"));
  CHECK(CanonicalInteger("-0") == absl::optional<std::string>("0"));
  CHECK(CanonicalInteger("5.00") == absl::optional<std::string>("5"));
  CHECK(CanonicalInteger("2e3") == absl::optional<std::string>("2000"));
  CHECK(CanonicalInteger("2.5e1") == absl::optional<std::string>("25"));
  CHECK(CanonicalInteger("250e-1") == absl::optional<std::string>("25"));
  CHECK(CanonicalInteger("0e999") == absl::optional<std::string>("0"));
  CHECK(!CanonicalInteger("2.5").has_value());
  CHECK(!CanonicalInteger("1e-1").has_value());
  CHECK(!CanonicalInteger("1e99999999999999999999").has_value());
  CHECK(!CanonicalInteger("1e4001").has_value());
  const json line = {{"answer", "123456789012345678901234567890"}};
  CHECK(Reward(Spec("integer"), "123456789012345678901234567890", line) == 1.0);
  CHECK(Reward(Spec("integer"), "123456789012345678901234567891", line) == 0.0);
}

TEST_CASE("integer: which number of the completion counts") {
  RewardSpec spec = Spec("integer");
  const json line = {{"answer", 12}};
  CHECK(Reward(spec, "7 + 5 = 12", line) == 1.0);
  CHECK(Reward(spec, "12 is what 7 and 5 make", line) == 0.0);
  CHECK(Reward(spec, "The result is 12.0", line) == 1.0);
  CHECK(Reward(spec, "It is -12", line) == 0.0);
  CHECK(Reward(spec, "", line) == 0.0);
  CHECK(Reward(spec, "twelve", line) == 0.0);
  CHECK(Reward(spec, "12.5", line) == 0.0);
  spec.take = "first";
  CHECK(Reward(spec, "12 is what 7 and 5 make", line) == 1.0);
  spec.take = "only";
  CHECK(Reward(spec, " 12 ", line) == 1.0);
  CHECK(Reward(spec, "= 12", line) == 0.0);
  CHECK(absl::IsInvalidArgument(Run(spec, "12", {{"answer", "about 12"}}).status()));
  CHECK(absl::IsInvalidArgument(Run(spec, "12", {{"answer", 12.5}}).status()));
  CHECK(absl::IsInvalidArgument(Run(spec, "12", json::object()).status()));
  CHECK(absl::IsInvalidArgument(Run(spec, "12", {{"answer", {1, 2}}}).status()));
  spec.take = "middle";
  CHECK(!MakeVerifier(spec, 100).ok());
}

TEST_CASE("numeric: tolerance is absolute below one and relative above") {
  RewardSpec spec = Spec("numeric");
  spec.tolerance = 1e-3;
  CHECK(Reward(spec, "about 3.1416", {{"answer", 3.14159}}) == 1.0);
  CHECK(Reward(spec, "3.15", {{"answer", "3.14159"}}) == 0.0);
  CHECK(Reward(spec, "1000.9", {{"answer", 1000}}) == 1.0);
  CHECK(Reward(spec, "0.0009", {{"answer", 0}}) == 1.0);
  CHECK(Reward(spec, "1e999", {{"answer", 5}}) == 0.0);
  CHECK(Reward(spec, "nan", {{"answer", 5}}) == 0.0);
  CHECK(Reward(spec, "-2.5e-1", {{"answer", -0.25}}) == 1.0);
  CHECK(absl::IsInvalidArgument(Run(spec, "1", {{"answer", "nan"}}).status()));
}

TEST_CASE("exact: white space around and case, where it says so") {
  RewardSpec spec = Spec("exact");
  CHECK(Reward(spec, "  Paris\n", {{"answer", "paris "}}) == 1.0);
  CHECK(Reward(spec, "Paris, France", {{"answer", "Paris"}}) == 0.0);
  CHECK(Reward(spec, "", {{"answer", ""}}) == 1.0);
  CHECK(Reward(spec, "true", {{"answer", true}}) == 1.0);
  spec.ignore_case = false;
  CHECK(Reward(spec, "paris", {{"answer", "Paris"}}) == 0.0);
  spec.answer_field = "meta.city";
  CHECK(Reward(spec, "Rome", {{"meta", {{"city", "Rome"}}}}) == 1.0);
  CHECK(absl::IsInvalidArgument(Run(spec, "Rome", {{"meta", "Rome"}}).status()));
  spec.answer_field = "a.b";
  CHECK(Reward(spec, "x", {{"a.b", "x"}}) == 1.0);
}

TEST_CASE("contains: as a word or number of its own, anywhere") {
  RewardSpec spec = Spec("contains");
  CHECK(Reward(spec, "It is **Paris**, France.", {{"answer", " paris\n"}}) == 1.0);
  CHECK(Reward(spec, "comparison", {{"answer", "paris"}}) == 0.0);
  CHECK(Reward(spec, "parisian paris", {{"answer", "Paris"}}) == 1.0);
  CHECK(Reward(spec, "x=120, y=12", {{"answer", 12}}) == 1.0);
  CHECK(Reward(spec, "x=120", {{"answer", 12}}) == 0.0);
  CHECK(Reward(spec, "答えは東京です", {{"answer", "東京"}}) == 1.0);
  CHECK(Reward(spec, "", {{"answer", "Paris"}}) == 0.0);
  spec.ignore_case = false;
  CHECK(Reward(spec, "It is paris", {{"answer", "Paris"}}) == 0.0);
  CHECK(absl::IsInvalidArgument(Run(spec, "x", {{"answer", " "}}).status()));
}

TEST_CASE("regex: searched for, with Unicode, and never without an end") {
  RewardSpec spec = Spec("regex");
  spec.pattern = "<answer>.*</answer>";
  CHECK(Reward(spec, "so <answer>5</answer>.") == 1.0);
  CHECK(Reward(spec, "so 5.") == 0.0);
  spec.pattern = "^\\p{Lu}";
  CHECK(Reward(spec, "Über") == 1.0);
  CHECK(Reward(spec, "über") == 0.0);
  CHECK(Reward(spec, std::string("\xff\xfe")) == 0.0);
  spec.pattern = "";
  CHECK(Reward(spec, "") == 1.0);
  spec.pattern = "(a+)+$";
  const auto endless = Run(spec, std::string(40, 'a') + "b");
  CHECK(absl::IsResourceExhausted(endless.status()));
  spec.pattern = "(unclosed";
  const auto bad = MakeVerifier(spec, 100);
  REQUIRE(absl::IsInvalidArgument(bad.status()));
  CHECK(bad.status().message().find("(unclosed") != std::string::npos);
}

TEST_CASE("length: one up to the target, then falling to zero at the budget") {
  RewardSpec spec = Spec("length");
  spec.target_tokens = 20;
  CHECK(Reward(spec, "", {}, 0) == 1.0);
  CHECK(Reward(spec, "", {}, 20) == 1.0);
  CHECK(Reward(spec, "", {}, 60) == 0.5);
  CHECK(Reward(spec, "", {}, 100) == 0.0);
  CHECK(Reward(spec, "", {}, 150) == 0.0);
  spec.target_tokens = 100;
  CHECK(Reward(spec, "", {}, 100) == 1.0);
  CHECK(Reward(spec, "", {}, 101) == 0.0);
}

TEST_CASE("json: an object with the required keys") {
  RewardSpec spec = Spec("json");
  CHECK(Reward(spec, " {} ") == 1.0);
  CHECK(Reward(spec, "[1]") == 0.0);
  CHECK(Reward(spec, "{\"a\": 1} and more") == 0.0);
  CHECK(Reward(spec, "{\"a\": ") == 0.0);
  CHECK(Reward(spec, "") == 0.0);
  CHECK(Reward(spec, std::string(200000, '[')) == 0.0);
  spec.required_keys = {"a", "b"};
  CHECK(Reward(spec, "{\"a\": 1, \"b\": null}") == 1.0);
  CHECK(Reward(spec, "{\"a\": 1}") == 0.0);
}

TEST_CASE("an unknown type is named") {
  const auto bad = MakeVerifier(Spec("exakt"), 100);
  CHECK(absl::IsInvalidArgument(bad.status()));
  CHECK(bad.status().message().find("exakt") != std::string::npos);
}
}  // namespace stretto::services
