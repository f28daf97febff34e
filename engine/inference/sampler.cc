#include "engine/inference/sampler.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/status.h"
#include "engine/constrain/constraint.h"

namespace stretto::engine {
namespace {
// Far below every logit and every bias, yet finite after a division by the smallest temperature.
constexpr float kMasked = -1e30f;
}  // namespace

absl::StatusOr<std::unique_ptr<Sampler>> Sampler::Create(Device& device, int64_t vocab_size,
                                                         int64_t max_rows,
                                                         std::vector<int32_t> eos_ids,
                                                         int64_t k_leaves) {
  std::unique_ptr<Sampler> sampler(new Sampler(device, vocab_size, std::move(eos_ids)));
  const size_t row_bytes = (static_cast<size_t>(vocab_size) * sizeof(float) + 63) / 64 * 64;
  max_rows = std::max<int64_t>(max_rows, kMaxTopLogprobs);
  const size_t targets_bytes = (static_cast<size_t>(max_rows) * sizeof(float) + 63) / 64 * 64;
  ASSIGN_OR_RETURN(sampler->scratch_, device.Allocate(row_bytes + 128 + 2 * targets_bytes));
  ASSIGN_OR_RETURN(sampler->vocabulary_, VocabularyLeaves::Create(device, k_leaves, max_rows));
  sampler->changed_V_ = sampler->scratch_.View(DType::kF32, 1, vocab_size);
  sampler->target_1_ = sampler->scratch_.View(DType::kI32, 1, 1, row_bytes);
  sampler->logprob_1_ = sampler->scratch_.View(DType::kF32, 1, 1, row_bytes + 64);
  sampler->targets_R_ = sampler->scratch_.View(DType::kI32, 1, max_rows, row_bytes + 128);
  sampler->logprobs_R_ =
      sampler->scratch_.View(DType::kF32, 1, max_rows, row_bytes + 128 + targets_bytes);
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
  if (vocabulary_->k_leaves() > 1) CorrectLogProbs(stream, logits_BV, sampled);
}

// Rows of one temperature at a time.
void Sampler::CorrectLogProbs(Stream& stream, const Tensor& logits_BV,
                              absl::Span<Sampled> sampled) {
  const auto max_rows = static_cast<size_t>(targets_R_.cols);
  for (size_t begin = 0, end = 0; begin < sampled.size(); begin = end) {
    std::vector<int32_t> tokens;
    while (end < sampled.size() && tokens.size() < max_rows &&
           rows_B_[end].temperature == rows_B_[begin].temperature) {
      tokens.push_back(sampled[end++].token);
    }
    std::vector<float> logprobs(tokens.size());
    LogProbs(stream,
             logits_BV.Rows(static_cast<int64_t>(begin), static_cast<int64_t>(tokens.size())),
             tokens, rows_B_[begin].temperature, absl::MakeSpan(logprobs));
    for (size_t i = 0; i < tokens.size(); ++i) {
      Sampled& s = sampled[begin + i];
      const bool greedy = rows_B_[begin].temperature == 0;
      if (!greedy && s.sampling_logprob == s.logprob) s.sampling_logprob = logprobs[i];
      s.logprob = logprobs[i];
    }
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
  if (p.constraint != nullptr) {
    ApplyConstraint(request);
  } else if (request.mask_stop_ids) {
    CollectStopIds(p);
    for (const int32_t id : stop_ids_) host_V_[id] = kMasked;
  }
}

void Sampler::CollectStopIds(const SamplingParams& params) {
  stop_ids_ = params.stop_ids;
  if (!params.ignore_eos) stop_ids_.insert(stop_ids_.end(), eos_ids_.begin(), eos_ids_.end());
}

void Sampler::ApplyConstraint(const SampleRequest& request) {
  const Constraint& constraint = *request.params->constraint;
  const auto mask = constraint.Mask(request.constraint_state);
  STRETTO_CHECK(mask->count > 0);
  CollectStopIds(*request.params);
  spared_.clear();  // stop ids that stand for the end, where the text may end
  if (!request.mask_stop_ids && constraint.MayEnd(request.constraint_state)) {
    for (const int32_t id : stop_ids_) {
      if (!constraint.HasText(id)) spared_.emplace_back(id, host_V_[id]);
    }
  }
  for (size_t id = 0; id < host_V_.size(); ++id) {
    if (!mask->Allows(static_cast<int32_t>(id))) host_V_[id] = kMasked;
  }
  for (const auto& [id, logit] : spared_) host_V_[id] = logit;
  if (!request.mask_stop_ids) return;
  // Stop ids with text are left out as long as that leaves anything.
  int32_t left = mask->count;
  for (const int32_t id : stop_ids_) {
    if (!mask->Allows(id) || host_V_[id] == kMasked) continue;
    spared_.emplace_back(id, host_V_[id]);
    host_V_[id] = kMasked;
    --left;
  }
  if (left > 0) return;
  for (const auto& [id, logit] : spared_) host_V_[id] = logit;
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

void Sampler::LogProbs(Stream& stream, const Tensor& logits_RV, absl::Span<const int32_t> targets_R,
                       float temperature, absl::Span<float> logprobs_R) {
  const Tensor targets = targets_R_.Cols(0, logits_RV.rows);
  const Tensor logprobs = logprobs_R_.Cols(0, logits_RV.rows);
  device_.Upload(stream, targets, targets_R.data());
  vocabulary_->LogProbs(stream, logprobs, Tensor{}, logits_RV, targets,
                        temperature == 0 ? 1.0f : temperature);
  device_.Download(stream, logprobs, logprobs_R.data());
}

std::vector<TokenLogprob> Sampler::TopLogprobs(Stream& stream, const Tensor& logits_1V,
                                               float temperature, int32_t count) {
  STRETTO_CHECK(count <= kMaxTopLogprobs);
  host_V_.resize(static_cast<size_t>(vocab_size_));
  device_.Download(stream, logits_1V, host_V_.data());
  count = static_cast<int32_t>(std::min<int64_t>(count, vocab_size_));
  order_.resize(host_V_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::partial_sort(order_.begin(), order_.begin() + count, order_.end(),
                    [this](int32_t a, int32_t b) {
                      return host_V_[a] != host_V_[b] ? host_V_[a] > host_V_[b] : a < b;
                    });
  // The same row for every target.
  Tensor logits_KV = logits_1V;
  logits_KV.rows = count;
  logits_KV.row_stride = 0;
  std::vector<float> logprobs(static_cast<size_t>(count));
  LogProbs(stream, logits_KV, absl::MakeConstSpan(order_).first(logprobs.size()), temperature,
           absl::MakeSpan(logprobs));
  std::vector<TokenLogprob> top(logprobs.size());
  for (size_t k = 0; k < top.size(); ++k) top[k] = {order_[k], logprobs[k]};
  return top;
}

int32_t Sampler::RankInLast(int32_t token) const {
  const float logit = host_V_[static_cast<size_t>(token)];
  int32_t rank = 1;
  for (int32_t id = 0; id < static_cast<int32_t>(host_V_.size()); ++id) {
    rank += host_V_[id] > logit || (host_V_[id] == logit && id < token) ? 1 : 0;
  }
  return rank;
}
}  // namespace stretto::engine
