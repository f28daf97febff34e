// Draws the next tokens of a step from its logits. Most rows go straight to Device::Sample, all in
// one call; rows whose logits a parameter changes (bias, penalties, the masks of a constraint and
// of stop ids) pass through the host one by one.
//
// Not thread-safe; owns scratch memory of the device.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device/device.h"
#include "engine/inference/request.h"
#include "engine/model/vocabulary_leaves.h"

namespace stretto::engine {
// Row r of the logits: what its next token is drawn from.
struct SampleRequest {
  const SamplingParams* params = nullptr;
  float uniform = 0;                 // in [0, 1)
  absl::Span<const int32_t> tokens;  // prompt and completion so far
  int32_t num_prompt = 0;
  bool mask_stop_ids = false;    // no stop id and, unless ignore_eos, no EOS may be drawn
  int64_t constraint_state = 0;  // of params->constraint: something may follow it
};

class Sampler {
 public:
  // `max_rows`: of LogProbs, and with several leaves of Sample. `k_leaves`: of the transformer.
  static absl::StatusOr<std::unique_ptr<Sampler>> Create(Device& device, int64_t vocab_size,
                                                         int64_t max_rows,
                                                         std::vector<int32_t> eos_ids,
                                                         int64_t k_leaves = 1);

  // One token a request from logits_BV, whose rows stay as they are. `logprob` is that of the raw
  // logits over the temperature in every case. Blocking.
  void Sample(Stream& stream, const Tensor& logits_BV, absl::Span<const SampleRequest> requests,
              absl::Span<Sampled> sampled);

  // Log-probs of one target a row; the bits of `logprob` above. Blocking.
  void LogProbs(Stream& stream, const Tensor& logits_RV, absl::Span<const int32_t> targets_R,
                float temperature, absl::Span<float> logprobs_R);
  // The `count` likeliest tokens of one row of logits, the likeliest first (of equals the smaller
  // id), with log-probs that have the bits of `logprob` above. Blocking.
  std::vector<TokenLogprob> TopLogprobs(Stream& stream, const Tensor& logits_1V, float temperature,
                                        int32_t count);
  // The place of a token in that order, from 1 on, in the row of the last TopLogprobs.
  int32_t RankInLast(int32_t token) const;

 private:
  Sampler(Device& device, int64_t vocab_size, std::vector<int32_t> eos_ids)
      : device_(device), vocab_size_(vocab_size), eos_ids_(std::move(eos_ids)) {}
  void SampleChanged(Stream& stream, const Tensor& logits_1V, const SampleRequest& request,
                     const SamplingRow& row, Sampled* sampled);
  // Log-probs of sampled tokens, with sums over leaves.
  void CorrectLogProbs(Stream& stream, const Tensor& logits_BV, absl::Span<Sampled> sampled);
  void ChangeLogits(const SampleRequest& request);
  void Penalize(const SampleRequest& request);
  void ApplyConstraint(const SampleRequest& request);
  void CollectStopIds(const SamplingParams& params);

  Device& device_;
  int64_t vocab_size_;
  std::vector<int32_t> eos_ids_;
  std::unique_ptr<VocabularyLeaves> vocabulary_;
  Buffer scratch_;
  Tensor changed_V_, target_1_, logprob_1_;
  Tensor targets_R_, logprobs_R_;  // of LogProbs
  std::vector<int32_t> order_;
  std::vector<int32_t> stop_ids_;  // of CollectStopIds
  std::vector<std::pair<int32_t, float>> spared_;
  std::vector<float> host_V_;
  std::vector<int32_t> counts_V_;  // zero between calls
  std::vector<SamplingRow> rows_B_;
};
}  // namespace stretto::engine
