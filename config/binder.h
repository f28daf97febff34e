// Carries YAML nodes into a RunConfig by the table of keys, remembering where each value came from.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "config/run_config.h"

namespace YAML {
class Node;
}

namespace stretto::config_internal {
// Where values came from, for the messages of checks that come later.
class Origins {
 public:
  explicit Origins(std::string file) : file_(std::move(file)) {}
  void Set(const std::string& key, std::string origin) { origins_[key] = std::move(origin); }
  bool Has(const std::string& key) const { return origins_.count(key) > 0; }
  // "run.yaml:12", "override 'train.lr=1'", or "run.yaml" for a key that nobody wrote.
  std::string Of(const std::string& key) const;
  // "<origin>: <key>: expected <expected>, found <found>".
  absl::Status Error(const std::string& key, const std::string& expected,
                     const std::string& found) const;

 private:
  std::string file_;
  std::map<std::string, std::string> origins_;  // by "train.lr", "rewards[0].type"
};

// Binds a whole document. `name` stands for the file in messages; relative paths are taken from
// `folder`. Throws nothing but what yaml-cpp throws.
absl::Status BindDocument(const YAML::Node& root, const std::string& name,
                          const std::string& folder, RunConfig* config, Origins* origins);
// Binds one override "section.key=value" or "rewards[0].key=value". Relative paths are taken from
// the current folder.
absl::Status BindOverride(const std::string& text, RunConfig* config, Origins* origins);

// Fills in the defaults that depend on other keys, then checks what one key alone cannot show.
absl::Status FinishAndCheck(RunConfig* config, const Origins& origins);
}  // namespace stretto::config_internal
