#include "config/run_config.h"

#include <xxhash.h>
#include <yaml-cpp/yaml.h>

#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/status.h"
#include "config/binder.h"
#include "config/keys.h"

namespace stretto {
namespace {
using config_internal::FieldRef;
using config_internal::Origins;
using config_internal::RewardKeys;
using config_internal::Rule;
using config_internal::RunKeys;

void EmitValue(YAML::Emitter& out, const FieldRef& field, const Rule& rule) {
  if (auto* text = std::get_if<std::string*>(&field)) {
    out << YAML::DoubleQuoted << **text;
  } else if (auto* list = std::get_if<std::vector<std::string>*>(&field)) {
    out << YAML::Flow << YAML::BeginSeq;
    for (const auto& item : **list) out << YAML::DoubleQuoted << item;
    out << YAML::EndSeq;
  } else {
    out << config_internal::ValueText(field, rule);
  }
}

void EmitRewards(YAML::Emitter& out, RunConfig& config) {
  out << YAML::Key << "rewards" << YAML::Value << YAML::BeginSeq;
  for (RewardSpec& reward : config.rewards) {
    out << YAML::BeginMap;
    for (const auto& key : RewardKeys()) {
      const auto& types = key.only_for;
      if (!types.empty() && std::count(types.begin(), types.end(), reward.type) == 0) continue;
      out << YAML::Key << key.name << YAML::Value;
      EmitValue(out, key.field(reward), key.rule);
    }
    out << YAML::EndMap;
  }
  out << YAML::EndSeq;
}

// What the run computes, as text: see RunConfig::hash.
std::string HashOf(RunConfig config) {
  const auto last_part = [](const std::string& path) {
    const auto p = std::filesystem::path(path);
    return (p.has_filename() ? p : p.parent_path()).filename().string();
  };
  config.run.dir.clear();
  config.model.path = last_part(config.model.path);
  config.lora.adapter = last_part(config.lora.adapter);
  config.ppo.critic_model = last_part(config.ppo.critic_model);
  for (RewardSpec& reward : config.rewards) reward.path = last_part(reward.path);
  config.data.train = last_part(config.data.train);
  config.data.eval = last_part(config.data.eval);
  const std::string backend = config.cluster.backend;
  config.cluster = ClusterSection();
  config.cluster.backend = backend;
  const std::string text = ToYaml(config);
  return absl::StrFormat("%016x", XXH3_64bits(text.data(), text.size()));
}

absl::Status SyntaxError(const std::string& origin, const YAML::Exception& error) {
  const std::string where =
      error.mark.is_null() ? origin : absl::StrCat(origin, ":", error.mark.line + 1);
  return absl::InvalidArgumentError(absl::StrCat(where, ": not valid YAML: ", error.msg));
}

absl::Status BindText(const std::string& text, const std::string& name, RunConfig* config,
                      Origins* origins) {
  try {
    const auto documents = YAML::LoadAll(text);
    if (documents.size() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": expected one YAML document, found ", documents.size()));
    }
    const std::string folder = std::filesystem::path(name).parent_path().string();
    return config_internal::BindDocument(documents[0], name, folder, config, origins);
  } catch (const YAML::Exception& error) {
    return SyntaxError(name, error);
  }
}
}  // namespace

std::string FirstDifference(const std::string& before, const std::string& after) {
  const std::vector<std::string> a = absl::StrSplit(before, '\n'), b = absl::StrSplit(after, '\n');
  // A program of another version has lines more or less: what is in one text alone counts.
  const auto first_without = [](const std::vector<std::string>& lines,
                                const std::vector<std::string>& others) {
    for (const std::string& line : lines) {
      if (std::count(others.begin(), others.end(), line) == 0) {
        return std::string(absl::StripAsciiWhitespace(line));
      }
    }
    return std::string();
  };
  if (a == b) return "";
  return absl::StrCat("was `", first_without(a, b), "`, is `", first_without(b, a), "`");
}

absl::StatusOr<RunConfig> LoadRunConfig(const std::string& path,
                                        const std::vector<std::string>& overrides) {
  ASSIGN_OR_RETURN(const std::string text, Files::Real().ReadAll(path));
  return ParseRunConfig(text, path, overrides);
}

absl::StatusOr<RunConfig> ParseRunConfig(const std::string& text, const std::string& name,
                                         const std::vector<std::string>& overrides) {
  RunConfig config;
  Origins origins(name);
  RETURN_IF_ERROR(BindText(text, name, &config, &origins));
  for (const std::string& override_text : overrides) {
    try {
      RETURN_IF_ERROR(config_internal::BindOverride(override_text, &config, &origins));
    } catch (const YAML::Exception& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("override '", override_text, "': not valid YAML: ", error.msg));
    }
  }
  RETURN_IF_ERROR(config_internal::FinishAndCheck(&config, origins));
  config.source_path = name;
  config.hash = HashOf(config);
  return config;
}

std::string ToYaml(const RunConfig& config) {
  RunConfig copy = config;
  YAML::Emitter out;
  out << YAML::BeginMap;
  std::string section;
  for (const auto& key : RunKeys()) {
    if (key.section != section) {
      if (!section.empty()) out << YAML::EndMap;
      if (section == "rollout") EmitRewards(out, copy);
      section = key.section;
      out << YAML::Key << section << YAML::Value << YAML::BeginMap;
    }
    out << YAML::Key << key.name << YAML::Value;
    EmitValue(out, key.field(copy), key.rule);
  }
  out << YAML::EndMap << YAML::EndMap;
  return absl::StrCat(out.c_str(), "\n");
}
}  // namespace stretto
