#include "services/common/dataset_answer.h"

#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/printable.h"
#include "base/status.h"
#include "nlohmann/json.hpp"
#include "services/common/numbers.h"

namespace stretto::services {
namespace {
using nlohmann::json;

absl::Status Fault(const std::string& field, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("the dataset line's field '", Printable(field), "' ", what));
}

// Nothing: there is none.
const json* Find(const json& line, const std::string& field) {
  if (line.is_object() && line.contains(field)) return &line[field];
  const json* value = &line;
  for (absl::string_view rest = field; !rest.empty();) {
    const size_t point = rest.find('.');
    const std::string key(rest.substr(0, point));
    if (!value->is_object() || !value->contains(key)) return nullptr;
    value = &(*value)[key];
    rest = point == absl::string_view::npos ? "" : rest.substr(point + 1);
  }
  return value == &line ? nullptr : value;
}
}  // namespace

absl::StatusOr<std::string> AnswerText(const json& line, const std::string& field) {
  const json* value = Find(line, field);
  if (value == nullptr) return Fault(field, "is missing");
  if (value->is_string()) return value->get<std::string>();
  if (value->is_number() || value->is_boolean()) return value->dump();
  return Fault(field, absl::StrCat("is ", value->is_null() ? "" : "an ", value->type_name(),
                                   ", no text and no number"));
}

absl::StatusOr<std::string> AnswerWord(const json& line, const std::string& field) {
  ASSIGN_OR_RETURN(const std::string text, AnswerText(line, field));
  const absl::string_view word = absl::StripAsciiWhitespace(text);
  if (word.empty()) return Fault(field, "is empty: every completion would contain it");
  return std::string(word);
}

absl::StatusOr<std::string> AnswerInteger(const json& line, const std::string& field) {
  ASSIGN_OR_RETURN(const std::string text, AnswerText(line, field));
  const absl::optional<std::string> number = OnlyNumber(text);
  const absl::optional<std::string> answer =
      number.has_value() ? CanonicalInteger(*number) : absl::nullopt;
  if (answer.has_value()) return *answer;
  return Fault(field, absl::StrCat("is no integer: '", Printable(text, 80), "'"));
}

absl::StatusOr<double> AnswerNumber(const json& line, const std::string& field) {
  ASSIGN_OR_RETURN(const std::string text, AnswerText(line, field));
  const absl::optional<std::string> number = OnlyNumber(text);
  double answer = 0;
  if (number.has_value() && absl::SimpleAtod(*number, &answer) && std::isfinite(answer)) {
    return answer;
  }
  return Fault(field, absl::StrCat("is no number: '", Printable(text, 80), "'"));
}

absl::Status CheckAnswers(const std::vector<RewardSpec>& rewards, const json& line) {
  for (const RewardSpec& reward : rewards) {
    absl::Status status;
    if (reward.type == "exact") status = AnswerText(line, reward.answer_field).status();
    if (reward.type == "contains") status = AnswerWord(line, reward.answer_field).status();
    if (reward.type == "integer") status = AnswerInteger(line, reward.answer_field).status();
    if (reward.type == "numeric") status = AnswerNumber(line, reward.answer_field).status();
    if (status.ok()) continue;
    const bool is_named = !reward.name.empty() && reward.name != reward.type;
    return absl::InvalidArgumentError(absl::StrCat(
        status.message(), "; the reward ",
        is_named ? absl::StrCat("'", Printable(reward.name), "' (", reward.type, ")") : reward.type,
        " compares completions with it"));
  }
  return absl::OkStatus();
}
}  // namespace stretto::services
