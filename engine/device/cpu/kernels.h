// The vectorised inner loops of the CPU backend as tables of functions, one table for each pair of
// instruction set and arithmetic. The drivers beside this file (gemm, attention, vocabulary, …)
// split work over threads and call these; nothing here allocates, locks or knows threads.
//
// Every function gives the same bits on every instruction set of the same arithmetic: element-wise
// formulas are the same for each lane, tails go through the same vector code with neutral elements,
// and sums have the order that device.h states.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "engine/device/quantize.h"
#include "engine/device/tensor.h"

namespace stretto::engine::cpu {
// Columns of one panel of a packed matrix, tokens of one block of keys, partial sums of a row.
inline constexpr int kPanel = 16;

// kAvx512Bf16: AVX-512 with products of bf16 by instructions of their own (gemm_dot.h).
enum class InstructionSet : uint8_t { kScalar, kSse4, kAvx2, kAvx512, kAvx512Bf16 };

// A run of elements to read (kF32 or kBF16).
struct Source {
  const void* data = nullptr;
  bool bf16 = false;
};
// A run of elements to write; bf16 is rounded to nearest even.
struct Sink {
  void* data = nullptr;
  bool bf16 = false;
};

inline Source RowOf(const Tensor& t, int64_t row) {
  return {reinterpret_cast<const char*>(t.handle) +
              static_cast<size_t>(row * t.row_stride) * SizeOf(t.dtype),
          t.dtype == DType::kBF16};
}
inline Sink MutableRowOf(const Tensor& t, int64_t row) {
  return {
      reinterpret_cast<char*>(t.handle) + static_cast<size_t>(row * t.row_stride) * SizeOf(t.dtype),
      t.dtype == DType::kBF16};
}
inline Source operator+(Source s, int64_t elements) {
  return {static_cast<const char*>(s.data) + elements * (s.bf16 ? 2 : 4), s.bf16};
}
inline Sink operator+(Sink s, int64_t elements) {
  return {static_cast<char*>(s.data) + elements * (s.bf16 ? 2 : 4), s.bf16};
}
inline const float* F32Row(const Tensor& t, int64_t row) {
  return static_cast<const float*>(RowOf(t, row).data);
}
inline float* MutableF32Row(const Tensor& t, int64_t row) {
  return static_cast<float*>(MutableRowOf(t, row).data);
}
inline const int32_t* Ints(const Tensor& t) { return reinterpret_cast<const int32_t*>(t.handle); }

// c[r][16 p + j] (+)= Σ_k a(r, k) · panel p [k][j]: every element one chain of multiply-adds over k
// in order, from 0 or, with load_c, from what c holds.
struct Tile {
  int rows = 0;              // 1 … GemmKernels::max_rows
  const float* a = nullptr;  // a(r, k) = a[r·a_stride + k], or a[k·a_stride + r] if a_k_major
  ptrdiff_t a_stride = 0;
  bool a_k_major = false;
  int64_t k = 0;
  Source panels;  // num_panels × [k][kPanel], panel_stride elements apart
  ptrdiff_t panel_stride = 0;
  int64_t num_panels = 1;
  float* c = nullptr;  // f32, rows c_stride apart, 16 columns for each panel
  ptrdiff_t c_stride = 0;
  bool load_c = false;
  // Where the sums go as bf16 instead of to c, or nullptr. `tile` with a_k_major and `row_tiles`.
  uint16_t* out = nullptr;
  ptrdiff_t out_stride = 0;
  // Of the columns of these panels, by which sums are multiplied before they leave, or nullptr.
  // gemm_dot.h.
  const float* scales = nullptr;
  // What to bring into the second-level cache on the way, or nullptr: a_k_major: a line for every
  // kKPerLine of k; else, for panel p of tile and for block b of block_tile, a line for every
  // second k from ahead_offsets[p] or [b] elements behind `ahead` on.
  const void* ahead = nullptr;
  const int64_t* ahead_offsets = nullptr;
};
inline constexpr int kKPerLine = 4;
inline constexpr int64_t kLineBytes = 64;

// Rows in `count` tiles as equal as can be.
struct RowTiles {
  RowTiles(int64_t rows, int64_t max_rows)
      : count((rows + max_rows - 1) / max_rows), size_(rows / count), num_larger_(rows % count) {}
  int64_t count;
  int64_t Begin(int64_t i) const { return i * size_ + (i < num_larger_ ? i : num_larger_); }
  int Size(int64_t i) const { return static_cast<int>(size_ + (i < num_larger_ ? 1 : 0)); }

 private:
  int64_t size_, num_larger_;
};

// What the tiles of a block of rows fetch on the way, a part each: `num_lines` lines of each of
// `num_panels` panels, panel_bytes apart.
struct PanelsAhead {
  const char* begin = nullptr;
  int64_t num_lines = 0, num_panels = 0;
  ptrdiff_t panel_bytes = 0;
};

// Deals them out: `lines_a_tile` lines each, nullptr when all are fetched.
class FetchAhead {
 public:
  FetchAhead(const PanelsAhead& panels, int64_t lines_a_tile)
      : panels_(panels), lines_a_tile_(lines_a_tile) {}
  const char* Next() {
    const char* at = panel_ < panels_.num_panels
                         ? panels_.begin + panel_ * panels_.panel_bytes + line_ * kLineBytes
                         : nullptr;
    line_ += lines_a_tile_;
    if (line_ >= panels_.num_lines) {
      line_ = 0;
      ++panel_;
    }
    return at;
  }

 private:
  const PanelsAhead& panels_;
  int64_t lines_a_tile_, line_ = 0, panel_ = 0;
};

struct GemmKernels {
  int max_rows = 1;
  int panels_at_once = 1;  // that a tile of max_rows shares its loads of A among
  // Storage order inside a bf16 panel row: column j stands at bf16_slot[j].
  const uint8_t* bf16_slot = nullptr;
  void (*tile)(const Tile& t) = nullptr;
  // A block of rows whose tiles stand one after another in `a`, each [k][rows of the tile]; `first`
  // is the first tile.
  void (*row_tiles)(const Tile& first, const RowTiles& tiles, const PanelsAhead& ahead) = nullptr;
  // Attention's second product: c[r][j] continues its chain over blocks of 16 tokens; block b's
  // panels begin at panels.data + block_offset[b] elements, `k` tokens of it are used from token 0.
  void (*block_tile)(const Tile& t, const int64_t* block_offset, int64_t num_blocks) = nullptr;
  // Rows of B (row k at src + k·row_stride elements, n columns) into panels [k][kPanel] of the same
  // type, columns from n to the end of the last panel zero.
  void (*pack_panels)(Sink dst, ptrdiff_t panel_stride, Source src, ptrdiff_t row_stride, int64_t k,
                      int64_t n) = nullptr;
  // W_NK rows (row n at src + n·row_stride) into one panel [k][kPanel]; columns ≥ n zero.
  void (*pack_transposed)(Sink dst, Source src, ptrdiff_t row_stride, int64_t k,
                          int64_t n) = nullptr;
  // Rows of A, row_stride elements apart, as f32 [k][num_rows]; up to max_rows of them.
  void (*interleave)(Source rows, ptrdiff_t row_stride, int num_rows, int64_t k,
                     float* out) = nullptr;
  // The same from A transposed: k rows, of which `num_columns` elements are read.
  void (*interleave_columns)(Source rows, ptrdiff_t row_stride, int num_columns, int64_t k,
                             float* out) = nullptr;
};

// One group of 32 k of an int4 panel: 16 bf16 scales and 32 rows of 16 halves of bytes.
inline constexpr int64_t kInt4GroupBytes = 2 * kPanel + kInt4Group * kPanel / 2;

// Over panels of a quantised format (quant_kernels.cc has the layouts). Column scales of int8 and
// fp8 are not applied: the caller multiplies the finished chains.
struct QuantKernels {
  // As GemmKernels::tile; a is not a_k_major, panel_stride is in bytes, int4 begins a group.
  void (*tile)(const Tile& t, WeightFormat format) = nullptr;
};

struct AdamWParams {
  float lr, beta1, beta2, eps, weight_decay, grad_scale, correction1, correction2;
};

struct RowKernels {
  void (*convert)(Sink dst, Source src, int64_t n) = nullptr;
  // `num_rows` rows of n, `stride`s apart.
  void (*convert_rows)(Sink dst, ptrdiff_t dst_stride, Source src, ptrdiff_t src_stride,
                       int64_t num_rows, int64_t n) = nullptr;
  void (*fill)(Sink dst, float value, int64_t n) = nullptr;
  void (*add)(Sink dst, Source a, Source b, int64_t n) = nullptr;
  void (*scale)(float* x, float factor, int64_t n) = nullptr;
  // Σ a·b in the fixed order of a row.
  float (*dot)(Source a, Source b, int64_t n) = nullptr;
  // 1 / sqrt(mean(x²) + eps)
  float (*inverse_rms)(Source x, float eps, int64_t n) = nullptr;
  // dst = round(x · inv) · weight, rounded to x's type.
  void (*rms_norm)(Sink dst, Source x, Source weight, float inv, int64_t n) = nullptr;
  void (*rms_norm_backward)(float* d_x, const float* d_out, Source x, Source weight, float inv,
                            int64_t n, bool accumulate) = nullptr;
  // d_w += d_out · (x · inv)
  void (*rms_norm_backward_weight)(float* d_w, const float* d_out, Source x, float inv,
                                   int64_t n) = nullptr;
  void (*rope)(Sink x, const float* cos, const float* sin, int64_t num_heads, int64_t half,
               bool inverse) = nullptr;
  void (*swiglu)(Sink dst, Source gate, Source up, int64_t n) = nullptr;
  // `out` as swiglu, unless its data is nullptr. d_gate and d_up are of one type.
  void (*swiglu_backward)(Sink d_gate, Sink d_up, Sink out, const float* d_out, Source gate,
                          Source up, int64_t n) = nullptr;
  void (*adamw)(Sink weights, float* master, float* m, float* v, const float* grad, int64_t n,
                const AdamWParams& p) = nullptr;
};

inline constexpr int64_t kSumBlock = 1024;

// What softmax needs to know of one row: z = x · inv_temperature.
struct SoftmaxStats {
  float max = 0;      // of z
  float log_sum = 0;  // log Σ exp(z − max)
  float entropy = 0;  // of softmax(z), where asked
};

struct SoftmaxKernels {
  SoftmaxStats (*stats)(const float* x, int64_t n, float inv_temperature, bool entropy) = nullptr;
  // The largest x[j] · inv_temperature.
  float (*max)(const float* x, int64_t n, float inv_temperature) = nullptr;
  // sums[0] = Σ e, sums[1] = Σ e·z with z = x · inv_temperature − max and e = exp(z).
  void (*sums)(float* sums, const float* x, int64_t n, float inv_temperature, float max) = nullptr;
  // d[j] = inv_temperature · (d_logprob · ([j = target] − p_j) − d_entropy · p_j · (log p_j + H));
  // outside of [0, n), the target is in another part of the vocabulary. d may begin where x does.
  void (*log_probs_backward)(Sink d, const float* x, int64_t n, float inv_temperature,
                             const SoftmaxStats& stats, int64_t target, float d_logprob,
                             float d_entropy) = nullptr;
  // e[j] = exp(x[j] · inv_temperature − max), and for every kSumBlock elements their sum (16
  // partial sums and the tree).
  void (*exponentials)(float* e, float* block_sums, const float* x, int64_t n,
                       float inv_temperature, float max) = nullptr;
  float (*log)(float x) = nullptr;
  // Attention: s[j] for begin ≤ j < end becomes exp(scale·s[j] − max); the rest of [0, padded)
  // becomes 0, where padded is end rounded up to 16. Returns Σ in the fixed order over j.
  float (*attention_softmax)(float* s, int64_t begin, int64_t end, float scale) = nullptr;
  // out[c] = acc[c] / sum.
  void (*divide)(Sink out, const float* acc, float sum, int64_t n) = nullptr;
  // d_s[j] = p_j · (d_p[j] − delta) · scale, where p_j = e[j] / sum becomes e[j].
  void (*attention_backward_row)(float* e, float* d_p, float sum, float delta, float scale,
                                 int64_t n) = nullptr;
};

struct DotKernels;

struct Kernels {
  InstructionSet set = InstructionSet::kScalar;
  bool fma = false;   // products and sums are fused
  bool exact = true;  // false: `dot` computes all it can, tiny numbers read as zero
  const GemmKernels* gemm = nullptr;
  const QuantKernels* quant = nullptr;
  const RowKernels* row = nullptr;
  const SoftmaxKernels* softmax = nullptr;
  const DotKernels* dot = nullptr;  // nullptr where there are none
};

const GemmKernels* GetGemmKernels(InstructionSet set, bool fma);
const QuantKernels* GetQuantKernels(InstructionSet set, bool fma);
const RowKernels* GetRowKernels(InstructionSet set, bool fma);
const SoftmaxKernels* GetSoftmaxKernels(InstructionSet set, bool fma);

bool Supported(InstructionSet set);
// Supported, and compiled in.
bool Available(InstructionSet set);
// The widest set that this machine has.
InstructionSet BestInstructionSet();
// The tables of `set`; fused only if allowed and present there, not exact only where that differs.
Kernels SelectKernels(InstructionSet set, bool allow_fma, bool exact = true);
}  // namespace stretto::engine::cpu
