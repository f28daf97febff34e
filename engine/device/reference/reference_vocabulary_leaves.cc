// Log-probs over a vocabulary in leaves, of the reference backend.
#include <algorithm>

#include "engine/device/reference/reference_memory.h"

namespace stretto::engine::reference {
namespace {
// z of row t, or z − max.
Row Scaled(const Tensor& logits_TV, int64_t t, float temperature, float max = 0.0f) {
  const float inverse = 1.0f / temperature;
  Row z = LoadRow(logits_TV, t);
  for (float& x : z) x = x * inverse - max;
  return z;
}
}  // namespace

void VocabularyMaxOf(const Tensor& max_T, const Tensor& logits_TV, float temperature) {
  STRETTO_CHECK(max_T.size() == logits_TV.rows);
  for (int64_t t = 0; t < logits_TV.rows; ++t) {
    const Row z = Scaled(logits_TV, t, temperature);
    Address<float>(max_T)[t] = *std::max_element(z.begin(), z.end());
  }
}

void VocabularySumsOf(const Tensor& sums_T3, const Tensor& logits_TV, const Tensor& max_T,
                      const Tensor& targets_T, int64_t first_id, float temperature) {
  const auto targets = LoadInts(targets_T);
  STRETTO_CHECK(static_cast<int64_t>(targets.size()) == logits_TV.rows && sums_T3.cols == 3);
  for (int64_t t = 0; t < logits_TV.rows; ++t) {
    const Row z = Scaled(logits_TV, t, temperature, Address<float>(max_T)[t]);
    const auto n = static_cast<int64_t>(z.size());
    const int64_t target = targets[t] - first_id;
    StoreRow(sums_T3, t,
             {OrderedSum(0, n, [&](int64_t i) { return std::exp(z[i]); }),
              OrderedSum(0, n, [&](int64_t i) { return std::exp(z[i]) * z[i]; }),
              target >= 0 && target < n ? z[target] : 0.0f});
  }
}

void VocabularyLogProbsOf(const Tensor& logprobs_T, const Tensor& entropy_T,
                          const Tensor& sums_T3) {
  for (int64_t t = 0; t < sums_T3.rows; ++t) {
    const Row sums = LoadRow(sums_T3, t);
    Address<float>(logprobs_T)[t] = sums[2] - std::log(sums[0]);
    if (entropy_T) Address<float>(entropy_T)[t] = std::log(sums[0]) - sums[1] / sums[0];
  }
}

// The formulas of LogProbsGradient.
void VocabularyGradientOf(const Device::VocabularyGradient& args) {
  const auto targets = LoadInts(args.targets_T);
  for (int64_t t = 0; t < args.logits_TV.rows; ++t) {
    const Row z = Scaled(args.logits_TV, t, args.temperature, Address<float>(args.max_T)[t]);
    const Row sums = LoadRow(args.sums_T3, t);
    const float d_logprob = Address<float>(args.d_logprobs_T)[t];
    const float d_entropy = args.d_entropy_T ? Address<float>(args.d_entropy_T)[t] : 0.0f;
    const float log_sum = std::log(sums[0]), entropy = log_sum - sums[1] / sums[0];
    Row d_logits(z.size());
    for (size_t i = 0; i < z.size(); ++i) {
      const float p = std::exp(z[i]) / sums[0];
      const float hit = args.first_id + static_cast<int64_t>(i) == targets[t] ? 1.0f : 0.0f;
      float d_z = d_logprob * (hit - p);
      if (d_entropy != 0.0f) d_z -= d_entropy * p * (z[i] - log_sum + entropy);
      d_logits[i] = d_z / args.temperature;
    }
    StoreRow(args.logits_TV, t, d_logits);
  }
}
}  // namespace stretto::engine::reference
