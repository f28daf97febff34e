// Log-probs over a vocabulary of which a call sees some tokens (Device::Vocabulary…).
#pragma once

#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
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
