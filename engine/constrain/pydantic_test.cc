// Schemas as Pydantic writes them: what of its values is written, what isn't, and which schemas are
// refused, by name. tests/golden/make_pydantic.py asked Pydantic itself.
#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "base/files.h"
#include "base/testing.h"
#include "engine/constrain/automaton.h"
#include "engine/constrain/json_schema.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;

absl::StatusOr<Automaton> Compile(const Json& schema) {
  const auto pattern = ParseJsonSchema(schema.dump());
  if (!pattern.ok()) return pattern.status();
  return Automaton::Compile(**pattern);
}
}  // namespace

TEST_CASE("schemas of Pydantic's types") {
  const auto text = Files::Real().ReadAll(STRETTO_SOURCE_DIR "/tests/golden/pydantic.json");
  REQUIRE_OK(text);
  const Json cases = Json::parse(*text);
  REQUIRE(cases.size() > 80);
  for (const Json& one : cases) {
    INFO(one["name"] << ": " << one["schema"].dump());
    const absl::StatusOr<Automaton> automaton = Compile(one["schema"]);
    const auto refused = one["refused"].get<std::string>();
    if (!refused.empty()) {
      INFO(automaton.status());
      CHECK(absl::IsInvalidArgument(automaton.status()));
      CHECK(absl::StartsWith(automaton.status().message(), refused));
      continue;
    }
    REQUIRE_OK(automaton);
    const auto matches = [&automaton](const Json& value) {
      return automaton->Matches("{\"v\": " + value.get<std::string>() + "}");
    };
    for (const Json& value : one["accepts"]) {
      INFO(value);
      CHECK(matches(value));
    }
    for (const Json& value : one["rejects"]) {
      INFO(value);
      CHECK_FALSE(matches(value));
    }
  }
}
}  // namespace stretto::engine
