#include "services/coordinator/dataset.h"

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/files.h"
#include "base/messages.h"
#include "base/status.h"
#include "base/xxh3.h"
#include "services/common/dataset_answer.h"
#include "services/common/json_unique.h"

namespace stretto::services {
namespace {
using nlohmann::json;

// What is wrong with what a line asks; empty: nothing.
std::string PromptFault(const json& line) {
  const auto messages = FindMessages(line);
  if (!messages.ok()) return std::string(messages.status().message());
  if (*messages != nullptr) return std::string(ReadMessages(**messages).status().message());
  if (!line["prompt"].is_string()) return "`prompt` is no text and no list of messages";
  return line["prompt"].get<std::string>().empty() ? "`prompt` is empty" : "";
}

std::string LineFault(absl::string_view text, const DatasetOptions& options) {
  const absl::StatusOr<json> line = ParseUniqueJson(text);
  if (!line.ok()) return std::string(line.status().message());
  if (!line->is_object()) return "expected a JSON object";
  if (std::string fault = PromptFault(*line); !fault.empty()) return fault;
  return std::string(CheckAnswers(options.rewards, *line).message());
}
}  // namespace

std::string Dataset::Hash() const {
  const std::string text = absl::StrJoin(lines, "\n");
  return absl::StrFormat("%016x", XXH3_64bits(text.data(), text.size()));
}

std::string Dataset::PlaceOf(size_t index) const {
  return index < numbers.size() ? absl::StrCat(name, ":", numbers[index]) : name;
}

absl::StatusOr<Dataset> ReadDataset(const std::string& path, const DatasetOptions& options) {
  ASSIGN_OR_RETURN(const std::string text, Files::Real().ReadAll(path));
  return ParseDataset(text, path, options);
}

absl::StatusOr<Dataset> ParseDataset(const std::string& text, const std::string& name,
                                     const DatasetOptions& options) {
  Dataset dataset;
  dataset.name = name;
  int64_t number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    if (number == 1) absl::ConsumePrefix(&line, "\xef\xbb\xbf");  // a byte order mark
    line = absl::StripAsciiWhitespace(line);
    if (line.empty()) continue;
    if (const std::string fault = LineFault(line, options); !fault.empty()) {
      const std::string message = absl::StrCat(name, ":", number, ": ", fault);
      if (!options.skip_bad_lines) {
        return absl::InvalidArgumentError(
            absl::StrCat(message, " (data.on_bad_line: skip leaves such lines out)"));
      }
      dataset.warnings.push_back(message);
      continue;
    }
    dataset.lines.emplace_back(line);
    dataset.numbers.push_back(number);
  }
  if (dataset.lines.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ": the dataset is empty", dataset.warnings.empty() ? "" : " without its bad lines"));
  }
  return dataset;
}
}  // namespace stretto::services
