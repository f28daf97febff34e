// Dataset lines of `stretto sft`, `dpo` and `reward-model` as other tools write them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stretto::cli {
// A JSONL line whose prompt and answers may be lists of messages, rewritten to one with `prompt`
// (text) or `messages` and with texts as answers; what needs no change stays. `answers`: the keys
// of what is imitated, {"completion"} or {"chosen", "rejected"}.
//   a list as `prompt`: becomes `messages`
//   a list as an answer: its last message, by the assistant, is the text; without a prompt the
//     messages before it, which all answers must share, are `messages`
//   {"completion"} alone, and missing: the last of `messages`, by the assistant
// Errors say what is wrong with the line, without naming it.
absl::StatusOr<std::string> PlainLine(const std::string& line,
                                      const std::vector<std::string>& answers);
}  // namespace stretto::cli
