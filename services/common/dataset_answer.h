// What rewards need of a dataset line: the answer that completions are compared with. Scorers read
// it, and whoever reads a dataset asks before the work whether each line has one. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto::services {
// The value of a field as text: a text, a number, true or false. `field` is one of the line or,
// with points, of an object inside it. INVALID_ARGUMENT names the field.
absl::StatusOr<std::string> AnswerText(const nlohmann::json& line, const std::string& field);
// The same without white space around it; not empty.
absl::StatusOr<std::string> AnswerWord(const nlohmann::json& line, const std::string& field);
// As CanonicalInteger (numbers.h) and as a finite number.
absl::StatusOr<std::string> AnswerInteger(const nlohmann::json& line, const std::string& field);
absl::StatusOr<double> AnswerNumber(const nlohmann::json& line, const std::string& field);

// Whether each of the rewards finds what it needs in the line. INVALID_ARGUMENT says which doesn't.
absl::Status CheckAnswers(const std::vector<RewardSpec>& rewards, const nlohmann::json& line);
}  // namespace stretto::services
