// Log-probs, entropy and sampling over the vocabulary.
#pragma once

#include "absl/types/span.h"
#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
struct LogProbsArgs {
  Tensor logprobs_T, entropy_T, logits_TV, targets_T;
  float temperature;
  Tensor stats_T3;
};
void ComputeLogProbs(const Kernels& kernels, ThreadPool& pool, const LogProbsArgs& args);
void ComputeLogProbsBackward(const Kernels& kernels, ThreadPool& pool,
                             const Device::LogitsGradient& args);

// One token from n logits. Untruncated: the cumulative distribution is the sums of 1024
// exponentials each (in the fixed order of a row) added in order in double, then the exponentials
// of the block where `uniform` · total falls, one by one in double. Truncated: the kept
// exponentials in order of ids, in double.
Sampled SampleRow(const Kernels& kernels, const float* logits, int64_t n, const SamplingRow& row);
}  // namespace stretto::engine::cpu
