#include "engine/constrain/schema_multiples.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/constrain/json_numbers.h"
#include "engine/constrain/json_patterns.h"

namespace stretto::engine {
namespace {
// The automaton has a place for each remainder.
constexpr int32_t kMaxDivisor = 500;
constexpr int kMaxShift = 12;

std::optional<ShortDecimal> Read(const std::string& divisor) {
  return ReadShortDecimal(divisor, kMaxDivisor, kMaxShift);
}
}  // namespace

int FractionDigitsOf(const std::string& divisor) {
  const std::optional<ShortDecimal> decimal = Read(divisor);
  return decimal.has_value() ? std::max(0, -decimal->exponent) : 0;
}

absl::StatusOr<PatternPtr> MultiplesAmong(const PatternPtr& numbers, const std::string& divisor,
                                          StringAutomata* strings) {
  const std::optional<ShortDecimal> decimal = Read(divisor);
  if (!decimal.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected a positive number whose digits without zeros around them come to at most ",
        kMaxDivisor, ", between 1e-", kMaxShift, " and 1e", kMaxShift));
  }
  const int zeros = std::max(0, decimal->exponent), behind = std::max(0, -decimal->exponent);
  auto multiples = std::make_shared<const Automaton>(
      Automaton::MultiplesOf(decimal->digits, /*with_point=*/behind > 0));
  PatternPtr shape = Matches(std::move(multiples));
  if (zeros > 0) {
    shape = Concat({std::move(shape), Literal(std::string(static_cast<size_t>(zeros), '0'))});
    shape = Alternate({Literal("0"), std::move(shape)});
  }
  ASSIGN_OR_RETURN(auto all, strings->Compile(numbers));
  ASSIGN_OR_RETURN(const auto shaped, strings->Compile(shape));
  ASSIGN_OR_RETURN(all, strings->Intersect(*all, *shaped));
  // No zeros before others, and a point where there has to be one.
  const std::string point = behind > 0 ? absl::StrCat("\\.[0-9]{", behind, "}") : "";
  ASSIGN_OR_RETURN(const auto plain,
                   strings->Compile(KnownRegex(absl::StrCat("-?(?:0|[1-9][0-9]*)", point))));
  ASSIGN_OR_RETURN(all, strings->Intersect(*all, *plain));
  return Matches(std::move(all));
}
}  // namespace stretto::engine
