// Log-probs, entropy and sampling over the vocabulary.
#pragma once

#include "absl/types/span.h"
#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
void ComputeLogProbs(const Kernels& kernels, ThreadPool& pool, const Tensor& logprobs_T,
                     const Tensor& entropy_T, const Tensor& logits_TV, const Tensor& targets_T,
                     float temperature);
void ComputeLogProbsBackward(const Kernels& kernels, ThreadPool& pool, const Tensor& logits_TV,
                             const Tensor& d_logprobs_T, const Tensor& d_entropy_T,
                             const Tensor& targets_T, float temperature);

// One token from n logits. Untruncated: the cumulative distribution is the sums of 1024
// exponentials each (in the fixed order of a row) added in order in double, then the exponentials
// of the block where `uniform` · total falls, one by one in double. Truncated: the kept
// exponentials in order of ids, in double.
Sampled SampleRow(const Kernels& kernels, const float* logits, int64_t n, const SamplingRow& row);
}  // namespace stretto::engine::cpu
