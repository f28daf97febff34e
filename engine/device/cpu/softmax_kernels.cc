// Softmax over the vocabulary and over attention scores. Sums have the fixed order of a row:
// element j goes into partial j mod 16; what is masked adds an exact 0.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/device/cpu/softmax_kernels.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "engine/device/cpu/simd-inl.h"
// clang-format on
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
constexpr float kMinusInfinity = -__builtin_inff();

// The largest x[j] · factor; rounding is monotonic, so this equals max over rounded products.
HWY_INLINE float MaxScaled(const float* x, int64_t n, const F16& factor) {
  F16 m = Set16(kMinusInfinity);
  for (int64_t i = 0; i < n; i += 16) {
    m = Max16(Mul16(LoadUpTo16(x, i, n, kMinusInfinity), factor), m);
  }
  return MaxOf(m);
}

float Max(const float* x, int64_t n, float inv_temperature) {
  return MaxScaled(x, n, Set16(inv_temperature));
}

// Σ e into sums[0] and, where it is wanted, Σ e·z into sums[1].
template <bool kFma>
HWY_INLINE void AddUp(float* sums, const float* x, int64_t n, const F16& factor, float max,
                      bool weigh) {
  const F16 m = Set16(max);
  const V zero = hn::Zero(D());
  F16 sum = Set16(0.0f), weighted = Set16(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 z = Sub16(Mul16(LoadUpTo16(x, i, n, kMinusInfinity), factor), m);
    const F16 e = Exp16<kFma>(z);
    sum = Add16(sum, e);
    if (!weigh) continue;
    for (int j = 0; j < kVectors; ++j) {
      // Where e is 0 the term is 0, even if the logit is minus infinity.
      const V term = hn::IfThenZeroElse(hn::Eq(e.v[j], zero), z.v[j]);
      weighted.v[j] = MultiplyAdd<kFma>(e.v[j], term, weighted.v[j]);
    }
  }
  sums[0] = SumTree(sum);
  if (weigh) sums[1] = SumTree(weighted);
}

template <bool kFma>
void Sums(float* sums, const float* x, int64_t n, float inv_temperature, float max) {
  AddUp<kFma>(sums, x, n, Set16(inv_temperature), max, true);
}

template <bool kFma>
SoftmaxStats Stats(const float* x, int64_t n, float inv_temperature, bool entropy) {
  const F16 factor = Set16(inv_temperature);
  SoftmaxStats stats;
  stats.max = MaxScaled(x, n, factor);
  float sums[2] = {};
  AddUp<kFma>(sums, x, n, factor, stats.max, entropy);
  stats.log_sum = LogOf<kFma>(sums[0]);
  if (entropy) stats.entropy = stats.log_sum - sums[1] / sums[0];
  return stats;
}

template <bool kFma>
void LogProbsBackward(Sink d, const float* x, int64_t n, float inv_temperature,
                      const SoftmaxStats& stats, int64_t target, float d_logprob, float d_entropy) {
  const F16 factor = Set16(inv_temperature), max = Set16(stats.max);
  const F16 log_sum = Set16(stats.log_sum), entropy = Set16(stats.entropy);
  const F16 d_lp = Set16(d_logprob), d_h = Set16(d_entropy);
  const V zero = hn::Zero(D());
  for (int64_t i = 0; i < n; i += 16) {
    F16 log_p = Sub16(Sub16(Mul16(LoadUpTo16(x, i, n, kMinusInfinity), factor), max), log_sum);
    const F16 p = Exp16<kFma>(log_p);
    F16 slope = d_lp;
    if (d_entropy != 0.0f) {
      for (int j = 0; j < kVectors; ++j) {
        log_p.v[j] = hn::IfThenZeroElse(hn::Eq(p.v[j], zero), log_p.v[j]);
      }
      slope = MultiplyAdd16<kFma>(d_h, Add16(log_p, entropy), d_lp);
    }
    F16 gradient = Mul16(Sub16(Set16(0.0f), Mul16(p, slope)), factor);
    if (target >= i && target < i + 16) {
      HWY_ALIGN float lanes[16];
      Store16(gradient, lanes);
      lanes[target - i] += d_logprob * inv_temperature;
      gradient = Load16(lanes);
    }
    StoreUpTo16(gradient, d, i, n);
  }
}

template <bool kFma>
void Exponentials(float* e, float* block_sums, const float* x, int64_t n, float inv_temperature,
                  float max) {
  const F16 factor = Set16(inv_temperature), m = Set16(max);
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n;
    F16 sum = Set16(0.0f);
    for (int64_t i = begin; i < end; i += 16) {
      const F16 z = Mul16(LoadUpTo16(x, i, end, kMinusInfinity), factor);
      const F16 p = Exp16<kFma>(Sub16(z, m));
      sum = Add16(sum, p);
      StoreUpTo16(p, e, i, end);
    }
    block_sums[begin / kSumBlock] = SumTree(sum);
  }
}

template <bool kFma>
float Log(float x) {
  return LogOf<kFma>(x);
}

// Lanes of the block at i that lie in [begin, end) keep x; the others become minus infinity.
HWY_INLINE F16 MaskRange(const F16& x, int64_t i, int64_t begin, int64_t end) {
  if (i >= begin && i + 16 <= end) return x;
  const auto first = Set(static_cast<float>(begin - i)), last = Set(static_cast<float>(end - i));
  F16 r;
  for (int j = 0; j < kVectors; ++j) {
    const V at = hn::Iota(D(), static_cast<float>(j * kLanes));
    const auto inside = hn::And(hn::Ge(at, first), hn::Lt(at, last));
    r.v[j] = hn::IfThenElse(inside, x.v[j], Set(kMinusInfinity));
  }
  return r;
}

template <bool kFma>
float AttentionSoftmax(float* s, int64_t begin, int64_t end, float scale) {
  const F16 factor = Set16(scale);
  const int64_t first = begin / 16 * 16;
  F16 m = Set16(kMinusInfinity);
  for (int64_t i = first; i < end; i += 16) {
    const F16 z = MaskRange(Mul16(Load16(s + i), factor), i, begin, end);
    Store16(z, s + i);
    m = Max16(z, m);
  }
  const F16 max = Set16(MaxOf(m));
  F16 sum = Set16(0.0f);
  for (int64_t i = first; i < end; i += 16) {
    const F16 p = Exp16<kFma>(Sub16(Load16(s + i), max));
    Store16(p, s + i);
    sum = Add16(sum, p);
  }
  return SumTree(sum);
}

void Divide(Sink out, const float* acc, float sum, int64_t n) {
  const F16 s = Set16(sum);
  for (int64_t i = 0; i < n; i += 16) StoreUpTo16(Div16(LoadUpTo16(acc, i, n), s), out, i, n);
}

void AttentionBackwardRow(float* e, float* d_p, float sum, float delta, float scale, int64_t n) {
  const F16 total = Set16(sum), minus = Set16(delta), factor = Set16(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 p = Div16(LoadUpTo16(e, i, n), total);
    StoreUpTo16(p, e, i, n);
    StoreUpTo16(Mul16(Mul16(p, Sub16(LoadUpTo16(d_p, i, n), minus)), factor), d_p, i, n);
  }
}

template <bool kFma>
struct SoftmaxTable {
  static constexpr SoftmaxKernels kTable = {Stats<kFma>,
                                            Max,
                                            Sums<kFma>,
                                            LogProbsBackward<kFma>,
                                            Exponentials<kFma>,
                                            Log<kFma>,
                                            AttentionSoftmax<kFma>,
                                            Divide,
                                            AttentionBackwardRow};
};
constexpr SoftmaxKernels kSoftmaxTwoRoundings = SoftmaxTable<false>::kTable;
[[maybe_unused]] constexpr SoftmaxKernels kSoftmaxFused = SoftmaxTable<kHaveFma>::kTable;
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine::cpu {
const SoftmaxKernels* GetSoftmaxKernels(InstructionSet set, bool fma) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512:
      return fma ? HWY_CHOOSE_AVX3(kSoftmaxFused) : HWY_CHOOSE_AVX3(kSoftmaxTwoRoundings);
    case InstructionSet::kAvx2:
      return fma ? HWY_CHOOSE_AVX2(kSoftmaxFused) : HWY_CHOOSE_AVX2(kSoftmaxTwoRoundings);
    case InstructionSet::kSse4:
      return HWY_CHOOSE_SSE4(kSoftmaxTwoRoundings);
    case InstructionSet::kScalar:
      return HWY_CHOOSE_FALLBACK(kSoftmaxTwoRoundings);
  }
  return nullptr;
}
}  // namespace stretto::engine::cpu
#endif  // HWY_ONCE
