#include "engine/device/cpu/rows.h"

#include <algorithm>

#include "base/check.h"
#include "engine/device/cpu/memory.h"

namespace stretto::engine::cpu {
namespace {
constexpr int64_t kElementsPerTask =
    16384;  // below this, handing work out costs more than it saves

// Calls fn(row) for all rows of `t`, split over threads by the number of elements.
template <class Fn>
void ForRows(ThreadPool& pool, const Tensor& t, const Fn& fn) {
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, t.cols));
  pool.ParallelRanges(t.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) fn(r);
  });
}

// Calls fn(column, number of columns) for pieces of whole groups of 16 columns; `rows` rows each.
template <class Fn>
void ForColumns(ThreadPool& pool, int64_t cols, int64_t rows, const Fn& fn) {
  const int64_t groups = (cols + kPanel - 1) / kPanel;
  const int64_t grain =
      std::max<int64_t>(4, kElementsPerTask / (kPanel * std::max<int64_t>(1, rows)));
  pool.ParallelRanges(groups, grain, [&](int64_t begin, int64_t end) {
    fn(begin * kPanel, std::min(end * kPanel, cols) - begin * kPanel);
  });
}

Source Read(Sink s) { return {s.data, s.bf16}; }
}  // namespace

void CopyRows(const Kernels& kernels, ThreadPool& pool, const Tensor& dst, const Tensor& src) {
  if (dst.contiguous() && src.contiguous() && dst.handle != src.handle) {
    pool.ParallelRanges(dst.size(), kElementsPerTask, [&](int64_t begin, int64_t end) {
      kernels.row->convert(MutableRowOf(dst, 0) + begin, RowOf(src, 0) + begin, end - begin);
    });
    return;
  }
  ForRows(pool, dst,
          [&](int64_t r) { kernels.row->convert(MutableRowOf(dst, r), RowOf(src, r), dst.cols); });
}

void FillRows(const Kernels& kernels, ThreadPool& pool, const Tensor& dst, float value) {
  if (dst.contiguous()) {
    pool.ParallelRanges(dst.size(), kElementsPerTask, [&](int64_t begin, int64_t end) {
      kernels.row->fill(MutableRowOf(dst, 0) + begin, value, end - begin);
    });
    return;
  }
  ForRows(pool, dst, [&](int64_t r) { kernels.row->fill(MutableRowOf(dst, r), value, dst.cols); });
}

void ScaleRows(const Kernels& kernels, ThreadPool& pool, const Tensor& x, float factor) {
  if (x.contiguous()) {
    pool.ParallelRanges(x.size(), kElementsPerTask, [&](int64_t begin, int64_t end) {
      kernels.row->scale(MutableF32Row(x, 0) + begin, factor, end - begin);
    });
    return;
  }
  ForRows(pool, x, [&](int64_t r) { kernels.row->scale(MutableF32Row(x, r), factor, x.cols); });
}

void AddRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& a,
             const Tensor& b) {
  ForRows(pool, out, [&](int64_t r) {
    kernels.row->add(MutableRowOf(out, r), RowOf(a, r), RowOf(b, r), out.cols);
  });
}

void GatherRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& src,
                const Tensor& rows) {
  ForRows(pool, out, [&](int64_t i) {
    const int32_t row = Ints(rows)[i];
    STRETTO_CHECK(row >= 0 && row < src.rows);
    kernels.row->convert(MutableRowOf(out, i), RowOf(src, row), out.cols);
  });
}

void ScatterAddRows(const Kernels& kernels, ThreadPool& pool, const Tensor& dst, const Tensor& src,
                    const Tensor& rows) {
  ForColumns(pool, dst.cols, src.rows, [&](int64_t column, int64_t n) {
    for (int64_t i = 0; i < src.rows; ++i) {
      const int32_t row = Ints(rows)[i];
      STRETTO_CHECK(row >= 0 && row < dst.rows);
      const Sink to = MutableRowOf(dst, row) + column;
      kernels.row->add(to, Read(to), RowOf(src, i) + column, n);
    }
  });
}

void SumRows(const Kernels& kernels, ThreadPool& pool, const Tensor& sum_N, const Tensor& x) {
  ForColumns(pool, x.cols, x.rows, [&](int64_t column, int64_t n) {
    const Sink to = MutableRowOf(sum_N, 0) + column;
    for (int64_t t = 0; t < x.rows; ++t) {
      kernels.row->add(to, Read(to), RowOf(x, t) + column, n);
    }
  });
}

void RmsNormRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& x,
                 const Tensor& weight, float eps, int64_t num_groups) {
  const int64_t n = x.cols / num_groups;
  ForRows(pool, x, [&](int64_t t) {
    for (int64_t g = 0; g < num_groups; ++g) {
      const Source from = RowOf(x, t) + g * n;
      const float inv = kernels.row->inverse_rms(from, eps, n);
      kernels.row->rms_norm(MutableRowOf(out, t) + g * n, from, RowOf(weight, 0), inv, n);
    }
  });
}

void RmsNormBackwardRows(const Kernels& kernels, ThreadPool& pool,
                         const RmsNormBackwardArgs& args) {
  const int64_t groups = args.num_groups, n = args.x.cols / groups;
  float* inverse = FloatScratch(ScratchUse::kShared, static_cast<size_t>(args.x.rows * groups) + 1);
  ForRows(pool, args.x, [&](int64_t t) {
    for (int64_t g = 0; g < groups; ++g) {
      inverse[t * groups + g] = kernels.row->inverse_rms(RowOf(args.x, t) + g * n, args.eps, n);
    }
  });
  // The weight's gradient first: d_x may be d_out.
  ForColumns(pool, n, args.x.rows * groups, [&](int64_t column, int64_t count) {
    float* d_w = MutableF32Row(args.d_weight, 0) + column;
    for (int64_t t = 0; t < args.x.rows; ++t) {
      for (int64_t g = 0; g < groups; ++g) {
        kernels.row->rms_norm_backward_weight(d_w, F32Row(args.d_out, t) + g * n + column,
                                              RowOf(args.x, t) + (g * n + column),
                                              inverse[t * groups + g], count);
      }
    }
  });
  ForRows(pool, args.x, [&](int64_t t) {
    for (int64_t g = 0; g < groups; ++g) {
      kernels.row->rms_norm_backward(MutableF32Row(args.d_x, t) + g * n,
                                     F32Row(args.d_out, t) + g * n, RowOf(args.x, t) + g * n,
                                     RowOf(args.weight, 0), inverse[t * groups + g], n,
                                     args.accumulate);
    }
  });
}

void RopeRows(const Kernels& kernels, ThreadPool& pool, const RopeArgs& args) {
  ForRows(pool, args.x, [&](int64_t t) {
    const int32_t position = Ints(args.positions_T)[t];
    STRETTO_CHECK(position >= 0 && position < args.cos_PC.rows);
    kernels.row->rope(MutableRowOf(args.x, t), F32Row(args.cos_PC, position),
                      F32Row(args.sin_PC, position), args.num_heads, args.cos_PC.cols,
                      args.inverse);
  });
}

void SwiGluRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out,
                const Tensor& gate_up) {
  ForRows(pool, out, [&](int64_t t) {
    kernels.row->swiglu(MutableRowOf(out, t), RowOf(gate_up, t), RowOf(gate_up, t) + out.cols,
                        out.cols);
  });
}

void SwiGluBackwardRows(const Kernels& kernels, ThreadPool& pool, const Tensor& d_gate_up,
                        const Tensor& out, const Tensor& d_out, const Tensor& gate_up) {
  const int64_t n = d_out.cols;
  ForRows(pool, d_out, [&](int64_t t) {
    const Sink d = MutableRowOf(d_gate_up, t);
    kernels.row->swiglu_backward(d, d + n, out ? MutableRowOf(out, t) : Sink{}, F32Row(d_out, t),
                                 RowOf(gate_up, t), RowOf(gate_up, t) + n, n);
  });
}
}  // namespace stretto::engine::cpu
