// Softmax over some tokens of a vocabulary, given the maximum or the sums over all of them.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/device/cpu/vocabulary_leaves_kernels.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "engine/device/cpu/simd-inl.h"
// clang-format on
#include "engine/device/cpu/vocabulary_leaves.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
constexpr float kLowest = -__builtin_inff();

float Max(const float* x, int64_t n, float inv_temperature) {
  const F16 factor = Set16(inv_temperature);
  F16 m = Set16(kLowest);
  for (int64_t i = 0; i < n; i += 16) m = Max16(Mul16(LoadUpTo16(x, i, n, kLowest), factor), m);
  return MaxOf(m);
}

// What is masked or impossible adds an exact 0.
template <bool kFma>
void Sums(float* sums, const float* x, int64_t n, float inv_temperature, float max) {
  const F16 factor = Set16(inv_temperature), m = Set16(max);
  const V zero = hn::Zero(D());
  F16 sum = Set16(0.0f), weighted = Set16(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 z = Sub16(Mul16(LoadUpTo16(x, i, n, kLowest), factor), m);
    const F16 e = Exp16<kFma>(z);
    sum = Add16(sum, e);
    for (int j = 0; j < kVectors; ++j) {
      const V term = hn::IfThenZeroElse(hn::Eq(e.v[j], zero), z.v[j]);
      weighted.v[j] = MultiplyAdd<kFma>(e.v[j], term, weighted.v[j]);
    }
  }
  sums[0] = SumTree(sum);
  sums[1] = SumTree(weighted);
}

template <bool kFma>
void Backward(float* x, int64_t n, float inv_temperature, const SoftmaxStats& stats,
              float d_logprob, float d_entropy) {
  const F16 factor = Set16(inv_temperature), max = Set16(stats.max);
  const F16 log_sum = Set16(stats.log_sum), entropy = Set16(stats.entropy);
  const F16 d_lp = Set16(d_logprob), d_h = Set16(d_entropy);
  const V zero = hn::Zero(D());
  for (int64_t i = 0; i < n; i += 16) {
    F16 log_p = Sub16(Sub16(Mul16(LoadUpTo16(x, i, n, kLowest), factor), max), log_sum);
    const F16 p = Exp16<kFma>(log_p);
    F16 slope = d_lp;
    if (d_entropy != 0.0f) {
      for (int j = 0; j < kVectors; ++j) {
        log_p.v[j] = hn::IfThenZeroElse(hn::Eq(p.v[j], zero), log_p.v[j]);
      }
      slope = MultiplyAdd16<kFma>(d_h, Add16(log_p, entropy), d_lp);
    }
    StoreUpTo16(Mul16(Sub16(Set16(0.0f), Mul16(p, slope)), factor), x, i, n);
  }
}

constexpr VocabularyLeafKernels kLeavesTwoRoundings = {Max, Sums<false>, Backward<false>};
constexpr VocabularyLeafKernels kLeavesFused = {Max, Sums<kHaveFma>, Backward<kHaveFma>};
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine::cpu {
const VocabularyLeafKernels* GetVocabularyLeafKernels(InstructionSet set, bool fma) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512:
      return fma ? HWY_CHOOSE_AVX3(kLeavesFused) : HWY_CHOOSE_AVX3(kLeavesTwoRoundings);
    case InstructionSet::kAvx2:
      return fma ? HWY_CHOOSE_AVX2(kLeavesFused) : HWY_CHOOSE_AVX2(kLeavesTwoRoundings);
    case InstructionSet::kSse4:
      return HWY_CHOOSE_SSE4(kLeavesTwoRoundings);
    case InstructionSet::kScalar:
      return HWY_CHOOSE_FALLBACK(kLeavesTwoRoundings);
  }
  return nullptr;
}
}  // namespace stretto::engine::cpu
#endif  // HWY_ONCE
