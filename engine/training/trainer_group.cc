// What ranks of a group tell one another around a step: that they are about to do the same, and
// what their leaves came to.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_join.h"
#include "base/status.h"
#include "engine/collectives/agree.h"
#include "engine/collectives/socket.h"
#include "engine/training/trainer_engine.h"
#include "engine/training/tree_hash.h"

namespace stretto::engine {
namespace {
template <class T>
absl::string_view BytesOf(const std::vector<T>& v) {
  return {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)};
}

std::string HashOf(const TrainBatch& batch, const TrainerCounters& counters,
                   const TrainerOptions& options) {
  MessageWriter w;
  w.Add(counters.version);
  w.Add(counters.optimizer_steps);
  w.Add(options.micro_batch_tokens);
  w.Add(options.parallel.reduction_leaves);
  w.Add(Name(options.parallel.kind));
  w.Add(options.parallel.tensor_parallel);
  w.Add(options.parallel.k_leaves);
  w.Add(options.lora.rank);
  w.Add(static_cast<int64_t>(options.storage.eight_bit_moments ? 1 : 0));
  w.Add(static_cast<int64_t>(batch.groups.size()));
  for (const TrainGroup& g : batch.groups) {
    w.Add(BytesOf(g.prompt_ids));
    w.Add(static_cast<int64_t>(g.completions.size()));
    for (const TrainCompletion& c : g.completions) {
      w.Add(BytesOf(c.ids));
      w.Add(BytesOf(c.behaviour_logprobs));
      w.Add(BytesOf(c.reference_logprobs));
      w.Add(BytesOf(c.policy_versions));
      w.Add(absl::string_view(reinterpret_cast<const char*>(&c.advantage), sizeof(c.advantage)));
    }
  }
  const std::string& text = w.text();
  return HashBytes({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

void Add(MessageWriter& w, double value) {
  int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  w.Add(bits);
}
double Double(MessageReader& r) {
  const int64_t bits = r.Integer();
  double value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void Write(MessageWriter& w, int64_t leaf, const StepResult& r) {
  w.Add(leaf);
  for (const double v : {r.loss, r.entropy, r.logprob_mismatch_max, r.logprob_mismatch_sum}) {
    Add(w, v);
  }
  w.Add(r.num_compared_tokens);
  w.Add(r.num_computed_tokens);
  w.Add(r.num_backward_tokens);
  w.Add(r.num_backward_targets);
  w.Add(static_cast<int64_t>(r.metrics.size()));
  for (const auto& [name, value] : r.metrics) {
    w.Add(name);
    Add(w, value);
  }
}

int64_t Read(MessageReader& r, StepResult& result) {
  const int64_t leaf = r.Integer();
  result.loss = Double(r);
  result.entropy = Double(r);
  result.logprob_mismatch_max = Double(r);
  result.logprob_mismatch_sum = Double(r);
  result.num_compared_tokens = r.Integer();
  result.num_computed_tokens = r.Integer();
  result.num_backward_tokens = r.Integer();
  result.num_backward_targets = r.Integer();
  const int64_t num_metrics = r.Integer();
  for (int64_t i = 0; i < num_metrics; ++i) {
    const std::string name = r.String();
    result.metrics[name] = Double(r);
  }
  return leaf;
}

// Adds `b`'s sums to those of `a`.
void AddTo(StepResult& a, const StepResult& b) {
  a.loss += b.loss;
  a.entropy += b.entropy;
  // Written so that a NaN is kept.
  if (!(b.logprob_mismatch_max <= a.logprob_mismatch_max)) {
    a.logprob_mismatch_max = b.logprob_mismatch_max;
  }
  a.logprob_mismatch_sum += b.logprob_mismatch_sum;
  a.num_compared_tokens += b.num_compared_tokens;
  a.num_computed_tokens += b.num_computed_tokens;
  a.num_backward_tokens += b.num_backward_tokens;
  a.num_backward_targets += b.num_backward_targets;
  for (const auto& [name, value] : b.metrics) a.metrics[name] += value;
  a.forward_seconds += b.forward_seconds;
  a.objective_seconds += b.objective_seconds;
  a.backward_seconds += b.backward_seconds;
}

// The order of sums is the tree's. Whether any leaf of `node` is used.
bool Join(const LeafPlan& plan, const SumNode& node, std::map<int64_t, StepResult>& results,
          StepResult& joined) {
  if (node.size() == 1) {
    if (!plan.used()[node.begin]) return false;
    joined = std::move(results[node.begin]);
    return true;
  }
  const auto [left, right] = ChildrenOf(node);
  StepResult other;
  const bool any_left = Join(plan, left, results, joined);
  if (!any_left) return Join(plan, right, results, joined);
  if (Join(plan, right, results, other)) AddTo(joined, other);
  return true;
}
}  // namespace

absl::Status TrainerEngine::AgreeOn(const TrainBatch& batch) {
  if (world_ == nullptr || world_->size() == 1) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<std::string> hashes,
                   GatherTexts(*world_, HashOf(batch, counters_, options_)));
  std::map<std::string, int> votes;
  for (const std::string& h : hashes) ++votes[h];
  if (votes.size() == 1) return absl::OkStatus();
  const auto most = std::max_element(
      votes.begin(), votes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<std::string> others;
  for (int r = 0; r < world_->size(); ++r) {
    if (hashes[r] != most->first) others.push_back(world_->group().Describe(r));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("training step: ranks were given different batches, versions or options: ",
                   absl::StrJoin(others, ", "), " against the rest"));
}

absl::StatusOr<StepResult> TrainerEngine::JoinResults(const LeafPlan& plan, LeafResults results) {
  if (group_ != nullptr && group_->size() > 1) {
    MessageWriter w;
    w.Add(static_cast<int64_t>(results.size()));
    for (const auto& [leaf, result] : results) Write(w, leaf, result);
    ASSIGN_OR_RETURN(const std::vector<std::string> messages, GatherTexts(*group_, w.text()));
    for (int r = 0; r < group_->size(); ++r) {
      MessageReader reader(messages[r]);
      const int64_t count = reader.Integer();
      for (int64_t i = 0; i < count; ++i) {
        StepResult result;
        const int64_t leaf = Read(reader, result);
        if (r != group_->rank()) results[leaf] = std::move(result);
      }
      if (!reader.ok()) {
        return absl::DataLossError(
            absl::StrCat(group_->group().Describe(r), " sent damaged results of a step"));
      }
    }
  }
  StepResult joined;
  Join(plan, {0, plan.num_leaves()}, results, joined);
  return joined;
}
}  // namespace stretto::engine
