// What one key alone cannot show: values that must fit together.
#include <filesystem>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "config/binder.h"
#include "config/keys.h"

namespace stretto::config_internal {
namespace {
absl::Status CheckBelow(const Origins& origins, const std::string& key, int64_t value,
                        const std::string& limit_key, int64_t limit) {
  if (value < limit) return absl::OkStatus();
  return origins.Error(key, absl::StrCat("less than ", limit_key, " (", limit, ")"),
                       absl::StrCat(value));
}

absl::Status CheckRequired(const Origins& origins, const std::string& key, const std::string& value,
                           const std::string& what) {
  if (!value.empty()) return absl::OkStatus();
  return origins.Error(key, what, "nothing");
}

absl::Status CheckPaths(RunConfig* c, const Origins& origins) {
  for (const auto& key : RunKeys()) {
    if (key.rule.path == Rule::Path::kNone) continue;
    const FieldRef field = key.field(*c);
    const std::string& path = *std::get<std::string*>(field);
    const std::string name = absl::StrCat(key.section, ".", key.name);
    const std::string expected = Expectation(field, key.rule);
    if (path.empty() && key.rule.path == Rule::Path::kExistingIfGiven) continue;
    if (path.empty()) return origins.Error(name, expected, "nothing");
    std::error_code ec;
    if (!std::filesystem::exists(path, ec)) {
      return origins.Error(name, expected, absl::StrCat("'", path, "', which does not exist"));
    }
    if (key.section == "data" && std::filesystem::is_directory(path, ec)) {
      return origins.Error(name, "a JSONL file", absl::StrCat("'", path, "', which is a folder"));
    }
  }
  return absl::OkStatus();
}

// What gRPC can find: host:port, or a name with a scheme of its own.
bool IsAddress(absl::string_view address) {
  for (const absl::string_view scheme : {"dns:", "unix:", "ipv4:", "ipv6:"}) {
    if (absl::StartsWith(address, scheme) && address.size() > scheme.size()) return true;
  }
  const size_t colon = address.rfind(':');
  int64_t port = 0;
  if (colon == absl::string_view::npos || colon == 0) return false;
  const absl::string_view host = address.substr(0, colon), digits = address.substr(colon + 1);
  const bool is_plain = host.find_first_of("/:@ \t") == absl::string_view::npos;
  const bool is_ipv6 = host.front() == '[' && host.back() == ']';
  return (is_plain || is_ipv6) && digits.find_first_not_of("0123456789") == digits.npos &&
         absl::SimpleAtoi(digits, &port) && port >= 1 && port <= 65535;
}

absl::Status CheckReward(const RunConfig& c, const Origins& origins, size_t index,
                         std::set<std::string>* names) {
  const RewardSpec& reward = c.rewards[index];
  const std::string prefix = absl::StrCat("rewards[", index, "].");
  for (const auto& key : RewardKeys()) {
    const auto& types = key.only_for;
    if (types.empty() || !origins.Has(prefix + key.name)) continue;
    if (std::count(types.begin(), types.end(), reward.type) > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        origins.Of(prefix + key.name), ": ", prefix, key.name, ": only for rewards of type ",
        absl::StrJoin(types, ", "), "; this one is of type '", reward.type, "'"));
  }
  if (!names->insert(reward.name).second) {
    return origins.Error(prefix + "name", "a name that no other reward has",
                         absl::StrCat("'", reward.name, "' again"));
  }
  if (reward.type == "regex") {
    RETURN_IF_ERROR(CheckRequired(origins, prefix + "pattern", reward.pattern, "a pattern"));
  }
  if (reward.type == "service") {
    RETURN_IF_ERROR(CheckRequired(origins, prefix + "address", reward.address, "host:port"));
    if (!IsAddress(reward.address)) {
      return origins.Error(prefix + "address", "host:port, without a scheme such as http://",
                           absl::StrCat("'", reward.address, "'"));
    }
  }
  if (reward.type == "model") {
    const std::string what = "the path of a reward model";
    RETURN_IF_ERROR(CheckRequired(origins, prefix + "path", reward.path, what));
    std::error_code ec;
    if (!std::filesystem::exists(reward.path, ec)) {
      return origins.Error(prefix + "path", what,
                           absl::StrCat("'", reward.path, "', which does not exist"));
    }
  }
  if (reward.type == "length") {
    RETURN_IF_ERROR(CheckBelow(origins, prefix + "target_tokens", reward.target_tokens,
                               "rollout.max_tokens", c.rollout.max_tokens));
  }
  return absl::OkStatus();
}

absl::Status CheckRewards(RunConfig* c, const Origins& origins) {
  if (c->rewards.empty()) return origins.Error("rewards", "at least one reward", "none");
  for (size_t i = 0; i < c->rewards.size(); ++i) {
    RETURN_IF_ERROR(CheckRequired(origins, absl::StrCat("rewards[", i, "].type"),
                                  c->rewards[i].type,
                                  Expectation(&c->rewards[i].type, RewardKeys()[0].rule)));
    if (c->rewards[i].name.empty()) c->rewards[i].name = c->rewards[i].type;
  }
  std::set<std::string> names;
  for (size_t i = 0; i < c->rewards.size(); ++i) {
    RETURN_IF_ERROR(CheckReward(*c, origins, i, &names));
  }
  if (c->eval.reward.empty()) c->eval.reward = c->rewards.front().name;
  if (names.count(c->eval.reward) == 0) {
    return origins.Error("eval.reward", absl::StrCat("one of ", absl::StrJoin(names, ", ")),
                         absl::StrCat("'", c->eval.reward, "'"));
  }
  return absl::OkStatus();
}

absl::Status CheckLengths(const RunConfig& c, const Origins& origins) {
  const int64_t context = c.model.MostLength();
  const std::string context_key = "model.max_sequence_length";
  RETURN_IF_ERROR(
      CheckBelow(origins, "rollout.max_tokens", c.rollout.max_tokens, context_key, context));
  RETURN_IF_ERROR(CheckBelow(origins, "eval.max_tokens", c.eval.max_tokens, context_key, context));
  RETURN_IF_ERROR(CheckBelow(origins, "data.max_prompt_tokens", c.data.max_prompt_tokens,
                             context_key, context));
  const int64_t first = c.rollout.first_max_tokens;
  if (first > c.rollout.max_tokens || (first > 0 && first < c.rollout.min_tokens)) {
    return origins.Error("rollout.first_max_tokens",
                         absl::StrCat("0, or between rollout.min_tokens (", c.rollout.min_tokens,
                                      ") and rollout.max_tokens (", c.rollout.max_tokens, ")"),
                         absl::StrCat(first));
  }
  if (c.algorithm.dynamic_sampling && c.rollout.group_size < 2) {
    return origins.Error("algorithm.dynamic_sampling",
                         "false where rollout.group_size is 1 (one reward is always the same)",
                         "true");
  }
  if (c.rollout.min_tokens > c.rollout.max_tokens) {
    return origins.Error("rollout.min_tokens",
                         absl::StrCat("at most rollout.max_tokens (", c.rollout.max_tokens, ")"),
                         absl::StrCat(c.rollout.min_tokens));
  }
  constexpr size_t kMaxStopBytes = 1024;  // as a generator allows
  for (const std::string& stop : c.rollout.stop) {
    if (!stop.empty() && stop.size() <= kMaxStopBytes) continue;
    return origins.Error("rollout.stop", absl::StrCat("texts of 1 to ", kMaxStopBytes, " bytes"),
                         absl::StrCat("one of ", stop.size()));
  }
  return absl::OkStatus();
}

// Quantised weights, keys and values write tokens with other log-probs than the trainer's: it must
// know and correct. `value` is that of `key`, `what` names what it quantises.
absl::Status CheckQuantized(const RunConfig& c, const Origins& origins, const std::string& key,
                            const std::string& value, const std::string& what) {
  if (value == "bf16") return absl::OkStatus();
  const std::string found = absl::StrCat("'", value, "'");
  if (c.model.dtype != "bf16") {
    return origins.Error(key, absl::StrCat("bf16 while model.dtype is ", c.model.dtype), found);
  }
  if (c.schedule.numerics == "exact") {
    return origins.Error(key,
                         "bf16 while schedule.numerics is exact (its log-probs would not be "
                         "the trainer's)",
                         found);
  }
  if (c.algorithm.importance_cap <= 0) {
    return origins.Error(key,
                         absl::StrCat("bf16 while algorithm.importance_cap is 0 (nothing would "
                                      "correct for the quantised ",
                                      what, ")"),
                         found);
  }
  return absl::OkStatus();
}

absl::Status CheckAlgorithm(const RunConfig& c, const Origins& origins) {
  const AlgorithmSection& a = c.algorithm;
  if (a.name != "reinforce" && a.name != "ppo" && c.rollout.group_size < 2) {
    return origins.Error("rollout.group_size", absl::StrCat("at least 2 for algorithm ", a.name),
                         absl::StrCat(c.rollout.group_size));
  }
  if (a.kl_target > 0 && a.kl_coef == 0) {
    return origins.Error("algorithm.kl_target", "0 while algorithm.kl_coef is 0",
                         NumberText(a.kl_target));
  }
  const std::string of_this = absl::StrCat(" for algorithm ", a.name);
  if (a.dual_clip > 0 && a.name == "reinforce") {
    return origins.Error("algorithm.dual_clip", "0" + of_this, NumberText(a.dual_clip));
  }
  if (a.dual_clip > 0 && a.dual_clip < 1 + a.clip_high) {
    return origins.Error(
        "algorithm.dual_clip",
        absl::StrCat("0 or at least 1 + algorithm.clip_high (", NumberText(1 + a.clip_high), ")"),
        NumberText(a.dual_clip));
  }
  if (a.loss_denominator != "token_mean" && a.name == "ppo") {
    return origins.Error("algorithm.loss_denominator", "token_mean" + of_this,
                         absl::StrCat("'", a.loss_denominator, "'"));
  }
  if (a.ratio_level != "token" && a.name != "grpo") {
    return origins.Error("algorithm.ratio_level", "token" + of_this,
                         absl::StrCat("'", a.ratio_level, "'"));
  }
  if (a.loss_denominator != "token_mean" && a.name == "rloo") {
    return origins.Error("algorithm.loss_denominator",
                         "nothing for algorithm rloo, which takes the mean over sequences",
                         absl::StrCat("'", a.loss_denominator, "'"));
  }
  return absl::OkStatus();
}

absl::Status CheckTrainers(const RunConfig& c, const Origins& origins) {
  const ClusterSection& cluster = c.cluster;
  if (c.train.gradient_dtype == "bf16" && c.model.dtype != "bf16") {
    return origins.Error("train.gradient_dtype",
                         absl::StrCat("f32 while model.dtype is ", c.model.dtype), "'bf16'");
  }
  if (cluster.trainers > c.train.reduction_leaves) {
    return origins.Error("cluster.trainers",
                         absl::StrCat("at most train.reduction_leaves (", c.train.reduction_leaves,
                                      "); raise that before the run's first step, it is part of "
                                      "what the run's bits depend on"),
                         absl::StrCat(cluster.trainers));
  }
  if (cluster.min_trainers > cluster.trainers) {
    return origins.Error("cluster.min_trainers",
                         absl::StrCat("at most cluster.trainers (", cluster.trainers, ")"),
                         absl::StrCat(cluster.min_trainers));
  }
  return absl::OkStatus();
}

// Ranks that share one copy of the model. What depends on the model's own sizes its trainer checks.
absl::Status CheckTensorParallel(const RunConfig& c, const Origins& origins) {
  const int64_t T = c.cluster.tensor_parallel, L = c.train.k_leaves;
  const std::string found = absl::StrCat(T);
  if (c.cluster.trainers % T != 0) {
    return origins.Error("cluster.tensor_parallel",
                         absl::StrCat("a divisor of cluster.trainers (", c.cluster.trainers, ")"),
                         found);
  }
  if (L % T != 0) {
    return origins.Error(
        "cluster.tensor_parallel",
        absl::StrCat("a divisor of train.k_leaves (", L, "), of which ranks own whole ones",
                     L == 1 ? "; raise that before the run's first step, it is part of what the "
                              "run's bits depend on"
                            : ""),
        found);
  }
  if (L == 1) return absl::OkStatus();
  const std::string leaves = absl::StrCat(L);
  if (c.lora.enabled()) return origins.Error("train.k_leaves", "1 with lora", leaves);
  if (c.train.optimizer_state != "f32") {
    return origins.Error("train.k_leaves", "1 with train.optimizer_state: 8bit", leaves);
  }
  if (c.cluster.offload_optimizer) {
    return origins.Error("cluster.offload_optimizer",
                         absl::StrCat("false with train.k_leaves ", leaves), "true");
  }
  if (c.train.gradient_dtype != "f32") {
    return origins.Error("train.gradient_dtype", absl::StrCat("f32 with train.k_leaves ", leaves),
                         "'bf16'");
  }
  for (const auto& [key, value] : {std::pair{"rollout.weight_dtype", &c.rollout.weight_dtype},
                                   std::pair{"rollout.kv_dtype", &c.rollout.kv_dtype}}) {
    if (*value == "bf16") continue;
    return origins.Error(key, absl::StrCat("bf16 with train.k_leaves ", leaves),
                         absl::StrCat("'", *value, "'"));
  }
  return absl::OkStatus();
}

absl::Status CheckLora(const RunConfig& c, const Origins& origins) {
  const LoraSection& lora = c.lora;
  if (lora.rank == 0 && (lora.alpha > 0 || !lora.targets.empty())) {
    return origins.Error(
        lora.alpha > 0 ? "lora.alpha" : "lora.targets", "nothing where lora.rank is 0",
        lora.alpha > 0 ? NumberText(lora.alpha)
                       : absl::StrCat("[", absl::StrJoin(lora.targets, ", "), "]"));
  }
  const std::set<std::string> known = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                       "gate_proj", "up_proj", "down_proj"};
  std::set<std::string> seen;
  for (const std::string& target : lora.targets) {
    if (known.contains(target) && seen.insert(target).second) continue;
    return origins.Error("lora.targets", absl::StrCat("some of ", absl::StrJoin(known, ", ")),
                         absl::StrCat("'", target, "'", seen.contains(target) ? " twice" : ""));
  }
  return absl::OkStatus();
}

absl::Status CheckCluster(const RunConfig& c, const Origins& origins) {
  RETURN_IF_ERROR(CheckTrainers(c, origins));
  RETURN_IF_ERROR(CheckTensorParallel(c, origins));
  RETURN_IF_ERROR(CheckLora(c, origins));
  if (c.cluster.lease_ms < 2 * c.cluster.heartbeat_ms) {
    return origins.Error(
        "cluster.lease_ms",
        absl::StrCat("at least twice cluster.heartbeat_ms (", c.cluster.heartbeat_ms, ")"),
        absl::StrCat(c.cluster.lease_ms));
  }
  if ((c.cluster.speculation == "model") != !c.cluster.draft_model.empty()) {
    return origins.Error("cluster.draft_model", "a path with speculation: model, and only then",
                         c.cluster.draft_model.empty() ? "nothing" : c.cluster.draft_model);
  }
  if (c.cluster.http_port > 0 && c.cluster.http_port + c.cluster.generators > 65536) {
    return origins.Error("cluster.http_port",
                         absl::StrCat("room for ", c.cluster.generators, " ports"),
                         absl::StrCat(c.cluster.http_port));
  }
  const int64_t num_ports = 3 + c.cluster.generators + c.cluster.scorers + c.cluster.trainers;
  if (c.cluster.base_port > 0 && c.cluster.base_port + num_ports > 65536) {
    return origins.Error("cluster.base_port", absl::StrCat("room for ", num_ports, " ports"),
                         absl::StrCat(c.cluster.base_port));
  }
  return absl::OkStatus();
}
}  // namespace

absl::Status FinishAndCheck(RunConfig* c, const Origins& origins) {
  RETURN_IF_ERROR(CheckPaths(c, origins));
  if (c->run.dir.empty()) c->run.dir = "runs/" + c->run.name;
  std::error_code ec;
  const auto dir = std::filesystem::absolute(c->run.dir, ec).lexically_normal();
  if (!ec) c->run.dir = dir.string();
  RETURN_IF_ERROR(CheckLengths(*c, origins));
  RETURN_IF_ERROR(
      CheckQuantized(*c, origins, "rollout.weight_dtype", c->rollout.weight_dtype, "weights"));
  RETURN_IF_ERROR(
      CheckQuantized(*c, origins, "rollout.kv_dtype", c->rollout.kv_dtype, "keys and values"));
  RETURN_IF_ERROR(CheckRewards(c, origins));
  if (c->algorithm.name == "rloo" && !origins.Has("algorithm.advantage_scale")) {
    c->algorithm.advantage_scale = "leave_one_out";
  }
  RETURN_IF_ERROR(CheckAlgorithm(*c, origins));
  if (c->eval.every > 0 && c->data.eval.empty()) {
    return origins.Error("eval.every", "0 while data.eval names no file",
                         absl::StrCat(c->eval.every));
  }
  return CheckCluster(*c, origins);
}
}  // namespace stretto::config_internal
