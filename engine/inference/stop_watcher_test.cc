#include "engine/inference/stop_watcher.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "base/testing.h"

namespace stretto::engine {
TEST_CASE("a stop string inside one token cuts the text and keeps the token") {
  StopWatcher watcher({"STOP"}, false, 0);
  CHECK(!watcher.Push("one "));
  CHECK(watcher.num_tokens() == 1);
  CHECK(watcher.Push("two STOP three"));
  CHECK(watcher.num_tokens() == 2);
  CHECK(watcher.text() == "one two ");
}

TEST_CASE("the beginning of a stop string is held back, then released") {
  StopWatcher watcher({"STOP"}, false, 0);
  CHECK(!watcher.Push("a"));
  CHECK(!watcher.Push("S"));
  CHECK(!watcher.Push("TO"));
  CHECK(watcher.num_tokens() == 1);
  CHECK(watcher.text() == "a");
  CHECK(!watcher.Push("x"));
  CHECK(watcher.num_tokens() == 4);
  CHECK(watcher.text() == "aSTOx");
}

TEST_CASE("a stop string over several tokens takes them along") {
  StopWatcher watcher({"STOP"}, false, 0);
  CHECK(!watcher.Push("aS"));
  CHECK(watcher.num_tokens() == 1);  // its first letter stays in any case
  CHECK(!watcher.Push("T"));
  CHECK(watcher.Push("OP!"));
  CHECK(watcher.num_tokens() == 1);
  CHECK(watcher.text() == "a");

  StopWatcher keeping({"STOP"}, true, 0);
  CHECK(!keeping.Push("aS"));
  CHECK(!keeping.Push("T"));
  CHECK(keeping.num_tokens() == 2);  // nothing can cut it off
  CHECK(keeping.Push("OP!"));
  CHECK(keeping.num_tokens() == 3);
  CHECK(keeping.text() == "aSTOP");
}

TEST_CASE("of several stop strings the first one wins, whatever their order") {
  for (const auto& strings : {std::vector<std::string>{"bc", "abcd"}, {"abcd", "bc"}}) {
    StopWatcher watcher(strings, false, 0);
    CHECK(!watcher.Push("xa"));
    CHECK(watcher.found() == -1);
    CHECK(watcher.Push("bcd"));
    CHECK(watcher.text() == "x");
    CHECK(strings[static_cast<size_t>(watcher.found())] == "abcd");
  }
}

TEST_CASE("a stop string that leaves too few tokens does not count, later ones do") {
  StopWatcher watcher({"."}, false, 3);
  CHECK(!watcher.Push("a."));
  CHECK(!watcher.Push("."));
  CHECK(!watcher.Push("b"));
  CHECK(watcher.Push("c."));
  CHECK(watcher.text() == "a..bc");
  CHECK(watcher.num_tokens() == 4);
}

TEST_CASE("what is held back at the end of the completion stays") {
  StopWatcher watcher({"STOP"}, false, 0);
  CHECK(!watcher.Push("STO"));
  CHECK(watcher.num_tokens() == 0);
  CHECK(!watcher.Finish(""));
  CHECK(watcher.num_tokens() == 1);
  CHECK(watcher.text() == "STO");
}

TEST_CASE("the decoder's rest may complete a stop string") {
  StopWatcher watcher({"é"}, false, 0);
  CHECK(!watcher.Push("a"));
  CHECK(!watcher.Push(""));
  CHECK(watcher.num_tokens() == 1);
  CHECK(watcher.Finish("é"));
  CHECK(watcher.text() == "a");
  CHECK(watcher.num_tokens() == 1);
}

TEST_CASE("random texts: what is reported as certain never changes, and matches a plain search") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> strings(1 + random.Below(3));
    for (std::string& s : strings) {
      for (size_t n = 1 + random.Below(4); n > 0; --n)
        s += static_cast<char>('a' + random.Below(2));
    }
    const bool keep = random.Below(2) == 0;
    StopWatcher watcher(strings, keep, 0);
    std::string text;
    std::vector<size_t> begins;
    int32_t certain_tokens = 0;
    std::string certain_text;
    for (int token = 0; token < 12 && !watcher.stopped(); ++token) {
      std::string piece;
      for (size_t n = random.Below(4); n > 0; --n)
        piece += static_cast<char>('a' + random.Below(3));
      begins.push_back(text.size());
      text += piece;
      watcher.Push(piece);
      REQUIRE(watcher.num_tokens() >= certain_tokens);
      REQUIRE(watcher.text().substr(0, certain_text.size()) == certain_text);
      certain_tokens = watcher.num_tokens();
      certain_text = std::string(watcher.text());
    }
    if (!watcher.stopped()) watcher.Finish("");
    size_t begin = std::string::npos, end = 0;
    for (const std::string& s : strings) {
      const size_t at = text.find(s);
      if (at == std::string::npos || at > begin || (at == begin && at + s.size() >= end)) continue;
      begin = at;
      end = at + s.size();
    }
    REQUIRE(watcher.stopped() == (begin != std::string::npos));
    const size_t cut = !watcher.stopped() ? text.size() : keep ? end : begin;
    REQUIRE(watcher.text() == text.substr(0, cut));
    const auto kept = watcher.stopped() ? std::count_if(begins.begin(), begins.end(),
                                                        [cut](size_t b) { return b < cut; })
                                        : static_cast<int64_t>(begins.size());
    REQUIRE(watcher.num_tokens() == kept);
  }
}
}  // namespace stretto::engine
