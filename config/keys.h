// The one table of the run file's keys: which key fills which field, what values it may have and
// what it means. Parsing, validation, writing and docs/run-file.md all come from it.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "config/run_config.h"

namespace stretto::config_internal {
// Where a key's value goes; the pointer's type is the type that the file must have there.
using FieldRef =
    std::variant<std::string*, int64_t*, uint64_t*, double*, bool*, std::vector<std::string>*>;

// What values a key may have beyond its type.
struct Rule {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_excluded = false;
  bool max_excluded = false;
  std::vector<std::string> choices = {};  // texts: one of these; empty: any
  // What somebody who writes such a value may mean: value in lower case → what to write.
  std::map<std::string, std::string> hints = {};
  enum class Path { kNone, kExisting, kExistingIfGiven } path = Path::kNone;
  std::map<std::string, int64_t> words = {};  // integers: words that stand for a value
  bool is_name = false;                       // letters, digits, '.', '_' and '-' only
};

template <class Owner>
struct KeyDef {
  std::string section;  // "train"; "rewards" for the keys of a reward
  std::string name;
  std::function<FieldRef(Owner&)> field;
  Rule rule;
  std::string help;                   // one sentence or two, for docs/run-file.md
  std::vector<std::string> only_for;  // rewards: the types that use the key; empty: all
};

// In the order of the sections and fields of RunConfig.
const std::vector<KeyDef<RunConfig>>& RunKeys();
const std::vector<KeyDef<RewardSpec>>& RewardKeys();

// "a positive number", "one of bf16, f32", "true or false", …
std::string Expectation(const FieldRef& field, const Rule& rule);
// The value as text, as ToYaml would write it without quotes.
std::string ValueText(const FieldRef& field, const Rule& rule);
// Shortest decimal text that reads back to the same double.
std::string NumberText(double value);

// The tables of docs/run-file.md: every key with its values, default and meaning.
std::string RunFileReference();
}  // namespace stretto::config_internal
