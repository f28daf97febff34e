// One regular expression: whatever compiles, within limits, has no dead ends, and its texts are
// valid UTF-8.
#include "base/check.h"
#include "engine/constrain/regex.h"
#include "tests/fuzz/walk_automaton.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stretto::engine;
  const absl::string_view expression(reinterpret_cast<const char*>(data), size);
  for (const RegexMatch match : {RegexMatch::kWhole, RegexMatch::kSearch}) {
    for (const RegexText text : {RegexText::kPlain, RegexText::kJsonString}) {
      const auto pattern = ParseRegex(expression, match, text);
      if (!pattern.ok()) {
        STRETTO_CHECK(!pattern.status().message().empty());
        return 0;
      }
      stretto::WalkAutomaton(**pattern, data, size);
    }
  }
  return 0;
}
