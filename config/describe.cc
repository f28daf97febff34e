// Words about keys: what is expected of them, their values as text, the reference tables.
#include <charconv>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/keys.h"

namespace stretto::config_internal {
namespace {
template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;  // Clang before 17 deduces none for aggregates

// "an integer", "a number" with the rule's bounds.
std::string RangeText(const std::string& noun, const Rule& rule) {
  const bool has_min = rule.min != -std::numeric_limits<double>::infinity();
  const bool has_max = rule.max != std::numeric_limits<double>::infinity();
  const std::string article = noun == "integer" ? "an " : "a ";
  if (!has_min && !has_max) return article + noun;
  if (!has_max && rule.min == 0 && rule.min_excluded) return absl::StrCat("a positive ", noun);
  std::string text = article + noun;
  if (has_min) {
    absl::StrAppend(&text, rule.min_excluded ? " above " : " of at least ", NumberText(rule.min));
  }
  if (has_max) {
    absl::StrAppend(&text, has_min ? " and" : "", rule.max_excluded ? " below " : " at most ",
                    NumberText(rule.max));
  }
  return text;
}

std::string TextExpectation(const Rule& rule) {
  if (!rule.choices.empty()) return absl::StrCat("one of ", absl::StrJoin(rule.choices, ", "));
  if (rule.path != Rule::Path::kNone) return "the path of an existing file or folder";
  if (rule.is_name) return "a name of letters, digits, '.', '_' and '-'";
  return "a text";
}

template <class Owner>
void AppendTable(const std::vector<KeyDef<Owner>>& keys, const std::string& section,
                 std::string* out) {
  Owner defaults{};
  absl::StrAppend(out, "| key | value | default | meaning |\n| --- | --- | --- | --- |\n");
  for (const auto& key : keys) {
    if (key.section != section) continue;
    const FieldRef field = key.field(defaults);
    std::string value = ValueText(field, key.rule);
    if (value.empty()) value = "\"\"";
    std::string help = key.help;
    if (!key.only_for.empty()) {
      absl::StrAppend(&help, " Only for ", absl::StrJoin(key.only_for, ", "), ".");
    }
    absl::StrAppend(out, "| `", key.name, "` | ", Expectation(field, key.rule), " | `", value,
                    "` | ", help, " |\n");
  }
}
}  // namespace

std::string NumberText(double value) {
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

std::string Expectation(const FieldRef& field, const Rule& rule) {
  return std::visit(
      Overloaded{[&](std::string*) { return TextExpectation(rule); },
                 [&](int64_t*) {
                   std::string text = RangeText("integer", rule);
                   for (const auto& [word, value] : rule.words)
                     absl::StrAppend(&text, ", or ", word);
                   return text;
                 },
                 [&](uint64_t*) { return RangeText("integer", rule); },
                 [&](double*) { return RangeText("number", rule); },
                 [&](bool*) { return std::string("true or false"); },
                 [&](std::vector<std::string>*) { return std::string("a list of texts"); }},
      field);
}

std::string ValueText(const FieldRef& field, const Rule& rule) {
  return std::visit(Overloaded{[](std::string* v) { return *v; },
                               [&](int64_t* v) {
                                 for (const auto& [word, value] : rule.words) {
                                   if (value == *v) return word;
                                 }
                                 return absl::StrCat(*v);
                               },
                               [](uint64_t* v) { return absl::StrCat(*v); },
                               [](double* v) { return NumberText(*v); },
                               [](bool* v) { return std::string(*v ? "true" : "false"); },
                               [](std::vector<std::string>* v) {
                                 return absl::StrCat("[", absl::StrJoin(*v, ", "), "]");
                               }},
                    field);
}

std::string RunFileReference() {
  std::string out;
  std::string section;
  for (const auto& key : RunKeys()) {
    if (key.section == section) continue;
    section = key.section;
    absl::StrAppend(&out, "### ", section, "\n");
    AppendTable(RunKeys(), section, &out);
    absl::StrAppend(&out, "\n");
    if (section != "rollout") continue;
    absl::StrAppend(&out, "### rewards\nA list; at least one entry.\n\n");
    AppendTable(RewardKeys(), "rewards", &out);
    absl::StrAppend(&out, "\n");
  }
  return out;
}
}  // namespace stretto::config_internal
