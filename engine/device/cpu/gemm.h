// Matrix products of the CPU device: splits a product into row blocks and groups of panels over the
// threads, brings A into f32, walks K in pieces that fit the caches (accumulators rest in an f32
// tile between pieces: the chain over k goes on, the bits don't change) and writes the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "engine/device/cpu/gemm_dot.h"
#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
// Bytes of one quantised panel of k rows.
size_t QuantPanelBytes(int64_t k, WeightFormat format);

// B as panels [ceil(n / 16)][k][16], bf16 or f32; or quantised (quant_kernels.cc), with the scales
// of columns where the format has them.
struct PanelMatrix {
  Source data;
  int64_t n = 0, k = 0;
  WeightFormat format = WeightFormat::kPlain;
  const float* column_scales = nullptr;  // ceil(n / 16) · 16; int8 and fp8
  bool pairs = false;                    // panels [k / 2][16] of words, as gemm_dot.h has them
  uint16_t least = 0;                    // of pairs: what packing them returned

  int64_t num_panels() const { return (n + kPanel - 1) / kPanel; }
  // In elements, or in bytes where quantised.
  ptrdiff_t panel_stride() const {
    return format == WeightFormat::kPlain ? static_cast<ptrdiff_t>(k) * kPanel
                                          : static_cast<ptrdiff_t>(QuantPanelBytes(k, format));
  }
  // Panel p from row k0 on; with int4, k0 begins a group.
  Source Panel(int64_t p, int64_t k0) const;
};

struct Product {
  Tensor out;  // M × N
  Tensor a;    // M × K, or K × M if a_transposed
  bool a_transposed = false;
  PanelMatrix b;
  Tensor bias;              // 1 × N or absent
  bool accumulate = false;  // chains begin with what out (f32) holds
};
void Multiply(const Kernels& kernels, ThreadPool& pool, const Product& product);

// Bytes of W_NK as panels.
size_t PackedBytes(int64_t n, int64_t k, DType dtype);
// Whether products of such a weight are gemm_dot.h's here, and whether its panels are of bytes in
// ByteDotKernels' order.
bool TakesPairs(const Kernels& kernels, int64_t k, DType dtype, WeightFormat format);
bool TakesOrder(const Kernels& kernels, int64_t k, WeightFormat format);
// parts_NK stacked along N into b's memory. Returns what `least` is from now on.
uint16_t PackWeight(const Kernels& kernels, ThreadPool& pool, const PanelMatrix& b,
                    absl::Span<const Tensor> parts_NK);

// The same quantised: panels, then the column scales. `n` and `k` of all parts together.
struct QuantLayout {
  QuantLayout(int64_t n, int64_t k, WeightFormat format);
  size_t scales_offset = 0, bytes = 0;
};
void QuantizeWeight(const Kernels& kernels, ThreadPool& pool, void* data, WeightFormat format,
                    absl::Span<const Tensor> parts_NK);

// out_MN (f32) (+)= a · b with b given as rows, b row k holding N columns: packed piece by piece
// into scratch memory of the calling thread.
struct RowProduct {
  Tensor out;
  Tensor a;  // M × K, or K × M if a_transposed
  bool a_transposed = false;
  Tensor b;  // K × N
  bool accumulate = false;
};
void MultiplyRows(const Kernels& kernels, ThreadPool& pool, const RowProduct& product);
}  // namespace stretto::engine::cpu
