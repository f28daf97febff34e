#define PCRE2_CODE_UNIT_WIDTH 8
#include "services/scorer/verifiers.h"

#include <pcre2.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "nlohmann/json.hpp"
#include "services/common/dataset_answer.h"
#include "services/common/numbers.h"

namespace stretto::services {
namespace {
using nlohmann::json;

// Enough for any sane pattern on any completion; a pattern that explodes ends in milliseconds.
constexpr uint32_t kMatchLimit = 1'000'000;
constexpr uint32_t kHeapLimitKb = 32 * 1024;

class Exact final : public Verifier {
 public:
  explicit Exact(const RewardSpec& spec) : field_(spec.answer_field), fold_(spec.ignore_case) {}
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    ASSIGN_OR_RETURN(const std::string answer, AnswerText(*input.line, field_));
    const absl::string_view a = absl::StripAsciiWhitespace(input.completion);
    const absl::string_view b = absl::StripAsciiWhitespace(answer);
    return (fold_ ? absl::EqualsIgnoreCase(a, b) : a == b) ? 1.0 : 0.0;
  }

 private:
  std::string field_;
  bool fold_;
};

// Whether `word` stands in `text` and is no part of a longer word or number there.
bool HasWord(absl::string_view text, absl::string_view word) {
  const auto is_inside = [](char a, char b) {
    return absl::ascii_isalnum(static_cast<unsigned char>(a)) &&
           absl::ascii_isalnum(static_cast<unsigned char>(b));
  };
  for (size_t at = text.find(word); at != absl::string_view::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if (at > 0 && is_inside(text[at - 1], word.front())) continue;
    if (end < text.size() && is_inside(word.back(), text[end])) continue;
    return true;
  }
  return false;
}

class Contains final : public Verifier {
 public:
  explicit Contains(const RewardSpec& spec) : field_(spec.answer_field), fold_(spec.ignore_case) {}
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    ASSIGN_OR_RETURN(const std::string answer, AnswerWord(*input.line, field_));
    const bool found =
        fold_ ? HasWord(absl::AsciiStrToLower(input.completion), absl::AsciiStrToLower(answer))
              : HasWord(input.completion, answer);
    return found ? 1.0 : 0.0;
  }

 private:
  std::string field_;
  bool fold_;
};

enum class Take { kLast, kFirst, kOnly };

absl::StatusOr<Take> ParseTake(const std::string& name) {
  if (name == "last") return Take::kLast;
  if (name == "first") return Take::kFirst;
  if (name == "only") return Take::kOnly;
  return absl::InvalidArgumentError(
      absl::StrCat("take '", name, "': expected last, first or only"));
}

absl::optional<std::string> TakeNumber(absl::string_view text, Take take) {
  if (take == Take::kOnly) return OnlyNumber(text);
  const std::vector<NumberInText> numbers = FindNumbers(text);
  if (numbers.empty()) return absl::nullopt;
  return take == Take::kFirst ? numbers.front().text : numbers.back().text;
}

class Integer final : public Verifier {
 public:
  Integer(const RewardSpec& spec, Take take) : field_(spec.answer_field), take_(take) {}
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    ASSIGN_OR_RETURN(const std::string answer, AnswerInteger(*input.line, field_));
    const absl::optional<std::string> given = TakeNumber(input.completion, take_);
    if (!given.has_value()) return 0.0;
    return CanonicalInteger(*given) == answer ? 1.0 : 0.0;
  }

 private:
  std::string field_;
  Take take_;
};

class Numeric final : public Verifier {
 public:
  Numeric(const RewardSpec& spec, Take take)
      : field_(spec.answer_field), take_(take), tolerance_(spec.tolerance) {}
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    ASSIGN_OR_RETURN(const double answer, AnswerNumber(*input.line, field_));
    double given = 0;
    const absl::optional<std::string> taken = TakeNumber(input.completion, take_);
    if (!taken.has_value() || !absl::SimpleAtod(*taken, &given)) return 0.0;
    const double allowed = tolerance_ * std::max(1.0, std::abs(answer));
    return std::abs(given - answer) <= allowed ? 1.0 : 0.0;
  }

 private:
  std::string field_;
  Take take_;
  double tolerance_;
};

class Regex final : public Verifier {
 public:
  static absl::StatusOr<std::unique_ptr<Verifier>> Make(const RewardSpec& spec) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF;
    pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(spec.pattern.data()),
                                     spec.pattern.size(), options, &error, &offset, nullptr);
    if (code == nullptr) {
      PCRE2_UCHAR message[256];
      pcre2_get_error_message(error, message, sizeof(message));
      return absl::InvalidArgumentError(absl::StrCat("pattern '", spec.pattern, "': at byte ",
                                                     offset, ": ",
                                                     reinterpret_cast<const char*>(message)));
    }
    return std::unique_ptr<Verifier>(new Regex(code));
  }
  ~Regex() override {
    pcre2_match_context_free(limits_);
    pcre2_code_free(code_);
  }
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    pcre2_match_data* match = pcre2_match_data_create_from_pattern(code_, nullptr);
    const int result = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(input.completion.data()),
                                   input.completion.size(), 0, 0, match, limits_);
    pcre2_match_data_free(match);
    if (result >= 0) return 1.0;
    if (result == PCRE2_ERROR_NOMATCH) return 0.0;
    return absl::ResourceExhaustedError(absl::StrCat(
        "the pattern needs too many steps on this completion (PCRE2 error ", result, ")"));
  }

 private:
  explicit Regex(pcre2_code* code) : code_(code), limits_(pcre2_match_context_create(nullptr)) {
    pcre2_set_match_limit(limits_, kMatchLimit);
    pcre2_set_heap_limit(limits_, kHeapLimitKb);
  }
  pcre2_code* code_;
  pcre2_match_context* limits_;
};

class Length final : public Verifier {
 public:
  Length(int64_t target, int64_t max) : target_(target), max_(max) {}
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    if (input.num_tokens <= target_) return 1.0;
    if (input.num_tokens >= max_) return 0.0;
    return static_cast<double>(max_ - input.num_tokens) / static_cast<double>(max_ - target_);
  }

 private:
  int64_t target_, max_;
};

class Json final : public Verifier {
 public:
  explicit Json(const RewardSpec& spec) : keys_(spec.required_keys) {}
  absl::StatusOr<double> Verify(const VerifierInput& input) const override {
    const json value = json::parse(input.completion.begin(), input.completion.end(), nullptr,
                                   /*allow_exceptions=*/false);
    if (!value.is_object()) return 0.0;
    const bool complete = std::all_of(keys_.begin(), keys_.end(),
                                      [&value](const auto& key) { return value.contains(key); });
    return complete ? 1.0 : 0.0;
  }

 private:
  std::vector<std::string> keys_;
};
}  // namespace

absl::StatusOr<std::unique_ptr<Verifier>> MakeVerifier(const RewardSpec& spec, int64_t max_tokens) {
  if (spec.type == "exact") return std::make_unique<Exact>(spec);
  if (spec.type == "contains") return std::make_unique<Contains>(spec);
  if (spec.type == "integer" || spec.type == "numeric") {
    ASSIGN_OR_RETURN(const Take take, ParseTake(spec.take));
    if (spec.type == "integer") return std::make_unique<Integer>(spec, take);
    return std::make_unique<Numeric>(spec, take);
  }
  if (spec.type == "regex") return Regex::Make(spec);
  if (spec.type == "length") return std::make_unique<Length>(spec.target_tokens, max_tokens);
  if (spec.type == "json") return std::make_unique<Json>(spec);
  return absl::InvalidArgumentError(
      absl::StrCat("reward type '", spec.type,
                   "': expected exact, contains, integer, numeric, regex, length or json"));
}
}  // namespace stretto::services
