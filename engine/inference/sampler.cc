#include "engine/inference/sampler.h"

#include "base/check.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
// Far below every logit and every bias, yet finite after a division by the smallest temperature.
constexpr float kMasked = -1e30f;
}  // namespace

absl::StatusOr<std::unique_ptr<Sampler>> Sampler::Create(Device& device, int64_t vocab_size,
                                                         std::vector<int32_t> eos_ids) {
  std::unique_ptr<Sampler> sampler(new Sampler(device, vocab_size, std::move(eos_ids)));
  const size_t row_bytes = (static_cast<size_t>(vocab_size) * sizeof(float) + 63) / 64 * 64;
  ASSIGN_OR_RETURN(sampler->scratch_, device.Allocate(row_bytes + 128));
  sampler->changed_V_ = sampler->scratch_.View(DType::kF32, 1, vocab_size);
  sampler->target_1_ = sampler->scratch_.View(DType::kI32, 1, 1, row_bytes);
  sampler->logprob_1_ = sampler->scratch_.View(DType::kF32, 1, 1, row_bytes + 64);
  return sampler;
}

void Sampler::Sample(Stream& stream, const Tensor& logits_BV,
                     absl::Span<const SampleRequest> requests, absl::Span<Sampled> sampled) {
  STRETTO_CHECK(logits_BV.rows == static_cast<int64_t>(requests.size()) &&
                sampled.size() == requests.size());
  rows_B_.clear();
  for (const SampleRequest& r : requests) {
    rows_B_.push_back(
        {r.params->temperature, r.params->top_k, r.params->top_p, r.params->min_p, r.uniform});
  }
  device_.Sample(stream, logits_BV, rows_B_, sampled);
  for (size_t b = 0; b < requests.size(); ++b) {
    if (!requests[b].mask_stop_ids && !requests[b].params->ChangesLogits()) continue;
    SampleChanged(stream, logits_BV.Rows(static_cast<int64_t>(b), 1), requests[b], rows_B_[b],
                  &sampled[b]);
  }
}

void Sampler::SampleChanged(Stream& stream, const Tensor& logits_1V, const SampleRequest& request,
                            const SamplingRow& row, Sampled* sampled) {
  host_V_.resize(static_cast<size_t>(vocab_size_));
  device_.Download(stream, logits_1V, host_V_.data());
  ChangeLogits(request);
  device_.Upload(stream, changed_V_, host_V_.data());
  device_.Sample(stream, changed_V_, {&row, 1}, {sampled, 1});
  device_.Upload(stream, target_1_, &sampled->token);
  device_.LogProbs(stream, logprob_1_, Tensor{}, logits_1V, target_1_,
                   row.temperature == 0 ? 1.0f : row.temperature);
  device_.Download(stream, logprob_1_, &sampled->logprob);
}

void Sampler::ChangeLogits(const SampleRequest& request) {
  const SamplingParams& p = *request.params;
  for (const auto& [token, bias] : p.logit_bias) host_V_[token] += bias;
  Penalize(request);
  if (!request.mask_stop_ids) return;
  for (const int32_t id : p.stop_ids) host_V_[id] = kMasked;
  if (p.ignore_eos) return;
  for (const int32_t id : eos_ids_) host_V_[id] = kMasked;
}

void Sampler::Penalize(const SampleRequest& request) {
  const SamplingParams& p = *request.params;
  counts_V_.resize(host_V_.size());
  // Each distinct token once: the first visit marks it.
  for (const int32_t id : request.tokens) {
    if (p.repetition_penalty == 1.0f || counts_V_[id] != 0) continue;
    counts_V_[id] = 1;
    float& logit = host_V_[id];
    logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
  }
  for (const int32_t id : request.tokens) counts_V_[id] = 0;
  const absl::Span<const int32_t> completion = request.tokens.subspan(request.num_prompt);
  for (const int32_t id : completion) ++counts_V_[id];
  for (const int32_t id : completion) {
    if (counts_V_[id] == 0) continue;
    host_V_[id] -= p.presence_penalty + p.frequency_penalty * static_cast<float>(counts_V_[id]);
    counts_V_[id] = 0;
  }
}
}  // namespace stretto::engine
