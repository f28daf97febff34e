#include "engine/constrain/json_strings.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/constrain/regex.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
using Json = nlohmann::ordered_json;

std::string FormatExpression(const std::string& format) {
  // Days that every month has.
  const std::string date = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])";
  const std::string time =
      "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
  const std::string word = "[a-z0-9]{1,20}", byte = "(?:[1-9]?[0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])";
  if (format == "date") return date;
  if (format == "time") return time;
  if (format == "date-time") return date + "T" + time;
  if (format == "uuid") return "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}";
  if (format == "email") {
    return word + "(?:[._+-]" + word + "){0,2}@" + word + "(?:-" + word + ")?(?:\\." + word +
           "){0,2}\\.[a-z]{2,10}";
  }
  if (format == "ipv4") return byte + "(?:\\." + byte + "){3}";
  return "";
}

absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Spend(
    absl::StatusOr<Automaton> automaton) {
  if (!automaton.ok()) return automaton.status();
  limits_.max_steps = std::max<int64_t>(limits_.max_steps - automaton->num_steps(), 0);
  return std::make_shared<const Automaton>(*std::move(automaton));
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Compile(
    const PatternPtr& pattern) {
  return Spend(Automaton::Compile(*pattern, limits_));
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Intersect(const Automaton& a,
                                                                           const Automaton& b) {
  return Spend(Automaton::Intersect(a, b, limits_));
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Subtract(const Automaton& a,
                                                                          const Automaton& b) {
  return Spend(Automaton::Subtract(a, b, limits_));
}

absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Of(const Json& schema,
                                                                    Format format) {
  return Known(schema, {"minLength", "maxLength", "pattern",
                        format == Format::kApply ? "format" : "pattern"});
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::WithoutLength(const Json& schema) {
  return Known(schema, {"pattern", "format"});
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Known(
    const Json& schema, std::initializer_list<const char*> keys) {
  Json rules = Json::object();
  for (const char* key : keys) {
    if (schema.contains(key)) rules[key] = schema[key];
  }
  const std::string text = rules.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::shared_ptr<const Automaton>& known = known_[text];
  if (known == nullptr) {
    ASSIGN_OR_RETURN(known, Build(rules));
  }
  return known;
}

absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Build(const Json& rules) {
  std::vector<PatternPtr> parts;
  const auto count = [&rules](const char* key, int32_t otherwise) {
    return rules.contains(key) ? rules[key].get<int32_t>() : otherwise;
  };
  if (rules.contains("pattern")) {
    ASSIGN_OR_RETURN(parts.emplace_back(),
                     ParseRegex(rules["pattern"].get<std::string>(), RegexMatch::kSearch));
  }
  if (rules.contains("format")) {
    ASSIGN_OR_RETURN(
        parts.emplace_back(),
        ParseRegex(FormatExpression(rules["format"].get<std::string>()), RegexMatch::kWhole));
  }
  if (parts.empty() || rules.contains("minLength") || rules.contains("maxLength")) {
    CharSet any = CharSet().Negated();
    parts.push_back(Repeat(Chars(std::move(any)), count("minLength", 0), count("maxLength", -1)));
  }
  std::shared_ptr<const Automaton> all;
  for (const PatternPtr& part : parts) {
    ASSIGN_OR_RETURN(std::shared_ptr<const Automaton> one, Compile(part));
    if (all != nullptr) {
      auto both = Intersect(*all, *one);
      if (absl::IsNotFound(both.status())) {
        return absl::InvalidArgumentError("no text obeys length, pattern and format together");
      }
      if (!both.ok()) return both.status();
      one = *std::move(both);
    }
    all = std::move(one);
  }
  return all;
}
}  // namespace stretto::engine
