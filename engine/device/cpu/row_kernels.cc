// Kernels over one row (or run) of elements: conversions, norms, rotary positions, the gated MLP's
// activation, the optimizer.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/device/cpu/row_kernels.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "engine/device/cpu/simd-inl.h"
// clang-format on
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stretto::engine::cpu {
namespace HWY_NAMESPACE {
void Convert(Sink dst, Source src, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) StoreUpTo16(LoadUpTo16(src, i, n), dst, i, n);
}

void ConvertRows(Sink dst, ptrdiff_t dst_stride, Source src, ptrdiff_t src_stride, int64_t num_rows,
                 int64_t n) {
  for (int64_t r = 0; r < num_rows; ++r) Convert(dst + r * dst_stride, src + r * src_stride, n);
}

void Fill(Sink dst, float value, int64_t n) {
  const F16 x = Set16(value);
  for (int64_t i = 0; i < n; i += 16) StoreUpTo16(x, dst, i, n);
}

void Add(Sink dst, Source a, Source b, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    StoreUpTo16(Add16(LoadUpTo16(a, i, n), LoadUpTo16(b, i, n)), dst, i, n);
  }
}

void Scale(float* x, float factor, int64_t n) {
  const F16 f = Set16(factor);
  for (int64_t i = 0; i < n; i += 16) StoreUpTo16(Mul16(LoadUpTo16(x, i, n), f), x, i, n);
}

template <bool kFma>
float Dot(Source a, Source b, int64_t n) {
  F16 sum = Set16(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    sum = MultiplyAdd16<kFma>(LoadUpTo16(a, i, n), LoadUpTo16(b, i, n), sum);
  }
  return SumTree(sum);
}

template <bool kFma>
float InverseRms(Source x, float eps, int64_t n) {
  const float mean = Dot<kFma>(x, x, n) / static_cast<float>(n);
  return hn::GetLane(hn::Div(Set(1.0f), hn::Sqrt(Set(mean + eps))));
}

void RmsNorm(Sink dst, Source x, Source weight, float inv, int64_t n) {
  const F16 scale = Set16(inv);
  for (int64_t i = 0; i < n; i += 16) {
    F16 y = Mul16(LoadUpTo16(x, i, n), scale);
    if (x.bf16) y = RoundToBf16(y);
    StoreUpTo16(Mul16(y, LoadUpTo16(weight, i, n)), dst, i, n);
  }
}

// With y_i = x_i·r and g_i = d_out_i·w_i: d_x_i = r·(g_i − y_i·mean(g·y)).
template <bool kFma>
void RmsNormBackward(float* d_x, const float* d_out, Source x, Source weight, float inv, int64_t n,
                     bool accumulate) {
  const F16 r = Set16(inv);
  F16 sum = Set16(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 g = Mul16(LoadUpTo16(d_out, i, n), LoadUpTo16(weight, i, n));
    sum = MultiplyAdd16<kFma>(g, Mul16(LoadUpTo16(x, i, n), r), sum);
  }
  const F16 mean = Set16(SumTree(sum) / static_cast<float>(n));
  for (int64_t i = 0; i < n; i += 16) {
    const F16 g = Mul16(LoadUpTo16(d_out, i, n), LoadUpTo16(weight, i, n));
    const F16 y = Mul16(LoadUpTo16(x, i, n), r);
    F16 d = Mul16(r, Sub16(g, Mul16(y, mean)));
    if (accumulate) d = Add16(LoadUpTo16(d_x, i, n), d);
    StoreUpTo16(d, d_x, i, n);
  }
}

template <bool kFma>
void RmsNormBackwardWeight(float* d_w, const float* d_out, Source x, float inv, int64_t n) {
  const F16 r = Set16(inv);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 y = Mul16(LoadUpTo16(x, i, n), r);
    StoreUpTo16(MultiplyAdd16<kFma>(LoadUpTo16(d_out, i, n), y, LoadUpTo16(d_w, i, n)), d_w, i, n);
  }
}

void Rope(Sink x, const float* cos, const float* sin, int64_t num_heads, int64_t half,
          bool inverse) {
  const F16 sign = Set16(inverse ? -1.0f : 1.0f);
  for (int64_t i = 0; i < half; i += 16) {
    const F16 c = LoadUpTo16(cos, i, half);
    const F16 s = Mul16(sign, LoadUpTo16(sin, i, half));
    for (int64_t h = 0; h < num_heads; ++h) {
      const Sink first = x + 2 * half * h;
      const Sink second = first + half;
      const F16 a = LoadUpTo16(Source{first.data, x.bf16}, i, half);
      const F16 b = LoadUpTo16(Source{second.data, x.bf16}, i, half);
      StoreUpTo16(Sub16(Mul16(a, c), Mul16(b, s)), first, i, half);
      StoreUpTo16(Add16(Mul16(b, c), Mul16(a, s)), second, i, half);
    }
  }
}

// 1 / (1 + e^−x)
template <bool kFma>
HWY_INLINE F16 Sigmoid(const F16& x) {
  const F16 one = Set16(1.0f);
  return Div16(one, Add16(one, Exp16<kFma>(Sub16(Set16(0.0f), x))));
}

template <bool kFma>
HWY_INLINE F16 GatedSilu(const F16& gate, const F16& up) {
  return Mul16(Mul16(gate, Sigmoid<kFma>(gate)), up);
}

template <bool kFma>
void SwiGlu(Sink dst, Source gate, Source up, int64_t n) {
  int64_t i = 0;
  if (dst.bf16 && gate.bf16 && up.bf16) {
    // Without questions inside, the long chains of several elements overlap.
    for (; i + 32 <= n; i += 32) {
      const F16 a =
          GatedSilu<kFma>(Load16(Source{gate.data, true}, i), Load16(Source{up.data, true}, i));
      const F16 b = GatedSilu<kFma>(Load16(Source{gate.data, true}, i + 16),
                                    Load16(Source{up.data, true}, i + 16));
      Store16(a, Sink{dst.data, true}, i);
      Store16(b, Sink{dst.data, true}, i + 16);
    }
  }
  for (; i < n; i += 16) {
    StoreUpTo16(GatedSilu<kFma>(LoadUpTo16(gate, i, n), LoadUpTo16(up, i, n)), dst, i, n);
  }
}

struct GatedGradient {
  F16 d_gate, d_up, out;
};
// With s = sigmoid(g): d_up = d·g·s, d_gate = d·up·s·(1 + g·(1 − s)).
template <bool kFma>
HWY_INLINE GatedGradient GatedSiluBackward(const F16& d, const F16& gate, const F16& up) {
  const F16 one = Set16(1.0f);
  const F16 s = Sigmoid<kFma>(gate);
  const F16 slope = Mul16(s, MultiplyAdd16<kFma>(gate, Sub16(one, s), one));
  const F16 silu = Mul16(gate, s);
  return {Mul16(Mul16(d, up), slope), Mul16(d, silu), Mul16(silu, up)};
}

template <bool kFma>
void SwiGluBackward(Sink d_gate, Sink d_up, Sink out, const float* d_out, Source gate, Source up,
                    int64_t n) {
  int64_t i = 0;
  if (d_gate.bf16 && gate.bf16 && out.data != nullptr && out.bf16) {
    // Without questions inside, as above.
    for (; i + 32 <= n; i += 32) {
      for (int64_t j = i; j < i + 32; j += 16) {
        const GatedGradient g =
            GatedSiluBackward<kFma>(Load16(d_out + j), Load16(Source{gate.data, true}, j),
                                    Load16(Source{up.data, true}, j));
        Store16(g.d_gate, Sink{d_gate.data, true}, j);
        Store16(g.d_up, Sink{d_up.data, true}, j);
        Store16(g.out, Sink{out.data, true}, j);
      }
    }
  }
  for (; i < n; i += 16) {
    const GatedGradient g = GatedSiluBackward<kFma>(LoadUpTo16(d_out, i, n), LoadUpTo16(gate, i, n),
                                                    LoadUpTo16(up, i, n));
    StoreUpTo16(g.d_gate, d_gate, i, n);
    StoreUpTo16(g.d_up, d_up, i, n);
    if (out.data != nullptr) StoreUpTo16(g.out, out, i, n);
  }
}

template <bool kFma>
void AdamW(Sink weights, float* master, float* m, float* v, const float* grad, int64_t n,
           const AdamWParams& p) {
  const F16 beta1 = Set16(p.beta1), rest1 = Set16(1.0f - p.beta1);
  const F16 beta2 = Set16(p.beta2), rest2 = Set16(1.0f - p.beta2);
  const F16 keep = Set16(1.0f - p.lr * p.weight_decay);
  const F16 rate = Set16(p.lr * p.correction1);
  const F16 correction2 = Set16(p.correction2), eps = Set16(p.eps);
  const F16 grad_scale = Set16(p.grad_scale);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 g = Mul16(LoadUpTo16(grad, i, n), grad_scale);
    const F16 m1 = MultiplyAdd16<kFma>(beta1, LoadUpTo16(m, i, n), Mul16(rest1, g));
    const F16 v1 = MultiplyAdd16<kFma>(beta2, LoadUpTo16(v, i, n), Mul16(rest2, Mul16(g, g)));
    F16 root = Mul16(v1, correction2);
    for (int j = 0; j < kVectors; ++j) root.v[j] = hn::Sqrt(root.v[j]);
    const F16 step = Div16(Mul16(rate, m1), Add16(root, eps));
    const F16 w = Sub16(Mul16(keep, LoadUpTo16(master, i, n)), step);
    StoreUpTo16(m1, m, i, n);
    StoreUpTo16(v1, v, i, n);
    StoreUpTo16(w, master, i, n);
    StoreUpTo16(w, weights, i, n);
  }
}

template <bool kFma>
struct RowTable {
  static constexpr RowKernels kTable = {Convert,
                                        ConvertRows,
                                        Fill,
                                        Add,
                                        Scale,
                                        Dot<kFma>,
                                        InverseRms<kFma>,
                                        RmsNorm,
                                        RmsNormBackward<kFma>,
                                        RmsNormBackwardWeight<kFma>,
                                        Rope,
                                        SwiGlu<kFma>,
                                        SwiGluBackward<kFma>,
                                        AdamW<kFma>};
};
constexpr RowKernels kRowTwoRoundings = RowTable<false>::kTable;
[[maybe_unused]] constexpr RowKernels kRowFused = RowTable<kHaveFma>::kTable;
}  // namespace HWY_NAMESPACE
}  // namespace stretto::engine::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stretto::engine::cpu {
const RowKernels* GetRowKernels(InstructionSet set, bool fma) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512:
      return fma ? HWY_CHOOSE_AVX3(kRowFused) : HWY_CHOOSE_AVX3(kRowTwoRoundings);
    case InstructionSet::kAvx2:
      return fma ? HWY_CHOOSE_AVX2(kRowFused) : HWY_CHOOSE_AVX2(kRowTwoRoundings);
    case InstructionSet::kSse4:
      return HWY_CHOOSE_SSE4(kRowTwoRoundings);
    case InstructionSet::kScalar:
      return HWY_CHOOSE_FALLBACK(kRowTwoRoundings);
  }
  return nullptr;
}
}  // namespace stretto::engine::cpu
#endif  // HWY_ONCE
