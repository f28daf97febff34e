// One JSON Schema: whatever compiles, within limits, has no dead ends, and its texts are JSON.
#include "base/check.h"
#include "engine/constrain/json_schema.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/walk_automaton.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stretto::engine;
  const auto pattern = ParseJsonSchema({reinterpret_cast<const char*>(data), size});
  if (!pattern.ok()) {
    STRETTO_CHECK(!pattern.status().message().empty());
    return 0;
  }
  const auto text = stretto::WalkAutomaton(**pattern, data, size);
  if (text.has_value()) STRETTO_CHECK(nlohmann::json::accept(*text));
  return 0;
}
