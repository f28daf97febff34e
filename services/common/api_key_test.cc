#include "services/common/api_key.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "base/testing.h"

namespace stretto::services {
namespace {
TEST_CASE("whoever shows one of the keys is let in, nobody else") {
  const testing::TempDir dir;
  std::ofstream(dir.File("keys")) << "# team\n\n  from-file \r\nother\n";
  ::setenv("STRETTO_TEST_KEY", "from-environment", 1);
  const auto keys = ApiKeys::Read(
      {.given = {"given"}, .file = dir.File("keys"), .environment_key = "STRETTO_TEST_KEY"});
  ::unsetenv("STRETTO_TEST_KEY");
  REQUIRE_OK(keys);
  for (const char* good :
       {"Bearer given", "bearer from-file", "BEARER  other ", "Bearer from-environment"}) {
    INFO(good);
    CHECK(keys->Allow(good));
  }
  for (const char* bad : {"", "given", "Bearer", "Bearer ", "Bearer giveN", "Bearer givengiven",
                          "Bearer g", "Basic given", "Bearer given other"}) {
    INFO(bad);
    CHECK_FALSE(keys->Allow(bad));
  }
}

TEST_CASE("without keys everybody is let in; keys that no header can carry are refused") {
  const auto none = ApiKeys::Read({.given = {}, .file = "", .environment_key = "STRETTO_NO_KEY"});
  REQUIRE_OK(none);
  CHECK(none->empty());
  CHECK(none->Allow(""));
  const auto fault = [](const ApiKeySources& sources) {
    return std::string(ApiKeys::Read(sources).status().message());
  };
  CHECK(fault({{""}, "", ""}) == "--api-key: an API key is empty");
  const std::string spaced = fault({{"two words"}, "", ""});
  CHECK(absl::StrContains(spaced, "not of visible ASCII"));
  CHECK_FALSE(absl::StrContains(spaced, "words"));
  const testing::TempDir dir;
  std::ofstream(dir.File("empty")) << "# none\n";
  CHECK(absl::StrContains(fault({{}, dir.File("empty"), ""}), "no keys"));
  CHECK_FALSE(fault({{}, dir.File("absent"), ""}).empty());
}
}  // namespace
}  // namespace stretto::services
