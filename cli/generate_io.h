// Prompts in and completions out of `stretto generate`, where they are JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/local_model.h"

namespace stretto::cli {
struct Prompt {
  std::string text;
  std::string place;     // file and line, or the flag
  bool is_line = false;  // of a file: JSON that is neither a string nor an object is a mistake
};
// A file's prompts, or with "-" those of `input`: the lines that aren't blank.
absl::StatusOr<std::vector<Prompt>> ReadPrompts(const std::string& path, std::FILE* input = stdin);

// What a prompt says, one of these.
struct PromptInput {
  std::optional<std::string> raw;           // text as it is, special tokens in it parsed
  std::optional<std::string> line;          // a JSON object with `prompt` or `messages`
  std::optional<std::vector<int32_t>> ids;  // tokens as they are
  std::string shown = "{}";  // as a JSON object: `prompt`, the text, or `messages`; nothing of ids
};
// A prompt is a JSON object (a dataset line, or one with `prompt_ids`), a JSON string, or plain
// text; with `raw` all but a JSON string is text. Without it, what begins as an object has to be
// one, with fields that are known, or any others where `other_fields` says so. InvalidArgument
// names the field.
absl::StatusOr<PromptInput> ParsePrompt(const Prompt& prompt, bool raw, bool other_fields);
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const LocalModel& model,
                                                  const PromptInput& input);

// One JSON object without a line break. `index`: of the prompt, from 0; `sample`: of the prompt,
// told where there are several.
struct CompletionLine {
  size_t index = 0;
  std::string shown;  // PromptInput's
  std::vector<int32_t> prompt_ids;
  int32_t sample = 0, num_samples = 1;
};
std::string ToJson(const CompletionLine& line, const LocalCompletion& completion);
}  // namespace stretto::cli
