// Prompts in and completions out of `stretto generate`, where they are JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/local_model.h"

namespace stretto::cli {
struct Prompt {
  std::string text;
  std::string place;  // file and line, or the flag
};
// A file's prompts, or with "-" those of `input`: the lines that aren't empty.
absl::StatusOr<std::vector<Prompt>> ReadPrompts(const std::string& path, std::FILE* input = stdin);

// A line is a JSON object (a dataset line), a JSON string, or plain text; with `raw` an object is
// text as well. Without it, what begins as an object has to be one.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const LocalModel& model, const std::string& line,
                                                  bool raw);

// One JSON object without a line break. `index`: of the prompt, from 0; `sample`: of the prompt,
// told where there are several.
struct CompletionLine {
  size_t index = 0;
  std::string prompt;
  std::vector<int32_t> prompt_ids;
  int32_t sample = 0, num_samples = 1;
};
std::string ToJson(const CompletionLine& line, const LocalCompletion& completion);
}  // namespace stretto::cli
