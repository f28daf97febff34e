// Attention of the CPU device. Keys and values lie in blocks of 16 tokens; per block and kv head:
//   keys   [C][16 tokens]           lanes are tokens: a score is one chain over c
//   values [ceil(C/16)][16 tokens][16 c]   lanes are c: an output is one chain over tokens
// Both are panels of gemm's register tiles, so scores and outputs are computed by those. Packed
// attention writes its keys and values into such blocks too and then runs the same code as paged
// attention: equal bits by construction.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/memory.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
// One layer's blocks: keys of each head as a panel [C][16 tokens], then values of each head as
// panels [16 tokens][16] of C padded to 16; where quantised, single bytes, and behind them the
// scales [16 tokens] f32 of each head's keys, then of each head's values.
struct KvBlocks {
  void* data = nullptr;
  bool bf16 = false;
  WeightFormat format = WeightFormat::kPlain;  // kInt8 or kFp8: an element is a byte
  int64_t num_kv_heads = 0, head_dim = 0;

  bool quantized() const { return format != WeightFormat::kPlain; }
  int64_t element_bytes() const { return quantized() ? 1 : (bf16 ? 2 : 4); }

  int64_t padded_head_dim() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
  // In elements, from the start of a block.
  int64_t KeyOffset(int64_t g) const { return g * head_dim * kBlockTokens; }
  int64_t ValueOffset(int64_t g) const {
    return (num_kv_heads * head_dim + g * padded_head_dim()) * kBlockTokens;
  }
  int64_t KeyScaleOffset(int64_t g) const {
    return (num_kv_heads * (head_dim + padded_head_dim()) + g * kScaleBytes) * kBlockTokens;
  }
  int64_t ValueScaleOffset(int64_t g) const { return KeyScaleOffset(num_kv_heads + g); }
  int64_t block_elements() const {
    return quantized() ? KeyScaleOffset(2 * num_kv_heads) : ValueOffset(num_kv_heads);
  }
  size_t block_bytes() const { return static_cast<size_t>(block_elements() * element_bytes()); }
  char* At(int64_t element) const { return static_cast<char*>(data) + element * element_bytes(); }
  float* ScalesAt(int64_t element) const { return reinterpret_cast<float*>(At(element)); }

 private:
  static constexpr int64_t kScaleBytes = sizeof(float);
};

// Row t of k and v [T, G*C] goes to token slot % 16 of block slot / 16.
struct KvWrite {
  int64_t row = 0, slot = 0;
};
void WriteKvRows(const Kernels& kernels, ThreadPool& pool, const KvBlocks& blocks, const Tensor& k,
                 const Tensor& v, const std::vector<KvWrite>& writes);

// Queries of rows [row, row + num_rows) that follow one another in one sequence: row i of them sees
// the first `context` + i positions, found through `blocks` (physical block numbers).
struct QueryRun {
  int64_t row = 0, num_rows = 0;
  int64_t context = 0;
  const int32_t* blocks = nullptr;
};
// Cuts runs into pieces that share loads of keys and values, and computes them.
void AttendRuns(const Kernels& kernels, ThreadPool& pool, const AttentionShape& shape,
                const KvBlocks& blocks, const Tensor& out, const Tensor& q,
                const std::vector<QueryRun>& runs);

void PackedAttentionForward(const Kernels& kernels, ThreadPool& pool, BlockAllocator& allocator,
                            const PackedAttention& args);
void PackedAttentionGradients(const Kernels& kernels, ThreadPool& pool,
                              const PackedAttentionBackward& args);
}  // namespace stretto::engine::cpu
