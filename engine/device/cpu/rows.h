// Operations on rows of activations: splits rows (or, where a sum runs over rows, columns) over the
// threads and calls the row kernels.
#pragma once

#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/tensor.h"

namespace stretto::engine::cpu {
void CopyRows(const Kernels& kernels, ThreadPool& pool, const Tensor& dst, const Tensor& src);
void FillRows(const Kernels& kernels, ThreadPool& pool, const Tensor& dst, float value);
void ScaleRows(const Kernels& kernels, ThreadPool& pool, const Tensor& x, float factor);
void AddRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& a,
             const Tensor& b);
// out[i] = src[rows[i]]
void GatherRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& src,
                const Tensor& rows);
// dst[rows[i]] += src[i], in order of i
void ScatterAddRows(const Kernels& kernels, ThreadPool& pool, const Tensor& dst, const Tensor& src,
                    const Tensor& rows);
// sum_N += Σ_t x[t], in order of t
void SumRows(const Kernels& kernels, ThreadPool& pool, const Tensor& sum_N, const Tensor& x);

void RmsNormRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& x,
                 const Tensor& weight, float eps, int64_t num_groups);
struct RmsNormBackwardArgs {
  Tensor d_x, d_weight, d_out, x, weight;
  float eps;
  int64_t num_groups;
  bool accumulate;
};
void RmsNormBackwardRows(const Kernels& kernels, ThreadPool& pool, const RmsNormBackwardArgs& args);

struct RopeArgs {
  Tensor x, positions_T, cos_PC, sin_PC;
  int64_t num_heads;
  bool inverse;
};
void RopeRows(const Kernels& kernels, ThreadPool& pool, const RopeArgs& args);

void SwiGluRows(const Kernels& kernels, ThreadPool& pool, const Tensor& out, const Tensor& gate_up);
void SwiGluBackwardRows(const Kernels& kernels, ThreadPool& pool, const Tensor& d_gate_up,
                        const Tensor& out, const Tensor& d_out, const Tensor& gate_up);
}  // namespace stretto::engine::cpu
