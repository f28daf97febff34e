// Log-probs over a vocabulary of which a call sees some tokens (Device::Vocabulary…).
#pragma once

#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
struct VocabularyLeafKernels {
  // The largest x[j] · inv_temperature.
  float (*max)(const float* x, int64_t n, float inv_temperature) = nullptr;
  // sums[0] = Σ e, sums[1] = Σ e·z with z = x · inv_temperature − max and e = exp(z).
  void (*sums)(float* sums, const float* x, int64_t n, float inv_temperature, float max) = nullptr;
  // x[j] = −inv_temperature · p_j · (d_logprob + d_entropy · (log p_j + H))
  void (*backward)(float* x, int64_t n, float inv_temperature, const SoftmaxStats& stats,
                   float d_logprob, float d_entropy) = nullptr;
};
const VocabularyLeafKernels* GetVocabularyLeafKernels(InstructionSet set, bool fma);

void ComputeVocabularyMax(const Kernels& kernels, ThreadPool& pool, const Tensor& max_T,
                          const Tensor& logits_TV, float temperature);
struct VocabularySumsArgs {
  Tensor sums_T3, logits_TV, max_T, targets_T;
  int64_t first_id;
  float temperature;
};
void ComputeVocabularySums(const Kernels& kernels, ThreadPool& pool,
                           const VocabularySumsArgs& args);
void ComputeVocabularyLogProbs(const Kernels& kernels, const Tensor& logprobs_T,
                               const Tensor& entropy_T, const Tensor& sums_T3);
void ComputeVocabularyBackward(const Kernels& kernels, ThreadPool& pool,
                               const Device::VocabularyGradient& args);
}  // namespace stretto::engine::cpu
