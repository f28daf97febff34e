#include "engine/constrain/json_strings.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "engine/constrain/regex.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
using Json = nlohmann::ordered_json;

namespace {
std::string HostName() {
  const std::string label = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20})?";
  // The last one doesn't begin with a digit, as an address does.
  return "(?:" + label + "\\.){0,4}[A-Za-z][A-Za-z0-9]{0,19}(?:-[A-Za-z0-9]{1,20})?";
}
// With a host, and a path that is written with what needs no second thought.
std::string Uri() {
  const std::string character = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})";
  return "(?:https?|ftp|wss?)://" + HostName() + "(?::[1-9][0-9]{1,3})?(?:/" + character +
         "*)*(?:\\?(?:" + character + "|[/?])*)?(?:#(?:" + character + "|[/?])*)?";
}
// Eight groups, or fewer around "::".
std::string Ipv6() {
  const std::string group = "[0-9A-Fa-f]{1,4}";
  std::string all = "(?:" + group + ":){7}" + group;
  for (int left = 0; left <= 6; ++left) {
    absl::StrAppend(&all, "|", left == 0 ? "" : group);
    if (left > 1) absl::StrAppend(&all, "(?::", group, "){", left - 1, "}");
    absl::StrAppend(&all, "::");
    if (left < 6) absl::StrAppend(&all, "(?:", group, "(?::", group, "){0,", 5 - left, "})?");
  }
  return all;
}
// Weeks, or days and hours, minutes and seconds.
std::string Duration() {
  const std::string seconds = "[0-9]{1,2}S", minutes = "[0-9]{1,2}M(?:" + seconds + ")?";
  const std::string time =
      "T(?:[0-9]{1,2}H(?:" + minutes + "|" + seconds + ")?|" + minutes + "|" + seconds + ")";
  return "P(?:[0-9]{1,3}W|[0-9]{1,4}D(?:" + time + ")?|" + time + ")";
}

// What a network's address has behind its prefix is zero.
std::string Ipv4Network(const std::string& byte) {
  const std::string dot = "\\.";
  return absl::StrCat(byte, dot, byte, dot, byte, dot, byte, "(?:/32)?|", byte, dot, byte, dot,
                      byte, dot, "0/24|", byte, dot, byte, dot, "0", dot, "0/16|", byte, dot, "0",
                      dot, "0", dot, "0/8");
}
std::string Ipv6Network() {
  const std::string group = "[0-9A-Fa-f]{1,4}:";
  return absl::StrCat("(?:", Ipv6(), ")(?:/128)?|(?:", group, "){4}:/64|(?:", group,
                      "){3}:/48|(?:", group, "){2}:/32");
}
// Of four letters for three bytes; the letters before the end's = have no bits to spare.
std::string Base64(const std::string& letters) {
  const std::string any = "[A-Za-z0-9" + letters + "]";
  return absl::StrCat("(?:", any, "{4})*(?:", any, "[AQgw]==|", any, "{2}[AEIMQUYcgkosw048]=)?");
}
// Letters, classes and how often they come: what every dialect reads. Without a backslash, as a
// JSON string would write two.
std::string Expression() {
  const std::string one =
      "(?:[A-Za-z0-9 _@#%&=:;,<>'~!/.-]|\\[\\^?(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9)+\\])";
  return absl::StrCat("\\^?(?:", one, "(?:[*+?]|\\{[1-9]\\})?)*\\$?");
}

using Formats = std::vector<std::pair<std::string, std::string>>;
Formats MakeFormats() {
  // Days that every month has.
  const std::string date = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])";
  const std::string time =
      "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
  const std::string word = "[a-z0-9]{1,20}";
  const std::string byte = "(?:[1-9]?[0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])";
  const std::string email = word + "(?:[._+-]" + word + "){0,2}@" + word + "(?:-" + word +
                            ")?(?:\\." + word + "){0,2}\\.[a-z]{2,10}";
  const std::string ipv4 = byte + "(?:\\." + byte + "){3}";
  const std::string ipv4_interface = ipv4 + "(?:/(?:[1-9]|[12][0-9]|3[0-2]))?";
  const std::string ipv6_interface = "(?:" + Ipv6() + ")(?:/(?:[1-9][0-9]?|1[01][0-9]|12[0-8]))?";
  const auto uuid = [](const char* version) {
    return absl::StrCat("[0-9a-f]{8}-[0-9a-f]{4}-", version, "[0-9a-f]{3}-[89ab][0-9a-f]{3}-",
                        "[0-9a-f]{12}");
  };
  return {{"date", date},
          {"time", time},
          {"date-time", date + "T" + time},
          {"duration", Duration()},
          {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"},
          {"uuid1", uuid("1")},
          {"uuid3", uuid("3")},
          {"uuid4", uuid("4")},
          {"uuid5", uuid("5")},
          {"uuid6", uuid("6")},
          {"uuid7", uuid("7")},
          {"uuid8", uuid("8")},
          {"email", email},
          {"idn-email", email},
          {"hostname", HostName()},
          {"ipv4", ipv4},
          {"ipv6", Ipv6()},
          {"ipv4network", Ipv4Network(byte)},
          {"ipv6network", Ipv6Network()},
          {"ipv4interface", ipv4_interface},
          {"ipv6interface", ipv6_interface},
          {"ipvanyaddress", ipv4 + "|" + Ipv6()},
          {"ipvanynetwork", Ipv4Network(byte) + "|" + Ipv6Network()},
          {"ipvanyinterface", ipv4_interface + "|" + ipv6_interface},
          {"base64", Base64("+/")},
          {"base64url", Base64("_-")},
          {"regex", Expression()},
          {"uri", Uri()}};
}
const Formats& KnownFormats() {
  static const auto* formats = new Formats(MakeFormats());
  return *formats;
}

absl::StatusOr<std::shared_ptr<const Automaton>> Shared(absl::StatusOr<Automaton> automaton) {
  if (!automaton.ok()) return automaton.status();
  return std::make_shared<const Automaton>(*std::move(automaton));
}
}  // namespace

std::string FormatExpression(const std::string& format) {
  for (const auto& [name, expression] : KnownFormats()) {
    if (name == format) return expression;
  }
  return "";
}

const std::set<std::string>& AnyTextFormats() {
  static const auto* names =
      new std::set<std::string>{"binary", "password", "path", "file-path", "directory-path"};
  return *names;
}

std::string FormatNames() {
  std::string all;
  for (const auto& [name, expression] : KnownFormats()) absl::StrAppend(&all, name, ", ");
  return all + absl::StrJoin(AnyTextFormats(), ", ");
}

absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Compile(
    const PatternPtr& pattern) {
  return Shared(Automaton::Compile(*pattern, limits_));
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Intersect(const Automaton& a,
                                                                           const Automaton& b) {
  return Shared(Automaton::Intersect(a, b, limits_));
}
absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Subtract(const Automaton& a,
                                                                          const Automaton& b) {
  return Shared(Automaton::Subtract(a, b, limits_));
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
  if (!work_.Spend(1 + static_cast<int64_t>(text.size() / 8))) return work_.Status();
  const auto known = known_.find(text);
  if (known != known_.end()) return known->second;
  return known_.emplace(text, Build(rules)).first->second;
}

absl::StatusOr<std::shared_ptr<const Automaton>> StringAutomata::Build(const Json& rules) {
  std::vector<PatternPtr> parts;
  const auto count = [&rules](const char* key, int32_t otherwise) {
    return rules.contains(key) ? rules[key].get<int32_t>() : otherwise;
  };
  if (rules.contains("pattern")) {
    ASSIGN_OR_RETURN(parts.emplace_back(),
                     ParseRegex(rules["pattern"].get<std::string>(), RegexMatch::kSearch,
                                RegexText::kPlain, &work_));
  }
  if (rules.contains("format") && !AnyTextFormats().count(rules["format"].get<std::string>())) {
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
