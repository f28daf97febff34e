#include "engine/inference/score.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/device/device.h"
#include "engine/model/packed_pass.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
namespace {
// A completion in the pass being filled: where its log-probs go.
struct Destination {
  size_t group, completion, num_tokens;
};

class ScorerImpl final : public SequenceScorer {
 public:
  ScorerImpl(const Transformer& model, const ScorerOptions& options)
      : model_(model), options_(options), stream_(model.device().CreateStream()) {}

  absl::StatusOr<std::vector<GroupLogProbs>> Score(const ModelWeights& weights,
                                                   absl::Span<const ScoreGroup> groups,
                                                   float temperature) override;

 private:
  absl::Status Validate(absl::Span<const ScoreGroup> groups, float temperature) const;
  absl::Status ValidateIds(const std::vector<int32_t>& ids) const;
  absl::Status Reserve(absl::Span<const ScoreGroup> groups, float temperature);
  void Add(absl::Span<const ScoreGroup> groups, Destination destination, int32_t prompt_segment);
  void Flush(const ModelWeights& weights, std::vector<GroupLogProbs>& results);

  const Transformer& model_;
  ScorerOptions options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<PackedPass> pass_;
  // The pass being filled.
  PackedBatch batch_;
  std::vector<Destination> destinations_;
  std::vector<float> logprobs_N_;
};

absl::Status ScorerImpl::ValidateIds(const std::vector<int32_t>& ids) const {
  for (const int32_t id : ids) {
    if (id >= 0 && id < model_.config().vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", id, ": expected one in [0, ", model_.config().vocab_size, ")"));
  }
  return absl::OkStatus();
}

absl::Status ScorerImpl::Validate(absl::Span<const ScoreGroup> groups, float temperature) const {
  if (!std::isfinite(temperature) || temperature < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature is ", temperature, ": expected a finite number, 0 or more"));
  }
  const size_t context = static_cast<size_t>(model_.options().max_sequence_length);
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::string where = absl::StrCat("group ", g);
    const ScoreGroup& group = groups[g];
    if (group.prompt_ids.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": the prompt is empty"));
    }
    RETURN_IF_ERROR(Annotate(ValidateIds(group.prompt_ids), absl::StrCat(where, ", prompt")));
    for (size_t c = 0; c < group.completions.size(); ++c) {
      const std::vector<int32_t>& ids = group.completions[c];
      RETURN_IF_ERROR(Annotate(ValidateIds(ids), absl::StrCat(where, ", completion ", c)));
      if (group.prompt_ids.size() + ids.size() <= context) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(where, ", completion ", c, ": ", group.prompt_ids.size(), " + ", ids.size(),
                       " tokens are more than the context of ", context));
    }
  }
  return absl::OkStatus();
}

// A pass that holds the longest sequence, at this temperature.
absl::Status ScorerImpl::Reserve(absl::Span<const ScoreGroup> groups, float temperature) {
  int64_t max_rows = options_.max_tokens_per_pass;
  for (const ScoreGroup& group : groups) {
    for (const auto& ids : group.completions) {
      max_rows = std::max(max_rows, static_cast<int64_t>(group.prompt_ids.size() + ids.size()));
    }
  }
  if (pass_ != nullptr && pass_->options().max_rows >= max_rows &&
      pass_->options().temperature == temperature) {
    return absl::OkStatus();
  }
  pass_.reset();
  PackedPassOptions options;
  options.max_rows = max_rows;
  options.max_targets = max_rows;
  options.temperature = temperature;
  options.train = false;
  options.logits_bytes = options_.logits_bytes;
  ASSIGN_OR_RETURN(pass_, PackedPass::Create(model_, options));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<GroupLogProbs>> ScorerImpl::Score(const ModelWeights& weights,
                                                             absl::Span<const ScoreGroup> groups,
                                                             float temperature) {
  RETURN_IF_ERROR(Validate(groups, temperature));
  if (temperature == 0) temperature = 1.0f;
  RETURN_IF_ERROR(Reserve(groups, temperature));
  std::vector<GroupLogProbs> results(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const ScoreGroup& group = groups[g];
    const int64_t num_prompt = static_cast<int64_t>(group.prompt_ids.size());
    results[g].resize(group.completions.size());
    int32_t prompt_segment = -1;
    for (size_t c = 0; c < group.completions.size(); ++c) {
      const int64_t size = static_cast<int64_t>(group.completions[c].size());
      if (size == 0) continue;
      const int64_t needed = size + (prompt_segment < 0 ? num_prompt : 0);
      if (batch_.num_rows() + needed > pass_->options().max_rows ||
          batch_.num_targets() + size > pass_->options().max_targets) {
        Flush(weights, results);
        prompt_segment = -1;
      }
      if (prompt_segment < 0) prompt_segment = batch_.AddSegment(group.prompt_ids, -1);
      Add(groups, {g, c, group.completions[c].size()}, prompt_segment);
    }
  }
  Flush(weights, results);
  return results;
}

// The completion as a child of its prompt. Its last token is a target but needs no row.
void ScorerImpl::Add(absl::Span<const ScoreGroup> groups, Destination destination,
                     int32_t prompt_segment) {
  const std::vector<int32_t>& ids = groups[destination.group].completions[destination.completion];
  const SegmentTable& segments = batch_.segments;
  const int32_t prompt_end = segments.row_begin[prompt_segment] + segments.num_rows[prompt_segment];
  int32_t first_row = 0;
  if (ids.size() > 1) {
    const int32_t child =
        batch_.AddSegment(absl::MakeConstSpan(ids).first(ids.size() - 1), prompt_segment);
    first_row = batch_.segments.row_begin[child];
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    batch_.target_rows_N.push_back(i == 0 ? prompt_end - 1
                                          : first_row + static_cast<int32_t>(i) - 1);
    batch_.targets_N.push_back(ids[i]);
  }
  destinations_.push_back(destination);
}

void ScorerImpl::Flush(const ModelWeights& weights, std::vector<GroupLogProbs>& results) {
  if (batch_.num_targets() > 0) {
    logprobs_N_.resize(static_cast<size_t>(batch_.num_targets()));
    pass_->Forward(*stream_, weights, batch_, absl::MakeSpan(logprobs_N_), {});
  }
  size_t next = 0;
  for (const Destination& d : destinations_) {
    const auto begin = logprobs_N_.begin() + static_cast<int64_t>(next);
    results[d.group][d.completion].assign(begin, begin + static_cast<int64_t>(d.num_tokens));
    next += d.num_tokens;
  }
  batch_ = PackedBatch();
  destinations_.clear();
}
}  // namespace

absl::StatusOr<std::unique_ptr<SequenceScorer>> SequenceScorer::Create(
    const Transformer& model, const ScorerOptions& options) {
  if (options.max_tokens_per_pass < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_tokens_per_pass is ", options.max_tokens_per_pass, ": expected 1 or more"));
  }
  return std::make_unique<ScorerImpl>(model, options);
}
}  // namespace stretto::engine
