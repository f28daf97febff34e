// Prompts in and completions out of `stretto generate`, where they are JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/local_model.h"

namespace stretto::cli {
// A file's prompts, or with "-" those of `input`: the lines that aren't empty.
absl::StatusOr<std::vector<std::string>> ReadPrompts(const std::string& path,
                                                     std::FILE* input = stdin);

// A line is a JSON object (a dataset line), a JSON string, or plain text; with `raw` an object is
// text as well.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const LocalModel& model, const std::string& line,
                                                  bool raw);

// One JSON object without a line break. `sample`: of the prompt, told where there are several.
struct CompletionLine {
  std::string prompt;
  std::vector<int32_t> prompt_ids;
  int32_t sample = 0, num_samples = 1;
};
std::string ToJson(const CompletionLine& line, const LocalCompletion& completion);
}  // namespace stretto::cli
