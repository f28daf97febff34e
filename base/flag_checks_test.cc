#include "base/flag_checks.h"

#include <catch2/catch.hpp>

namespace stretto {
TEST_CASE("numbers on the command line are checked as they are written") {
  const FlagCheck temperature = NumberIn({.low = 1e-4, .high = 100, .or_zero = true});
  for (const char* good : {"0", "0.0", "0e9", "1e-4", "1", "100", "-0"})
    CHECK(temperature(good).empty());
  // 1e-46 is 0 as a float, 1e-400 also as a double.
  for (const char* bad : {"nan", "-nan", "inf", "-inf", "1e-46", "1e-400", "100.1", "-1", "1e999",
                          "", "x", "1x", "0x1p2000"}) {
    INFO(bad);
    CHECK(temperature(bad) == std::string(bad) + ": expected 0 or a number from 0.0001 to 100");
  }
  const FlagCheck share = NumberIn({.low = 0, .high = 0.99, .without_low = true});
  CHECK(share("0.5").empty());
  for (const char* bad : {"0", "nan", "2", "-1", "1e-400"}) {
    CHECK(share(bad) == std::string(bad) + ": expected a number above 0 and up to 0.99");
  }
}

TEST_CASE("so are integers, those beyond 64 bits too") {
  const FlagCheck count = IntegerIn(1, 1 << 20);
  for (const char* good : {"1", "1048576"}) CHECK(count(good).empty());
  for (const char* bad : {"0", "-5", "1048577", "99999999999999999999", "1.5", "1e3", "", "nan"}) {
    CHECK(count(bad) == std::string(bad) + ": expected an integer from 1 to 1048576");
  }
}

TEST_CASE("words are one of those that are listed") {
  const FlagCheck kind = OneOf({"off", "ngram", "model"});
  CHECK(kind("ngram").empty());
  CHECK(kind("magic") == "magic: expected off, ngram or model");
  CHECK(kind("") == "an empty text: expected off, ngram or model");
  CHECK(NotEmpty()("x").empty());
  CHECK(NotEmpty()("") == "expected a value, found an empty text");
}
}  // namespace stretto
