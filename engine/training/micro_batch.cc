#include "engine/training/micro_batch.h"

#include <algorithm>
#include <cmath>

#include "base/status.h"

namespace stretto::engine {
namespace {
bool AllFinite(absl::Span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

absl::Status CheckIds(absl::Span<const int32_t> ids, int64_t vocab_size) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token ", i, " has id ", ids[i],
                                                     ", outside the vocabulary of ", vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCompletion(const TrainCompletion& c, int64_t prompt_size, bool reference,
                             const MicroBatchLimits& limits) {
  RETURN_IF_ERROR(CheckIds(c.ids, limits.vocab_size));
  const auto total = prompt_size + static_cast<int64_t>(c.ids.size());
  if (total > limits.max_sequence_length) {
    return absl::InvalidArgumentError(absl::StrCat("prompt and completion have ", total,
                                                   " tokens, more than max_sequence_length ",
                                                   limits.max_sequence_length));
  }
  const auto check_size = [&](absl::string_view what, size_t size) -> absl::Status {
    if (size == c.ids.size()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(size, " ", what, " for ", c.ids.size(), " tokens"));
  };
  if (!c.behaviour_logprobs.empty()) {
    RETURN_IF_ERROR(check_size("behaviour log-probs", c.behaviour_logprobs.size()));
  }
  if (!c.policy_versions.empty()) {
    RETURN_IF_ERROR(check_size("policy versions", c.policy_versions.size()));
  }
  if (reference) RETURN_IF_ERROR(check_size("reference log-probs", c.reference_logprobs.size()));
  if (!AllFinite(c.behaviour_logprobs) || !AllFinite(c.reference_logprobs) ||
      !std::isfinite(c.advantage)) {
    return absl::InvalidArgumentError("a log-prob or the advantage is not finite");
  }
  return absl::OkStatus();
}

absl::Status CheckTrainBatch(const TrainBatch& batch, const MicroBatchLimits& limits) {
  bool reference = false;
  for (const TrainGroup& g : batch.groups) {
    for (const TrainCompletion& c : g.completions) reference |= !c.reference_logprobs.empty();
  }
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    const TrainGroup& group = batch.groups[g];
    if (group.prompt_ids.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("group ", g, ": the prompt is empty"));
    }
    RETURN_IF_ERROR(Annotate(CheckIds(group.prompt_ids, limits.vocab_size),
                             absl::StrCat("group ", g, ": prompt")));
    for (size_t c = 0; c < group.completions.size(); ++c) {
      RETURN_IF_ERROR(Annotate(
          CheckCompletion(group.completions[c], static_cast<int64_t>(group.prompt_ids.size()),
                          reference, limits),
          absl::StrCat("group ", g, ": completion ", c)));
    }
  }
  return absl::OkStatus();
}

bool HasAdvantage(const TrainGroup& group) {
  return std::any_of(group.completions.begin(), group.completions.end(),
                     [](const TrainCompletion& c) { return c.advantage != 0.0f; });
}

// Builds micro-batches in order.
class Cutter {
 public:
  Cutter(const TrainBatch& batch, int64_t max_tokens) : batch_(batch), max_tokens_(max_tokens) {}

  void AddGroup(int64_t g) {
    const TrainGroup& group = batch_.groups[g];
    int64_t cost = static_cast<int64_t>(group.prompt_ids.size());
    bool any = false;
    for (const TrainCompletion& c : group.completions) {
      cost += static_cast<int64_t>(c.ids.size());
      any |= !c.ids.empty();
    }
    if (!any) return;
    const bool fits_alone = cost <= max_tokens_;
    if (used_ + cost > max_tokens_) Flush();
    bool prompt_placed = false;
    for (size_t c = 0; c < group.completions.size(); ++c) {
      const auto size = static_cast<int64_t>(group.completions[c].ids.size());
      if (size == 0) continue;
      if (prompt_placed && !fits_alone && used_ + size > max_tokens_) {
        Flush();
        prompt_placed = false;
      }
      if (!prompt_placed) PlacePrompt(group);
      prompt_placed = true;
      PlaceCompletion(g, static_cast<int64_t>(c));
    }
  }
  // Ends the current micro-batch.
  void Flush() {
    if (!current_.completions.empty()) done_.push_back(std::move(current_));
    current_ = {};
    used_ = 0;
  }
  std::vector<MicroBatch> Finish() { return std::move(done_); }

 private:
  void PlacePrompt(const TrainGroup& group) {
    prompt_ = current_.packed.AddSegment(group.prompt_ids, -1);
    used_ += static_cast<int64_t>(group.prompt_ids.size());
  }
  // The completion's last token is a target only: nothing follows it.
  void PlaceCompletion(int64_t g, int64_t c) {
    const std::vector<int32_t>& ids = batch_.groups[g].completions[c].ids;
    PackedBatch& p = current_.packed;
    if (current_.target_begin.empty()) current_.target_begin.push_back(0);
    p.target_rows_N.push_back(p.segments.row_begin[prompt_] + p.segments.num_rows[prompt_] - 1);
    p.targets_N.push_back(ids[0]);
    if (ids.size() > 1) {
      const int32_t s = p.AddSegment(absl::MakeSpan(ids).subspan(0, ids.size() - 1), prompt_);
      for (size_t i = 1; i < ids.size(); ++i) {
        p.target_rows_N.push_back(p.segments.row_begin[s] + static_cast<int32_t>(i) - 1);
        p.targets_N.push_back(ids[i]);
      }
    }
    current_.completions.push_back({g, c});
    current_.target_begin.push_back(p.num_targets());
    used_ += static_cast<int64_t>(ids.size());
  }

  const TrainBatch& batch_;
  int64_t max_tokens_;
  MicroBatch current_;
  int64_t used_ = 0;
  int32_t prompt_ = -1;
  std::vector<MicroBatch> done_;
};
}  // namespace

int64_t TrainBatch::num_tokens() const {
  int64_t total = 0;
  for (const TrainGroup& g : groups) {
    for (const TrainCompletion& c : g.completions) total += static_cast<int64_t>(c.ids.size());
  }
  return total;
}

int64_t TrainBatch::num_completions() const {
  int64_t total = 0;
  for (const TrainGroup& g : groups) {
    for (const TrainCompletion& c : g.completions) total += c.ids.empty() ? 0 : 1;
  }
  return total;
}

absl::StatusOr<std::vector<MicroBatch>> CutMicroBatches(const TrainBatch& batch,
                                                        const MicroBatchLimits& limits) {
  RETURN_IF_ERROR(CheckTrainBatch(batch, limits));
  Cutter cutter(batch, limits.max_tokens);
  for (const bool with_advantage : {true, false}) {
    for (size_t g = 0; g < batch.groups.size(); ++g) {
      if (HasAdvantage(batch.groups[g]) == with_advantage) cutter.AddGroup(static_cast<int64_t>(g));
    }
    cutter.Flush();
  }
  return cutter.Finish();
}
}  // namespace stretto::engine
