// A JSONL dataset: one JSON object a line, each with `prompt` (text) or `messages` ([{role,
// content}, …]). Lines are kept as they are; empty lines are skipped.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stretto::services {
struct Dataset {
  std::vector<std::string> lines;     // valid ones, in file order
  std::vector<std::string> warnings;  // what was skipped: "train.jsonl:12: …"
};

struct DatasetOptions {
  bool skip_bad_lines = false;  // otherwise the first one is the error
  // What each line must have beside its prompt: field → who needs it, for the message.
  std::map<std::string, std::string> required_fields = {};
};

// Reads a whole file. INVALID_ARGUMENT: a malformed line (file, line number, what is wrong), or no
// valid line at all.
absl::StatusOr<Dataset> ReadDataset(const std::string& path, const DatasetOptions& options);
absl::StatusOr<Dataset> ParseDataset(const std::string& text, const std::string& name,
                                     const DatasetOptions& options);
}  // namespace stretto::services
