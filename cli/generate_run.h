// What `stretto generate` does once its flags are read: the model and the prompts are opened, the
// completions written as they come.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/local_model.h"

namespace stretto::cli {
struct GenerateOptions {
  // One of model.host.path and run_dir; what is set in `model` wins over the run's.
  LocalModelOptions model;
  std::string run_dir;
  std::string checkpoint;  // of the run; empty: its newest
  std::string dtype, chat_format;     // empty: the run's, or the default
  std::optional<std::string> system;  // none: the run's, or the template's
  std::string prompt, prompts_file;   // one of them
  bool raw = false;                   // the prompt's text as it is, special tokens in it parsed
  bool ignore_fields = false;         // of prompts that are objects: those that aren't known
  bool json = false;                  // one JSON object a completion
  std::string output;                 // a file instead of standard output; of the command
  engine::SamplingParams sampling;
  bool max_tokens_given = false;        // then it is told when the context leaves less
  std::vector<std::string> logit_bias;  // "ID=BIAS"
  // What a completion must match: one of them, or none.
  std::string regex, json_schema_file;
  std::vector<std::string> choices;
  bool json_object = false;
  bool has_form() const {
    return json_object || !regex.empty() || !json_schema_file.empty() || !choices.empty();
  }
  int32_t num_samples = 1;  // of each prompt
  uint64_t seed = 1;
};

// Writes completions to `out`: one alone piece by piece as it is drawn, of several each when it and
// those before it have ended; remarks to `remarks`. InvalidArgument names the flag. Blocks.
absl::Status Generate(const GenerateOptions& options, std::FILE* out, std::FILE* remarks);

// The same to options.output, or to standard output where it is empty.
absl::Status GenerateTo(const GenerateOptions& options, std::FILE* remarks);

// "ID=BIAS" or "ID:BIAS".
absl::StatusOr<std::pair<int32_t, float>> ParseLogitBias(const std::string& text);
}  // namespace stretto::cli
