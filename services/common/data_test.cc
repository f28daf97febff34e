#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "base/testing.h"
#include "nlohmann/json.hpp"
#include "services/common/dataset_answer.h"
#include "services/common/json_unique.h"

namespace stretto::services {
namespace {
using nlohmann::json;

TEST_CASE("a key that comes twice in an object is refused with its name") {
  const auto fault = [](absl::string_view text) {
    return std::string(ParseUniqueJson(text).status().message());
  };
  CHECK(fault(R"({"a": 1, "b": [{"a": 2}, {"a": 3}], "c": {"b": 4}})").empty());
  CHECK(fault(R"({"a": 1, "a": 1})") == "the key 'a' comes twice");
  CHECK(fault(R"([{"x": {"b": 1, "c": 2, "b": {}}}])") == "the key 'b' comes twice in /0/x");
  CHECK(fault(R"({"a": [[1, {}], [2, {"b/~": {"c": 1, "c": 2}}]]})") ==
        "the key 'c' comes twice in /a/1/1/b~1~0");
  CHECK(fault(R"({"a\u001b[2J": 1, "\u0061\u001b[2J": 1})") == "the key 'a\\x1b[2J' comes twice");
  CHECK(absl::StartsWith(fault("{\"a\": "), "not valid JSON in UTF-8: "));
  CHECK(absl::StartsWith(fault("{\"a\": \"\xff\"}"), "not valid JSON in UTF-8: "));
  CHECK(absl::StartsWith(fault(""), "not valid JSON in UTF-8: "));
}

TEST_CASE("each reward finds its answer in a line, or says what is wrong with it") {
  const auto fault = [](const std::string& type, const json& line) {
    RewardSpec spec;
    spec.type = type;
    return std::string(CheckAnswers({spec}, line).message());
  };
  for (const char* type : {"exact", "contains", "integer", "numeric"}) {
    INFO(type);
    CHECK(fault(type, {{"answer", 12}}).empty());
    CHECK(fault(type, {{"answer", "12"}}).empty());
    CHECK(absl::StrContains(fault(type, {{"answer", nullptr}}), "'answer' is null"));
    CHECK(absl::StrContains(fault(type, {{"answer", {1, 2}}}), "'answer' is an array"));
    CHECK(absl::StrContains(fault(type, {{"answer", json::object()}}), "'answer' is an object"));
    CHECK(absl::StrContains(fault(type, json::object()), "'answer' is missing"));
  }
  CHECK(fault("exact", {{"answer", "Paris"}}).empty());
  CHECK(absl::StrContains(fault("integer", {{"answer", "Pa\x1bris"}}), "no integer: 'Pa\\x1bris'"));
  CHECK(absl::StrContains(fault("integer", {{"answer", 12.5}}), "no integer"));
  CHECK(absl::StrContains(fault("numeric", {{"answer", "nan"}}), "no number"));
  CHECK(fault("regex", json::object()).empty());
  CHECK(fault("service", json::object()).empty());
  RewardSpec inside;
  inside.type = "exact";
  inside.answer_field = "meta.city";
  CHECK(CheckAnswers({inside}, {{"meta", {{"city", "Rome"}}}}).ok());
  CHECK_FALSE(CheckAnswers({inside}, {{"meta", "Rome"}}).ok());
}
}  // namespace
}  // namespace stretto::services
