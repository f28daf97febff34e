// A compute device: memory, streams and the table of operations. Backends (reference/, cpu/, later
// cuda/) implement it; nothing above knows which one it holds.
//
// The contract of every operation:
//  - Sizes are checked by the implementation with STRETTO_CHECK: a mismatch is a bug of the caller.
//  - Operations of one stream take effect in order. A CPU stream completes each before it returns;
//  a
//    CUDA stream queues it, and Synchronize() waits. Inputs stay untouched until then.
//  - Activations may be kF32 or kBF16 (any mix; each is read as f32, computed in f32, and rounded
//  to
//    nearest even when stored). Gradients of activations and of weights, logits, log-probs and
//    statistics are kF32. Ids, positions and tables are kI32.
//  - Every row's result is a pure function of that row's own inputs: it has the same bits whatever
//    other rows are in the call, however rows are split over calls, and for every number of
//    threads. Reductions have an order fixed by the length of what is reduced alone:
//      * products (Linear*): one fused multiply-add chain over k = 0, 1, …, K-1 from 0 (plus the
//      bias
//        added at the end), K split in `k_leaves` equal leaves joined by a binary tree if > 1;
//      * sums over a row (norms, softmax): 16 partial sums, element i into partial i mod 16 in
//      order,
//        then a binary tree over the partials (i += i+8, i+4, i+2, i+1).
//  - An accumulating operation ("+=") continues from the value that is there.
//
// Legend: T rows (tokens), D columns of the residual stream, N/K outputs/inputs of a product, H
// query heads, G key/value heads, C head size, F MLP width, V vocabulary, S sequences, B rows to
// sample.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device/quantize.h"
#include "engine/device/tensor.h"

namespace stretto::engine {
inline constexpr int kBlockTokens = 16;  // tokens in one block of KV cache

// What the bits of a result belong to; equal profiles compute equal bits.
struct NumericProfile {
  std::string backend;          // "cpu", "reference", "cuda"
  std::string instruction_set;  // arithmetic that decides the bits: on CPUs "fma", "nofma", "fast"
  DType dtype = DType::kBF16;   // of weights and activations
  int k_leaves = 1;
  WeightFormat weights = WeightFormat::kPlain;
  WeightFormat kv = WeightFormat::kPlain;  // of the KV cache

  std::string ToString() const;  // "cpu/fma/bf16/1"; with quantised weights "cpu/fma/bf16+int8/1"
  // "bf16"; "bf16+int8" with quantised weights, "bf16+kv-fp8" with a quantised KV cache.
  std::string DTypeName() const;
  friend bool operator==(const NumericProfile&, const NumericProfile&) = default;
};

// An order of execution. On CPUs it carries nothing.
class Stream {
 public:
  virtual ~Stream() = default;
};

// A weight matrix W_NK laid out as the device's products like it.
class PackedWeight {
 public:
  virtual ~PackedWeight() = default;
  virtual int64_t n() const = 0;
  virtual int64_t k() const = 0;
  virtual size_t bytes() const = 0;
  virtual WeightFormat format() const = 0;
};

// Keys and values of all layers in blocks of kBlockTokens tokens; the layout inside is the
// device's.
class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual int64_t num_blocks() const = 0;
  virtual size_t bytes() const = 0;
};

struct KvCacheShape {
  int64_t num_layers = 0, num_blocks = 0, num_kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBF16;
  // kPlain: of `dtype`. kInt8 or kFp8: each token's keys and values of one head are quantised by
  // themselves when they are written (quantize.h), with an f32 scale for each.
  WeightFormat format = WeightFormat::kPlain;

  // What one block takes, but for the padding that a device may add.
  int64_t block_bytes() const {
    const int64_t head_bytes = format == WeightFormat::kPlain
                                   ? head_dim * static_cast<int64_t>(SizeOf(dtype))
                                   : head_dim + static_cast<int64_t>(sizeof(float));
    return 2 * num_layers * num_kv_heads * kBlockTokens * head_bytes;
  }
};

struct AttentionShape {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 1.0f;          // multiplies q·k
  int64_t sliding_window = 0;  // a query sees its last `sliding_window` positions; 0: all
};

// Attention of queries over paged keys. Row t of q belongs to sequence row_sequence[t] and sees
// context_length[t] positions (its own included), found through block_tables[sequence].
struct PagedAttention {
  AttentionShape shape;
  int64_t layer = 0;
  Tensor out;               // [T, H*C]
  Tensor q;                 // [T, H*C], positions already rotated in
  Tensor row_sequence_T;    // i32 [1, T]
  Tensor context_length_T;  // i32 [1, T]
  Tensor block_tables_SM;   // i32 [S, M]: physical block of each logical block
};

// Attention over packed sequences that may share a beginning. Segment s holds rows
// [row_begin[s], row_begin[s] + num_rows[s]) and continues segment parent[s] (< s, or -1: begins a
// sequence): its rows see all positions of its ancestors, then its own up to themselves. A group's
// prompt is one segment, each completion a child of it. Host arrays.
struct SegmentTable {
  std::vector<int32_t> row_begin, num_rows, parent;
  int64_t num_segments() const { return static_cast<int64_t>(row_begin.size()); }
  // Number of positions before segment s.
  int64_t StartPosition(int64_t s) const {
    int64_t position = 0;
    for (int32_t p = parent[s]; p >= 0; p = parent[p]) position += num_rows[p];
    return position;
  }
};

struct PackedAttention {
  AttentionShape shape;
  const SegmentTable* segments = nullptr;
  Tensor q, k, v;  // [T, H*C], [T, G*C], [T, G*C]
  Tensor out;      // [T, H*C]
};

struct PackedAttentionBackward {
  PackedAttention forward;  // the tensors of the forward pass, `out` included
  Tensor d_out;             // f32 [T, H*C]
  Tensor d_q, d_k, d_v;     // f32, overwritten
};

// Sampling of one row: transformations in this order: temperature (0: greedy), top-k (0: off),
// top-p (1: off), min-p (0: off); then the inverse of the cumulative distribution, in order of
// token ids, at `uniform`.
struct SamplingRow {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float uniform = 0.0f;  // in [0, 1), from base/philox.h
};

struct Sampled {
  int32_t token = 0;
  float logprob = 0;           // of logits / temperature, untruncated (temperature 0 counts as 1)
  float sampling_logprob = 0;  // under the truncated distribution; 0 when greedy
};

struct AdamWStep {
  float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0;
  float grad_scale = 1.0f;  // gradient clipping: g * grad_scale enters
  int64_t step = 1;         // 1-based, for bias correction
};

class Device {
 public:
  virtual ~Device() = default;
  // The profile of bf16 or f32 computation on this device.
  virtual NumericProfile Profile(DType dtype) const = 0;
  virtual int num_threads() const = 0;

  // --- memory
  // ------------------------------------------------------------------------------------- 64-byte
  // aligned, contents undefined. ResourceExhausted when there is not enough.
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes) = 0;
  // All bytes zero. What is large isn't touched: memory that is written later costs nothing now.
  virtual absl::StatusOr<Buffer> AllocateZeros(size_t bytes) = 0;
  virtual void Free(uint64_t handle, size_t bytes) = 0;
  virtual std::unique_ptr<Stream> CreateStream() = 0;
  virtual void Synchronize(Stream& stream) = 0;
  // Host memory, row-major and contiguous, of the tensor's dtype, to or from the tensor. Blocking.
  virtual void Upload(Stream& stream, const Tensor& dst, const void* src) = 0;
  virtual void Download(Stream& stream, const Tensor& src, void* dst) = 0;
  // Where the host may write all elements of `dst` itself, or null if it can't reach them. What is
  // enqueued already must not touch `dst`.
  virtual void* HostMemory(const Tensor& dst) {
    static_cast<void>(dst);
    return nullptr;
  }
  // dst = src, converting between kF32 and kBF16. Rows of bf16 may begin where the rows of f32
  // begin that they are made of.
  virtual void Copy(Stream& stream, const Tensor& dst, const Tensor& src) = 0;
  virtual void Fill(Stream& stream, const Tensor& dst, float value) = 0;

  // --- products
  // ----------------------------------------------------------------------------------- Lays out
  // W_NK (kF32 or kBF16), given as parts stacked along N, for Linear; stored in `format`
  // (quantize.h), each row of W quantised by itself.
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Stream& stream,
                                                             absl::Span<const Tensor> parts_NK,
                                                             WeightFormat format) = 0;
  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Stream& stream,
                                                     absl::Span<const Tensor> parts_NK) {
    return Pack(stream, parts_NK, WeightFormat::kPlain);
  }
  // The same shapes and format with new values.
  virtual void Repack(Stream& stream, PackedWeight& weight, absl::Span<const Tensor> parts_NK) = 0;
  // out_TN = x_TK · W_NKᵀ + bias_N (bias may be absent). out may be kF32 or kBF16. With quantised
  // weights the chain runs over the stored values, q or v for int8 and fp8 and scale · q for int4;
  // the finished chain of int8 and fp8 is multiplied by its column's scale before the bias.
  virtual void Linear(Stream& stream, const Tensor& out_TN, const Tensor& x_TK,
                      const PackedWeight& weight, const Tensor& bias_N) = 0;
  // d_x_TK = d_y_TN (kF32 or kBF16) · W_NK; W unpacked, as Pack was given it. `accumulate`: +=.
  virtual void LinearBackwardInput(Stream& stream, const Tensor& d_x_TK, const Tensor& d_y_TN,
                                   const Tensor& w_NK, bool accumulate) = 0;
  // d_w_NK += d_y_TNᵀ · x_TK, the chain over T in order of rows. d_y is kF32 or kBF16.
  virtual void LinearBackwardWeight(Stream& stream, const Tensor& d_w_NK, const Tensor& d_y_TN,
                                    const Tensor& x_TK) = 0;
  // d_b_N += sum over rows, in order.
  virtual void BiasBackward(Stream& stream, const Tensor& d_b_N, const Tensor& d_y_TN) = 0;

  // --- rows
  // ---------------------------------------------------------------------------------------
  virtual void Embedding(Stream& stream, const Tensor& out_TD, const Tensor& table_VD,
                         const Tensor& ids_T) = 0;
  // d_table[ids[t]] += d_out[t], in order of t.
  virtual void EmbeddingBackward(Stream& stream, const Tensor& d_table_VD, const Tensor& d_out_TD,
                                 const Tensor& ids_T) = 0;
  // out[i] = src[rows[i]];  and its transpose  dst[rows[i]] += src[i]  (rows distinct).
  virtual void GatherRows(Stream& stream, const Tensor& out_ND, const Tensor& src_TD,
                          const Tensor& rows_N) = 0;
  virtual void ScatterAddRows(Stream& stream, const Tensor& dst_TD, const Tensor& src_ND,
                              const Tensor& rows_N) = 0;
  // out = a + b. out may be a or b.
  virtual void Add(Stream& stream, const Tensor& out, const Tensor& a, const Tensor& b) = 0;
  // Root-mean-square norm (Zhang & Sennrich 2019): out = x / sqrt(mean(x²) + eps) · weight, for
  // each of `num_groups` equal groups of columns by itself (1: the whole row; H for a per-head
  // norm); weight has cols / num_groups elements. x / rms is rounded to x's dtype before the weight
  // is applied, as the Hugging Face models do. out may be x.
  virtual void RmsNorm(Stream& stream, const Tensor& out, const Tensor& x, const Tensor& weight,
                       float eps, int64_t num_groups) = 0;
  // d_x (overwritten, or += if accumulate) and d_weight +=. The roundings of the forward pass count
  // as the identity.
  virtual void RmsNormBackward(Stream& stream, const Tensor& d_x, const Tensor& d_weight,
                               const Tensor& d_out, const Tensor& x, const Tensor& weight,
                               float eps, int64_t num_groups, bool accumulate) = 0;
  // Rotary positions (Su et al. 2021) in the half-split layout: pairs (i, i + C/2) of each head are
  // turned by the angle whose cosine and sine stand in cos_PC/sin_PC [P, C/2] f32 at row
  // positions[t]. In place; `inverse` turns back (the backward pass).
  virtual void Rope(Stream& stream, const Tensor& x, const Tensor& positions_T,
                    const Tensor& cos_PC, const Tensor& sin_PC, int64_t num_heads,
                    bool inverse) = 0;
  // out_TF = silu(gate) · up, gate_up_T2F = [gate | up]; and d_gate_up (kF32, or kBF16: rounded)
  // from d_out, with out_TF once more unless it is absent.
  virtual void SwiGlu(Stream& stream, const Tensor& out_TF, const Tensor& gate_up_T2F) = 0;
  virtual void SwiGluBackward(Stream& stream, const Tensor& d_gate_up_T2F, const Tensor& out_TF,
                              const Tensor& d_out_TF, const Tensor& gate_up_T2F) = 0;

  // --- attention
  // ---------------------------------------------------------------------------------- For each
  // query and head: s_j = scale · (chain over c of q_c·k_jc); p_j = exp(s_j − max s); the sum of p
  // in the fixed order of a row over logical positions j; out = (chain over j of p_j·v_j) / sum.
  // Keys and values are rounded to the KV dtype (paged: of the cache; packed: of k and v
  // themselves) so both forms give the same bits when those dtypes agree. In a quantised cache k_j
  // and v_j are the stored values, with scales a_j and b_j of the token and head:
  //   s_j = scale · (a_j · (chain over c of q_c·k_jc)),  out = (chain over j of (p_j·b_j)·v_j) /
  //   sum.
  virtual absl::StatusOr<std::unique_ptr<KvCache>> AllocateKvCache(const KvCacheShape& shape) = 0;
  // Stores row t's keys and values [T, G*C] at slots[t] = block * kBlockTokens + offset; −1 skips.
  virtual void WriteKv(Stream& stream, KvCache& cache, int64_t layer, const Tensor& k,
                       const Tensor& v, const Tensor& slots_T) = 0;
  // Copies whole blocks (all layers): from[i] → to[i]. Host arrays.
  virtual void CopyKvBlocks(Stream& stream, KvCache& cache, absl::Span<const int32_t> from,
                            absl::Span<const int32_t> to) = 0;
  virtual void Attention(Stream& stream, const KvCache& cache, const PagedAttention& args) = 0;
  virtual void Attention(Stream& stream, const PackedAttention& args) = 0;
  virtual void AttentionBackward(Stream& stream, const PackedAttentionBackward& args) = 0;

  // --- vocabulary
  // --------------------------------------------------------------------------------- With z =
  // logits · (1 / temperature): logprob = z_target − max z − log sum exp(z − max z), and the
  // entropy of softmax(z) (absent: not computed). logits_TV f32, targets i32 [1, T], outputs f32
  // [1, T]. stats_T3 (f32, or absent) receives what LogProbsBackward else finds again: max z,
  // log sum exp(z − max z) and, where it is asked for, the entropy.
  virtual void LogProbs(Stream& stream, const Tensor& logprobs_T, const Tensor& entropy_T,
                        const Tensor& logits_TV, const Tensor& targets_T, float temperature,
                        const Tensor& stats_T3) = 0;
  void LogProbs(Stream& stream, const Tensor& logprobs_T, const Tensor& entropy_T,
                const Tensor& logits_TV, const Tensor& targets_T, float temperature) {
    LogProbs(stream, logprobs_T, entropy_T, logits_TV, targets_T, temperature, Tensor{});
  }
  struct LogitsGradient {
    Tensor logits_TV;
    // d loss / d logits: logits_TV itself, or kBF16 whose rows begin where those of logits_TV do.
    Tensor d_logits_TV;
    Tensor d_logprobs_T, d_entropy_T, targets_T;  // d_entropy_T may be absent
    float temperature = 1.0f;
    Tensor stats_T3;  // of LogProbs (with entropies, if d_entropy_T is there), or absent
  };
  virtual void LogProbsBackward(Stream& stream, const LogitsGradient& args) = 0;
  // The same over a vocabulary in leaves. A call sees logits of tokens [first_id, first_id + cols):
  //  1. max_T = max z. The maximum over the vocabulary is the largest of all leaves'.
  virtual void VocabularyMax(Stream& stream, const Tensor& max_T, const Tensor& logits_TV,
                             float temperature) = 0;
  //  2. sums_T3, a row: Σ e, Σ e·(z − max) with e = exp(z − max), each in the fixed order of a row
  //  of
  //     logits_TV's length; and z_target − max, or 0 where the target is not among these tokens.
  //     Sums over the vocabulary are sums of leaves' rows. targets are ids of the vocabulary.
  virtual void VocabularySums(Stream& stream, const Tensor& sums_T3, const Tensor& logits_TV,
                              const Tensor& max_T, const Tensor& targets_T, int64_t first_id,
                              float temperature) = 0;
  //  3. logprob = (z_target − max) − log Σ e, entropy = log Σ e − Σ e·(z − max) / Σ e, of the sums
  //     over the vocabulary. entropy_T may be absent.
  virtual void VocabularyLogProbs(Stream& stream, const Tensor& logprobs_T, const Tensor& entropy_T,
                                  const Tensor& sums_T3) = 0;
  //  4. LogProbsBackward, given max and sums over the vocabulary.
  struct VocabularyGradient {
    Tensor logits_TV;  // overwritten
    Tensor max_T, sums_T3, targets_T;
    Tensor d_logprobs_T, d_entropy_T;  // d_entropy_T may be absent
    int64_t first_id = 0;
    float temperature = 1.0f;
  };
  virtual void VocabularyBackward(Stream& stream, const VocabularyGradient& args) = 0;
  // One token a row of logits_BV (f32). Blocking: results are on the host on return. The log-prob
  // has the bits that LogProbs computes. The largest token id wins no tie: the smallest does.
  virtual void Sample(Stream& stream, const Tensor& logits_BV, absl::Span<const SamplingRow> rows,
                      absl::Span<Sampled> sampled) = 0;

  // --- optimizer
  // ---------------------------------------------------------------------------------- AdamW
  // (Loshchilov & Hutter 2019) on f32 masters; `weights` (kBF16 or kF32, same shape) receives the
  // rounded master. All contiguous.
  virtual void AdamW(Stream& stream, const Tensor& weights, const Tensor& master, const Tensor& m,
                     const Tensor& v, const Tensor& grad, const AdamWStep& step) = 0;
  // Sum of squares of a contiguous f32 tensor in double: blocks of 4096 elements in order, joined
  // in order. Blocking. Non-finite elements make it non-finite.
  virtual double SquaredNorm(Stream& stream, const Tensor& x) = 0;
  // x *= factor (f32).
  virtual void Scale(Stream& stream, const Tensor& x, float factor) = 0;
};

inline Buffer::~Buffer() {
  if (device_ != nullptr && handle_ != 0) device_->Free(handle_, bytes_);
}

struct DeviceOptions {
  std::string backend = "cpu";  // "cpu" or "reference"
  int num_threads = 0;          // 0: what the machine or cgroup grants
  bool allow_fma = true;        // false: compute in the profile of machines without FMA
  // false (`fast` numerics): where other bits than those of other machines come faster, these. On
  // CPUs only products with numbers below 2^-126 in them change (gemm_dot.h), and only where the
  // machine has such instructions; the profile says so.
  bool exact = true;
};
// Owns its worker threads; they end with it. InvalidArgument names unknown backends.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options);
}  // namespace stretto::engine
