#include "config/binder.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "config/keys.h"

namespace stretto::config_internal {
namespace {
// Edit distance of two short words (insertions, deletions, substitutions).
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// "; did you mean 'lr'?" for the nearest known word, else "; known here: …".
std::string Suggestion(const std::string& word, const std::vector<std::string>& known) {
  const std::string* nearest = nullptr;
  size_t best = 0;
  for (const auto& candidate : known) {
    const size_t distance = EditDistance(word, candidate);
    if (nearest == nullptr || distance < best) nearest = &candidate, best = distance;
  }
  if (nearest != nullptr && best <= std::max<size_t>(2, word.size() / 3)) {
    return absl::StrCat("; did you mean '", *nearest, "'?");
  }
  return absl::StrCat("; known here: ", absl::StrJoin(known, ", "));
}

// What stands at a node, for messages; long texts are cut.
std::string Found(const YAML::Node& node) {
  if (node.IsMap()) return "a mapping";
  if (node.IsSequence()) return "a list";
  if (!node.IsScalar()) return "nothing";
  std::string text = node.Scalar();
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return absl::StrCat("'", text, "'");
}

// Quoted scalars are texts whatever they look like.
bool IsPlain(const YAML::Node& node) { return node.IsScalar() && node.Tag() != "!"; }

bool Within(double value, const Rule& rule) {
  if (!std::isfinite(value)) return false;
  if (rule.min_excluded ? value <= rule.min : value < rule.min) return false;
  return !(rule.max_excluded ? value >= rule.max : value > rule.max);
}

bool ReadText(const YAML::Node& node, const Rule& rule, std::string* value) {
  if (!node.IsScalar()) return false;
  *value = node.Scalar();
  if (rule.is_name) {
    return !value->empty() && value->find_first_not_of(".") != std::string::npos &&
           std::all_of(value->begin(), value->end(), [](unsigned char c) {
             return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
           });
  }
  return rule.choices.empty() || std::count(rule.choices.begin(), rule.choices.end(), *value) > 0;
}

bool ReadList(const YAML::Node& node, std::vector<std::string>* value) {
  if (!node.IsSequence()) return false;
  value->clear();
  for (const auto& item : node) {
    if (!item.IsScalar()) return false;
    value->push_back(item.Scalar());
  }
  return true;
}

// Reads `node` into the field; false: not what the rule wants.
bool ReadValue(const YAML::Node& node, const Rule& rule, const FieldRef& field) {
  if (auto* text = std::get_if<std::string*>(&field)) return ReadText(node, rule, *text);
  if (auto* list = std::get_if<std::vector<std::string>*>(&field)) return ReadList(node, *list);
  if (!IsPlain(node)) return false;
  const std::string& scalar = node.Scalar();
  if (auto* flag = std::get_if<bool*>(&field)) {
    **flag = scalar == "true";
    return scalar == "true" || scalar == "false";
  }
  if (auto* number = std::get_if<double*>(&field)) {
    return absl::SimpleAtod(scalar, *number) && Within(**number, rule);
  }
  if (auto* integer = std::get_if<int64_t*>(&field)) {
    const auto word = rule.words.find(scalar);
    if (word != rule.words.end()) {
      **integer = word->second;
      return true;
    }
    return absl::SimpleAtoi(scalar, *integer) && Within(static_cast<double>(**integer), rule);
  }
  return absl::SimpleAtoi(scalar, std::get<uint64_t*>(field));
}

// What whoever writes this value may mean: " (…)", or nothing.
std::string HintFor(const YAML::Node& value, const Rule& rule) {
  if (!value.IsScalar()) return "";
  const auto hint = rule.hints.find(absl::AsciiStrToLower(value.Scalar()));
  return hint == rule.hints.end() ? "" : absl::StrCat(" (", hint->second, ")");
}

// Binds the keys of one mapping, which belongs to `prefix` ("train." or "rewards[0].").
class MappingBinder {
 public:
  MappingBinder(std::string name, std::string folder, Origins* origins)
      : name_(std::move(name)), folder_(std::move(folder)), origins_(origins) {}

  std::string OriginOf(const YAML::Node& node) const {
    return name_.rfind("override", 0) == 0 ? name_ : absl::StrCat(name_, ":", node.Mark().line + 1);
  }

  // The key's text, after checking that it is one and new here.
  absl::StatusOr<std::string> KeyText(const YAML::Node& key, const std::string& prefix,
                                      std::set<std::string>* seen) const {
    if (!key.IsScalar()) {
      return absl::InvalidArgumentError(
          absl::StrCat(OriginOf(key), ": ", prefix, " expected a key, found ", Found(key)));
    }
    if (!seen->insert(key.Scalar()).second) {
      return absl::InvalidArgumentError(absl::StrCat(OriginOf(key), ": ", prefix, key.Scalar(),
                                                     ": expected once, found a second time"));
    }
    return key.Scalar();
  }

  template <class Owner>
  absl::Status BindMapping(const YAML::Node& map, const std::string& section,
                           const std::string& prefix, const std::vector<KeyDef<Owner>>& keys,
                           Owner* owner) const {
    if (map.IsNull()) return absl::OkStatus();  // a section with no keys
    if (!map.IsMap()) {
      return absl::InvalidArgumentError(absl::StrCat(
          OriginOf(map), ": ", section, ": expected keys with values, found ", Found(map)));
    }
    std::set<std::string> seen;
    for (const auto& item : map) {
      ASSIGN_OR_RETURN(const std::string key, KeyText(item.first, prefix, &seen));
      RETURN_IF_ERROR(BindKey(item.first, key, item.second, section, prefix, keys, owner));
    }
    return absl::OkStatus();
  }

 private:
  template <class Owner>
  absl::Status BindKey(const YAML::Node& key_node, const std::string& key, const YAML::Node& value,
                       const std::string& section, const std::string& prefix,
                       const std::vector<KeyDef<Owner>>& keys, Owner* owner) const {
    std::vector<std::string> known;
    for (const auto& def : keys) {
      if (def.section != section) continue;
      known.push_back(def.name);
      if (def.name != key) continue;
      origins_->Set(prefix + key, OriginOf(key_node));
      const FieldRef field = def.field(*owner);
      if (!ReadValue(value, def.rule, field)) {
        return origins_->Error(prefix + key, Expectation(field, def.rule),
                               Found(value) + HintFor(value, def.rule));
      }
      ResolvePath(def.rule, field);
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(key_node), ": ", prefix, key,
                                                   ": unknown key", Suggestion(key, known)));
  }

  // Makes a path absolute. Whether it exists is asked when the overrides are in as well.
  void ResolvePath(const Rule& rule, const FieldRef& field) const {
    if (rule.path == Rule::Path::kNone) return;
    std::string& path = *std::get<std::string*>(field);
    if (path.empty()) return;
    std::error_code ec;
    const auto absolute =
        std::filesystem::absolute(std::filesystem::path(folder_) / path, ec).lexically_normal();
    if (!ec) path = absolute.string();
  }

  const std::string name_;
  const std::string folder_;
  Origins* const origins_;
};

std::vector<std::string> SectionNames() {
  std::vector<std::string> names;
  for (const auto& key : RunKeys()) {
    if (names.empty() || names.back() != key.section) names.push_back(key.section);
  }
  names.push_back("rewards");
  return names;
}

absl::Status BindRewards(const MappingBinder& binder, const YAML::Node& list, RunConfig* config) {
  if (!list.IsSequence()) {
    return absl::InvalidArgumentError(
        absl::StrCat(binder.OriginOf(list),
                     ": rewards: expected a list of rewards (- type: …), found ", Found(list)));
  }
  config->rewards.clear();
  for (const auto& item : list) {
    const std::string prefix = absl::StrCat("rewards[", config->rewards.size(), "].");
    RewardSpec reward;
    if (!item.IsMap()) {
      return absl::InvalidArgumentError(absl::StrCat(binder.OriginOf(item), ": ", prefix,
                                                     " expected keys with values (type: …), found ",
                                                     Found(item)));
    }
    RETURN_IF_ERROR(binder.BindMapping(item, "rewards", prefix, RewardKeys(), &reward));
    config->rewards.push_back(std::move(reward));
  }
  return absl::OkStatus();
}

absl::Status OverrideError(const std::string& text, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("override '", text, "': ", what));
}
}  // namespace

std::string Origins::Of(const std::string& key) const {
  const auto it = origins_.find(key);
  return it == origins_.end() ? file_ : it->second;
}

absl::Status Origins::Error(const std::string& key, const std::string& expected,
                            const std::string& found) const {
  return absl::InvalidArgumentError(
      absl::StrCat(Of(key), ": ", key, ": expected ", expected, ", found ", found));
}

absl::Status BindDocument(const YAML::Node& root, const std::string& name,
                          const std::string& folder, RunConfig* config, Origins* origins) {
  const MappingBinder binder(name, folder, origins);
  if (!root.IsMap()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ":1: expected sections (model:, data:, …), found ", Found(root)));
  }
  std::set<std::string> seen;
  for (const auto& item : root) {
    ASSIGN_OR_RETURN(const std::string section, binder.KeyText(item.first, "", &seen));
    const auto names = SectionNames();
    if (std::count(names.begin(), names.end(), section) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(binder.OriginOf(item.first), ": ", section,
                                                     ": unknown section",
                                                     Suggestion(section, names)));
    }
    if (section == "rewards") {
      origins->Set("rewards", binder.OriginOf(item.first));
      RETURN_IF_ERROR(BindRewards(binder, item.second, config));
    } else {
      RETURN_IF_ERROR(binder.BindMapping(item.second, section, section + ".", RunKeys(), config));
    }
  }
  return absl::OkStatus();
}

absl::Status BindOverride(const std::string& text, RunConfig* config, Origins* origins) {
  const size_t equals = text.find('=');
  const size_t dot = text.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot > equals) {
    return OverrideError(text, "expected section.key=value");
  }
  const std::string section = text.substr(0, dot);
  YAML::Node map;
  const std::string value = text.substr(equals + 1);
  map[text.substr(dot + 1, equals - dot - 1)] =
      value.empty() ? YAML::Node(std::string()) : YAML::Load(value);
  const MappingBinder binder(absl::StrCat("override '", text, "'"), "", origins);
  absl::string_view index = section;
  if (absl::ConsumePrefix(&index, "rewards[") && absl::ConsumeSuffix(&index, "]")) {
    size_t i = 0;
    if (!absl::SimpleAtoi(index, &i) || i >= config->rewards.size()) {
      return OverrideError(text, absl::StrCat("expected the index of one of the file's ",
                                              config->rewards.size(), " rewards"));
    }
    return binder.BindMapping(map, "rewards", section + ".", RewardKeys(), &config->rewards[i]);
  }
  const auto names = SectionNames();
  if (section == "rewards" || std::count(names.begin(), names.end(), section) == 0) {
    return OverrideError(text, absl::StrCat("unknown section", Suggestion(section, names)));
  }
  return binder.BindMapping(map, section, section + ".", RunKeys(), config);
}
}  // namespace stretto::config_internal
