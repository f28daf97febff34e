#include "engine/device/cpu/vocabulary_leaves.h"

namespace stretto::engine::cpu {
void ComputeVocabularyMax(const Kernels& kernels, ThreadPool& pool, const Tensor& max_T,
                          const Tensor& logits_TV, float temperature) {
  const float inv = 1.0f / temperature;
  pool.ParallelFor(logits_TV.rows, [&](int64_t t) {
    MutableF32Row(max_T, 0)[t] = kernels.softmax->max(F32Row(logits_TV, t), logits_TV.cols, inv);
  });
}

void ComputeVocabularySums(const Kernels& kernels, ThreadPool& pool,
                           const VocabularySumsArgs& args) {
  const float inv = 1.0f / args.temperature;
  const int64_t n = args.logits_TV.cols;
  pool.ParallelFor(args.logits_TV.rows, [&](int64_t t) {
    const float* logits = F32Row(args.logits_TV, t);
    const float max = F32Row(args.max_T, 0)[t];
    float* sums = MutableF32Row(args.sums_T3, t);
    kernels.softmax->sums(sums, logits, n, inv, max);
    const int64_t target = Ints(args.targets_T)[t] - args.first_id;
    sums[2] = target >= 0 && target < n ? logits[target] * inv - max : 0.0f;
  });
}

void ComputeVocabularyLogProbs(const Kernels& kernels, const Tensor& logprobs_T,
                               const Tensor& entropy_T, const Tensor& sums_T3) {
  for (int64_t t = 0; t < sums_T3.rows; ++t) {
    const float* sums = F32Row(sums_T3, t);
    const float log_sum = kernels.softmax->log(sums[0]);
    MutableF32Row(logprobs_T, 0)[t] = sums[2] - log_sum;
    if (entropy_T) MutableF32Row(entropy_T, 0)[t] = log_sum - sums[1] / sums[0];
  }
}

void ComputeVocabularyBackward(const Kernels& kernels, ThreadPool& pool,
                               const Device::VocabularyGradient& args) {
  const float inv = 1.0f / args.temperature;
  const int64_t n = args.logits_TV.cols;
  pool.ParallelFor(args.logits_TV.rows, [&](int64_t t) {
    const float* sums = F32Row(args.sums_T3, t);
    SoftmaxStats stats;
    stats.max = F32Row(args.max_T, 0)[t];
    stats.log_sum = kernels.softmax->log(sums[0]);
    stats.entropy = stats.log_sum - sums[1] / sums[0];
    const float d_logprob = F32Row(args.d_logprobs_T, 0)[t];
    const float d_entropy = args.d_entropy_T ? F32Row(args.d_entropy_T, 0)[t] : 0.0f;
    float* x = MutableF32Row(args.logits_TV, t);
    const int64_t target = Ints(args.targets_T)[t] - args.first_id;
    kernels.softmax->log_probs_backward(Sink{x, false}, x, n, inv, stats, target, d_logprob,
                                        d_entropy);
  });
}
}  // namespace stretto::engine::cpu
