// A JSONL dataset: one JSON object a line, each with `prompt` (text) or `messages` ([{role,
// content}, …]). Lines are kept as they are; empty lines are skipped.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"

namespace stretto::services {
struct Dataset {
  std::string name;                   // of the file
  std::vector<std::string> lines;     // valid ones, in file order
  std::vector<int64_t> numbers;       // where each stands in the file, from 1
  std::vector<std::string> warnings;  // what was skipped: "train.jsonl:12: …"

  // Of the lines: what a run that goes on must find again.
  std::string Hash() const;
  std::string PlaceOf(size_t index) const;  // of a line: "train.jsonl:12"
};

struct DatasetOptions {
  bool skip_bad_lines = false;  // otherwise the first one is the error
  // What judges the completions: each line must have, and have well, what they need of it.
  std::vector<RewardSpec> rewards = {};
};

// Reads a whole file. INVALID_ARGUMENT: a malformed line (file, line number, what is wrong), or no
// valid line at all.
absl::StatusOr<Dataset> ReadDataset(const std::string& path, const DatasetOptions& options);
absl::StatusOr<Dataset> ParseDataset(const std::string& text, const std::string& name,
                                     const DatasetOptions& options);
}  // namespace stretto::services
