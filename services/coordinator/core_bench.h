// What tests of the core begin with.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "services/coordinator/core.h"

namespace stretto::services {
inline constexpr int64_t kSecond = 1'000'000'000;

template <class T>
std::vector<T> Only(const std::vector<Command>& commands) {
  std::vector<T> found;
  for (const Command& command : commands) {
    if (const T* c = std::get_if<T>(&command)) found.push_back(*c);
  }
  return found;
}

// A core with one member of each pool, at version 0.
struct Bench {
  explicit Bench(CoreOptions options = {}) : core(Defaults(std::move(options)), {}) {
    REQUIRE(core.OnRegister("t", PoolKind::kTrainer, "t:1", {0, "h0"}, 0).ok());
    REQUIRE(core.OnRegister("g", PoolKind::kGenerator, "g:1", {-1, ""}, 0).ok());
    REQUIRE(core.OnRegister("s", PoolKind::kScorer, "s:1", {-1, ""}, 0).ok());
  }
  static CoreOptions Defaults(CoreOptions o) {
    if (o.num_steps == 0) o.num_steps = 2;
    o.prompts_per_step = 2;
    o.group_size = 2;
    o.max_prompt_tokens = 10;
    o.num_train_lines = 8;
    o.max_samples_in_flight = 100;
    return o;
  }
  std::vector<Command> Take() { return core.TakeCommands(); }
  // Prepares and commits what the generator is asked to.
  std::vector<Command> Sync() {
    auto commands = Take();
    for (const auto& c : Only<PrepareVersion>(commands)) core.OnPrepared(c, absl::OkStatus(), now);
    auto more = Take();
    for (const auto& c : Only<CommitVersion>(more)) core.OnCommitted(c, absl::OkStatus(), now);
    commands.insert(commands.end(), more.begin(), more.end());
    more = Take();
    commands.insert(commands.end(), more.begin(), more.end());
    return commands;
  }
  std::vector<Command> Tokenize(const std::vector<Command>& commands, int64_t length = 5) {
    for (const auto& c : Only<TokenizePrompts>(commands)) {
      core.OnTokenized(c, absl::OkStatus(),
                       std::vector<Core::TokenizedPrompt>(c.groups.size(), {length, ""}), now);
    }
    return Take();
  }
  Core core;
  int64_t now = 0;
};
}  // namespace stretto::services
