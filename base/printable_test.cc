#include "base/printable.h"

#include <catch2/catch.hpp>

namespace stretto {
namespace {
TEST_CASE("what a terminal would obey is escaped, all other text stays") {
  CHECK(Printable("plain 'text' with \xC3\xBC, \xE2\x88\x92 and \xF0\x9F\x99\x82") ==
        "plain 'text' with \xC3\xBC, \xE2\x88\x92 and \xF0\x9F\x99\x82");
  CHECK(Printable("\x1b[2J\x07\n\t\r\x7f") == "\\x1b[2J\\x07\\n\\t\\r\\x7f");
  CHECK(Printable(absl::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(Printable("\xC2\x9B"
                  "31m") == "\\xc2\\x9b31m");             // CSI of C1
  CHECK(Printable("\xE2\x80\xAE") == "\\xe2\\x80\\xae");  // right-to-left override
  for (const char* bad : {"\xff", "\xC3", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80"}) {
    INFO(bad);
    CHECK(Printable(bad).substr(0, 2) == "\\x");
  }
}

TEST_CASE("long text is cut between characters") {
  CHECK(Printable("abcdef", 3) == "abc\u2026");
  CHECK(Printable("abc", 3) == "abc");
  CHECK(Printable("ab\xC3\xBC", 3) == "ab\u2026");
  CHECK(Printable("", 0).empty());
}

TEST_CASE("a message of several lines keeps them") {
  CHECK(PrintableLines("a\x1b[2J\n\tb\r\n") == "a\\x1b[2J\n\tb\\r\n");
  const std::string long_line(5000, 'x');
  CHECK(PrintableLines(long_line) == long_line);
  CHECK(PrintableLines("").empty());
}
}  // namespace
}  // namespace stretto
