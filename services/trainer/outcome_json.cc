#include "services/trainer/outcome_json.h"

#include <cmath>
#include <limits>

#include "absl/strings/match.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace stretto::services {
namespace {
using nlohmann::json;

// Of what depends on the machine and the moment, or on the rank.
bool IsTiming(const std::string& name) {
  return name == "mfu" || absl::StartsWith(name, "rank_") || absl::EndsWith(name, "seconds") ||
         absl::EndsWith(name, "per_second");
}

json ToJson(const StepOutcome& outcome) {
  json metrics = json::object();
  for (const auto& [name, value] : outcome.metrics) {
    // JSON has no NaN and no infinity: they become null.
    if (!IsTiming(name)) metrics[name] = std::isfinite(value) ? json(value) : json();
  }
  return {{"version", outcome.version},
          {"hash", outcome.hash},
          {"metrics", metrics},
          {"skipped", outcome.skipped},
          {"skip_reason", outcome.skip_reason},
          {"num_tokens", outcome.num_tokens}};
}

absl::StatusOr<StepOutcome> ParseOutcome(const json& value) {
  const auto bad = [] { return absl::DataLossError("checkpoint: damaged outcome of its step"); };
  if (!value.is_object()) return bad();
  StepOutcome outcome;
  for (const char* key : {"version", "num_tokens"}) {
    if (!value.contains(key) || !value[key].is_number_integer()) return bad();
  }
  for (const char* key : {"hash", "skip_reason"}) {
    if (!value.contains(key) || !value[key].is_string()) return bad();
  }
  if (!value.contains("skipped") || !value["skipped"].is_boolean()) return bad();
  if (!value.contains("metrics") || !value["metrics"].is_object()) return bad();
  outcome.version = value["version"].get<int64_t>();
  outcome.num_tokens = value["num_tokens"].get<int64_t>();
  outcome.hash = value["hash"].get<std::string>();
  outcome.skip_reason = value["skip_reason"].get<std::string>();
  outcome.skipped = value["skipped"].get<bool>();
  for (const auto& [name, metric] : value["metrics"].items()) {
    if (!metric.is_number() && !metric.is_null()) return bad();
    outcome.metrics[name] =
        metric.is_null() ? std::numeric_limits<double>::quiet_NaN() : metric.get<double>();
  }
  return outcome;
}
}  // namespace

std::string ToJson(const CheckpointExtra& extra) {
  json value = {{"caller", extra.caller_json}};
  if (extra.last_outcome.has_value()) value["last_outcome"] = ToJson(*extra.last_outcome);
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<CheckpointExtra> ParseExtra(const std::string& text) {
  const json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object() || !value.contains("caller") || !value["caller"].is_string()) {
    return absl::DataLossError("checkpoint: not written by a trainer service (extra state)");
  }
  CheckpointExtra extra{.caller_json = value["caller"].get<std::string>(), .last_outcome = {}};
  if (value.contains("last_outcome")) {
    ASSIGN_OR_RETURN(extra.last_outcome, ParseOutcome(value["last_outcome"]));
  }
  return extra;
}
}  // namespace stretto::services
