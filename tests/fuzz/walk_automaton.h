// What fuzz targets check of a compiled pattern: a walk through its automaton, led by the input's
// bytes, never comes to a dead end and spells valid UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/constrain/automaton.h"
#include "engine/text/utf8.h"

namespace stretto {
// The text at the walk's end, if the automaton accepts it there.
inline std::optional<std::string> WalkAutomaton(const engine::Pattern& pattern, const uint8_t* data,
                                                size_t size) {
  using engine::Automaton;
  const engine::AutomatonLimits limits{.max_nfa_states = 10'000,
                                       .max_states = 1'000,
                                       .max_table_entries = 100'000,
                                       .max_steps = 1'000'000};
  const auto automaton = Automaton::Compile(pattern, limits);
  if (!automaton.ok()) return std::nullopt;
  std::string text;
  Automaton::State state = automaton->start();
  for (size_t step = 0; step < 1000; ++step) {
    const bool accepts = automaton->Accepts(state);
    if (accepts) STRETTO_CHECK(engine::IsValidUtf8(text));
    std::vector<int> ways;
    for (int byte = 0; byte < 256; ++byte) {
      if (automaton->Next(state, static_cast<uint8_t>(byte)) != Automaton::kDead) {
        ways.push_back(byte);
      }
    }
    STRETTO_CHECK(automaton->IsEnd(state) == ways.empty());
    STRETTO_CHECK(accepts || !ways.empty());
    if (ways.empty() || (accepts && step > 50)) return text;
    const size_t choice = (size == 0 ? 0 : data[step % size]) + step * 7;
    const int byte = ways[choice % ways.size()];
    text += static_cast<char>(byte);
    state = automaton->Next(state, static_cast<uint8_t>(byte));
  }
  return std::nullopt;
}
}  // namespace stretto
