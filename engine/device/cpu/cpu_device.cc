#include "engine/device/cpu/cpu_device.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "engine/device/background.h"
#include "engine/device/cpu/attention.h"
#include "engine/device/cpu/gemm.h"
#include "engine/device/cpu/memory.h"
#include "engine/device/cpu/optimizer.h"
#include "engine/device/cpu/rows.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/cpu/vocabulary.h"
#include "engine/device/cpu/vocabulary_leaves.h"
#include "engine/device/host_tensors.h"

namespace stretto::engine {
namespace {
using cpu::BlockAllocator;
using cpu::KvBlocks;

bool IsFloat(const Tensor& t) { return t.dtype == DType::kF32 || t.dtype == DType::kBF16; }
bool IsF32(const Tensor& t) { return t.dtype == DType::kF32; }
bool IsInt(const Tensor& t, int64_t count) {
  return t.dtype == DType::kI32 && t.size() == count && t.contiguous();
}
bool SameShape(const Tensor& a, const Tensor& b) { return a.rows == b.rows && a.cols == b.cols; }
bool IsStats(const Tensor& t, int64_t rows) { return IsF32(t) && t.rows == rows && t.cols == 3; }
bool IsRowOrAbsent(const Tensor& t, int64_t size) { return !t || (IsF32(t) && t.size() == size); }

class CpuStream : public Stream {};

class CpuPackedWeight : public PackedWeight {
 public:
  CpuPackedWeight(Buffer buffer, int64_t n, int64_t k, DType dtype, WeightFormat format, bool pairs)
      : buffer_(std::move(buffer)), n_(n), k_(k), dtype_(dtype), format_(format), pairs_(pairs) {}
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  size_t bytes() const override { return buffer_.bytes(); }
  WeightFormat format() const override { return format_; }
  DType dtype() const { return dtype_; }  // of what was packed
  void* data() const { return reinterpret_cast<void*>(buffer_.handle()); }
  cpu::PanelMatrix panels() const {
    cpu::PanelMatrix b;
    b.data = cpu::Source{data(), format_ == WeightFormat::kPlain && dtype_ == DType::kBF16};
    b.n = n_;
    b.k = k_;
    b.format = format_;
    b.pairs = pairs_;
    b.least = least_;
    if (format_ == WeightFormat::kInt8 || format_ == WeightFormat::kFp8) {
      b.column_scales = reinterpret_cast<const float*>(
          buffer_.handle() + cpu::QuantLayout(n_, k_, format_).scales_offset);
    }
    return b;
  }
  void set_least(uint16_t least) { least_ = least; }

 private:
  Buffer buffer_;
  int64_t n_, k_;
  DType dtype_;
  WeightFormat format_;
  bool pairs_;
  uint16_t least_ = 0;
};

class CpuKvCache : public KvCache {
 public:
  CpuKvCache(Buffer buffer, const KvCacheShape& shape)
      : buffer_(std::move(buffer)), shape_(shape) {}
  int64_t num_blocks() const override { return shape_.num_blocks; }
  size_t bytes() const override { return buffer_.bytes(); }
  const KvCacheShape& shape() const { return shape_; }

  static KvBlocks Geometry(const KvCacheShape& shape) {
    KvBlocks kv;
    kv.format = shape.format;
    kv.bf16 = shape.dtype == DType::kBF16 && !kv.quantized();
    kv.num_kv_heads = shape.num_kv_heads;
    kv.head_dim = shape.head_dim;
    return kv;
  }
  KvBlocks Layer(int64_t layer) const {
    STRETTO_CHECK(layer >= 0 && layer < shape_.num_layers);
    KvBlocks kv = Geometry(shape_);
    kv.data = reinterpret_cast<char*>(buffer_.handle()) +
              static_cast<size_t>(layer * shape_.num_blocks) * kv.block_bytes();
    return kv;
  }

 private:
  Buffer buffer_;
  KvCacheShape shape_;
};

void CheckShape(const AttentionShape& shape) {
  STRETTO_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0);
  STRETTO_CHECK(shape.head_dim > 0 && shape.sliding_window >= 0);
}

void CheckSegments(const PackedAttention& args) {
  STRETTO_CHECK(args.segments != nullptr);
  const SegmentTable& table = *args.segments;
  STRETTO_CHECK(table.num_rows.size() == table.row_begin.size() &&
                table.parent.size() == table.row_begin.size());
  for (int64_t s = 0; s < table.num_segments(); ++s) {
    STRETTO_CHECK(table.parent[s] >= -1 && table.parent[s] < s);
    STRETTO_CHECK(table.row_begin[s] >= 0 && table.num_rows[s] >= 0 &&
                  table.row_begin[s] + table.num_rows[s] <= args.q.rows);
  }
}

void CheckPacked(const PackedAttention& args) {
  CheckShape(args.shape);
  CheckSegments(args);
  STRETTO_CHECK(IsFloat(args.q) && IsFloat(args.k) && args.k.dtype == args.v.dtype);
  STRETTO_CHECK(args.q.cols == args.shape.num_heads * args.shape.head_dim);
  STRETTO_CHECK(args.k.cols == args.shape.num_kv_heads * args.shape.head_dim);
  STRETTO_CHECK(SameShape(args.k, args.v) && args.k.rows == args.q.rows);
  STRETTO_CHECK(SameShape(args.q, args.out));
}

class CpuDevice final : public Device, public LendsThreads, public ReadsHostMemory {
 public:
  CpuDevice(const cpu::Kernels& kernels, int num_threads) : kernels_(kernels), pool_(num_threads) {}

  NumericProfile Profile(DType dtype) const override {
    const char* arithmetic = !kernels_.exact ? "fast" : kernels_.fma ? "fma" : "nofma";
    return {"cpu", arithmetic, dtype, 1};
  }
  int num_threads() const override { return pool_.num_threads(); }
  std::shared_ptr<void> LendThread() override {
    pool_.Lend();
    return {static_cast<void*>(&pool_), [this](void*) { pool_.TakeBack(); }};
  }

  // --- memory
  // -------------------------------------------------------------------------------------
  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    return BufferAt(allocator_.Allocate(bytes), bytes);
  }
  absl::StatusOr<Buffer> AllocateZeros(size_t bytes) override {
    return BufferAt(allocator_.AllocateZeros(bytes), bytes);
  }
  absl::StatusOr<Buffer> BufferAt(void* p, size_t bytes) {
    if (p == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the machine has no ", bytes, " bytes of memory left"));
    }
    return Buffer(this, reinterpret_cast<uint64_t>(p), bytes);
  }
  void Free(uint64_t handle, size_t bytes) override {
    allocator_.Free(reinterpret_cast<void*>(handle), bytes);
  }
  std::unique_ptr<Stream> CreateStream() override { return std::make_unique<CpuStream>(); }
  void Synchronize(Stream&) override {}
  void Upload(Stream&, const Tensor& dst, const void* src) override {
    const size_t row_bytes = static_cast<size_t>(dst.cols) * SizeOf(dst.dtype);
    for (int64_t r = 0; r < dst.rows; ++r) {
      std::memcpy(cpu::MutableRowOf(dst, r).data, static_cast<const char*>(src) + r * row_bytes,
                  row_bytes);
    }
  }
  void* HostMemory(const Tensor& dst) override {
    return dst.rows == 1 || dst.row_stride == dst.cols ? cpu::MutableRowOf(dst, 0).data : nullptr;
  }
  Tensor AtHost(const void* data, DType dtype, int64_t rows, int64_t cols) override {
    return {reinterpret_cast<uint64_t>(data), dtype, rows, cols, cols};
  }
  void Download(Stream&, const Tensor& src, void* dst) override {
    const size_t row_bytes = static_cast<size_t>(src.cols) * SizeOf(src.dtype);
    for (int64_t r = 0; r < src.rows; ++r) {
      std::memcpy(static_cast<char*>(dst) + r * row_bytes, cpu::RowOf(src, r).data, row_bytes);
    }
  }
  void Copy(Stream&, const Tensor& dst, const Tensor& src) override {
    STRETTO_CHECK(SameShape(dst, src) && IsFloat(dst) && IsFloat(src));
    cpu::CopyRows(kernels_, pool_, dst, src);
  }
  void Fill(Stream&, const Tensor& dst, float value) override {
    STRETTO_CHECK(IsFloat(dst));
    cpu::FillRows(kernels_, pool_, dst, value);
  }

  // --- products
  // -----------------------------------------------------------------------------------
  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Stream& stream,
                                                     absl::Span<const Tensor> parts_NK,
                                                     WeightFormat format) override {
    STRETTO_CHECK(!parts_NK.empty());
    int64_t n = 0;
    for (const Tensor& part : parts_NK) n += part.rows;
    const int64_t k = parts_NK[0].cols;
    const DType dtype = parts_NK[0].dtype;
    auto buffer = Allocate(format == WeightFormat::kPlain ? cpu::PackedBytes(n, k, dtype)
                                                          : cpu::QuantLayout(n, k, format).bytes);
    if (!buffer.ok()) return buffer.status();
    const bool pairs = cpu::TakesPairs(kernels_, k, dtype, format);
    auto weight = std::make_unique<CpuPackedWeight>(*std::move(buffer), n, k, dtype, format, pairs);
    Repack(stream, *weight, parts_NK);
    return weight;
  }
  void Repack(Stream&, PackedWeight& weight, absl::Span<const Tensor> parts_NK) override {
    auto& w = static_cast<CpuPackedWeight&>(weight);
    int64_t n = 0;
    for (const Tensor& part : parts_NK) {
      STRETTO_CHECK(part.cols == w.k() && part.dtype == w.dtype() && IsFloat(part));
      n += part.rows;
    }
    STRETTO_CHECK(n == w.n());
    if (w.format() == WeightFormat::kPlain) {
      w.set_least(cpu::PackWeight(kernels_, pool_, w.panels(), parts_NK));
    } else {
      w.set_least(w.format() == WeightFormat::kFp8 ? cpu::kLeastFp8 : cpu::kLeastInt8);
      cpu::QuantizeWeight(kernels_, pool_, w.data(), w.format(), parts_NK);
    }
  }
  void Linear(Stream&, const Tensor& out_TN, const Tensor& x_TK, const PackedWeight& weight,
              const Tensor& bias_N) override {
    const auto& w = static_cast<const CpuPackedWeight&>(weight);
    STRETTO_CHECK(out_TN.rows == x_TK.rows && out_TN.cols == w.n() && x_TK.cols == w.k());
    STRETTO_CHECK(IsFloat(out_TN) && IsFloat(x_TK));
    STRETTO_CHECK(!bias_N || (bias_N.size() == w.n() && bias_N.contiguous() && IsFloat(bias_N)));
    cpu::Product product;
    product.out = out_TN;
    product.a = x_TK;
    product.b = w.panels();
    product.bias = bias_N;
    cpu::Multiply(kernels_, pool_, product);
  }
  void LinearBackwardInput(Stream&, const Tensor& d_x_TK, const Tensor& d_y_TN, const Tensor& w_NK,
                           bool accumulate) override {
    STRETTO_CHECK(d_x_TK.rows == d_y_TN.rows && d_x_TK.cols == w_NK.cols);
    STRETTO_CHECK(d_y_TN.cols == w_NK.rows && IsF32(d_x_TK) && IsFloat(d_y_TN) && IsFloat(w_NK));
    cpu::MultiplyRows(kernels_, pool_, {d_x_TK, d_y_TN, false, w_NK, accumulate});
  }
  void LinearBackwardWeight(Stream&, const Tensor& d_w_NK, const Tensor& d_y_TN,
                            const Tensor& x_TK) override {
    STRETTO_CHECK(d_w_NK.rows == d_y_TN.cols && d_w_NK.cols == x_TK.cols);
    STRETTO_CHECK(d_y_TN.rows == x_TK.rows && IsF32(d_w_NK) && IsFloat(d_y_TN) && IsFloat(x_TK));
    cpu::MultiplyRows(kernels_, pool_, {d_w_NK, d_y_TN, true, x_TK, true});
  }
  void BiasBackward(Stream&, const Tensor& d_b_N, const Tensor& d_y_TN) override {
    STRETTO_CHECK(d_b_N.size() == d_y_TN.cols && IsF32(d_b_N) && IsF32(d_y_TN));
    cpu::SumRows(kernels_, pool_, d_b_N, d_y_TN);
  }

  // --- rows
  // ---------------------------------------------------------------------------------------
  void Embedding(Stream&, const Tensor& out_TD, const Tensor& table_VD,
                 const Tensor& ids_T) override {
    Gather(out_TD, table_VD, ids_T);
  }
  void EmbeddingBackward(Stream&, const Tensor& d_table_VD, const Tensor& d_out_TD,
                         const Tensor& ids_T) override {
    ScatterAdd(d_table_VD, d_out_TD, ids_T);
  }
  void GatherRows(Stream&, const Tensor& out_ND, const Tensor& src_TD,
                  const Tensor& rows_N) override {
    Gather(out_ND, src_TD, rows_N);
  }
  void ScatterAddRows(Stream&, const Tensor& dst_TD, const Tensor& src_ND,
                      const Tensor& rows_N) override {
    ScatterAdd(dst_TD, src_ND, rows_N);
  }
  void Add(Stream&, const Tensor& out, const Tensor& a, const Tensor& b) override {
    STRETTO_CHECK(SameShape(out, a) && SameShape(out, b));
    STRETTO_CHECK(IsFloat(out) && IsFloat(a) && IsFloat(b));
    cpu::AddRows(kernels_, pool_, out, a, b);
  }
  void RmsNorm(Stream&, const Tensor& out, const Tensor& x, const Tensor& weight, float eps,
               int64_t num_groups) override {
    STRETTO_CHECK(SameShape(out, x) && num_groups > 0 && weight.size() * num_groups == x.cols);
    STRETTO_CHECK(IsFloat(out) && IsFloat(x) && IsFloat(weight));
    cpu::RmsNormRows(kernels_, pool_, out, x, weight, eps, num_groups);
  }
  void RmsNormBackward(Stream&, const Tensor& d_x, const Tensor& d_weight, const Tensor& d_out,
                       const Tensor& x, const Tensor& weight, float eps, int64_t num_groups,
                       bool accumulate) override {
    STRETTO_CHECK(SameShape(d_x, x) && SameShape(d_out, x) && num_groups > 0);
    STRETTO_CHECK(weight.size() * num_groups == x.cols && d_weight.size() == weight.size());
    STRETTO_CHECK(IsF32(d_x) && IsF32(d_weight) && IsF32(d_out) && IsFloat(x) && IsFloat(weight));
    cpu::RmsNormBackwardRows(kernels_, pool_,
                             {d_x, d_weight, d_out, x, weight, eps, num_groups, accumulate});
  }
  void Rope(Stream&, const Tensor& x, const Tensor& positions_T, const Tensor& cos_PC,
            const Tensor& sin_PC, int64_t num_heads, bool inverse) override {
    STRETTO_CHECK(IsFloat(x) && IsInt(positions_T, x.rows) && IsF32(cos_PC) && IsF32(sin_PC));
    STRETTO_CHECK(SameShape(cos_PC, sin_PC) && num_heads > 0);
    STRETTO_CHECK(x.cols == num_heads * 2 * cos_PC.cols);
    cpu::RopeRows(kernels_, pool_, {x, positions_T, cos_PC, sin_PC, num_heads, inverse});
  }
  void SwiGlu(Stream&, const Tensor& out_TF, const Tensor& gate_up_T2F) override {
    STRETTO_CHECK(out_TF.rows == gate_up_T2F.rows && 2 * out_TF.cols == gate_up_T2F.cols);
    STRETTO_CHECK(IsFloat(out_TF) && IsFloat(gate_up_T2F));
    cpu::SwiGluRows(kernels_, pool_, out_TF, gate_up_T2F);
  }
  void SwiGluBackward(Stream&, const Tensor& d_gate_up_T2F, const Tensor& out_TF,
                      const Tensor& d_out_TF, const Tensor& gate_up_T2F) override {
    STRETTO_CHECK(d_out_TF.rows == gate_up_T2F.rows && 2 * d_out_TF.cols == gate_up_T2F.cols);
    STRETTO_CHECK(SameShape(d_gate_up_T2F, gate_up_T2F) && IsFloat(d_gate_up_T2F));
    STRETTO_CHECK(IsF32(d_out_TF) && IsFloat(gate_up_T2F));
    STRETTO_CHECK(!out_TF || (SameShape(out_TF, d_out_TF) && IsFloat(out_TF)));
    cpu::SwiGluBackwardRows(kernels_, pool_, d_gate_up_T2F, out_TF, d_out_TF, gate_up_T2F);
  }

  // --- attention
  // ----------------------------------------------------------------------------------
  absl::StatusOr<std::unique_ptr<KvCache>> AllocateKvCache(const KvCacheShape& shape) override {
    STRETTO_CHECK(shape.num_layers > 0 && shape.num_blocks > 0 && shape.num_kv_heads > 0);
    STRETTO_CHECK(shape.head_dim > 0);
    STRETTO_CHECK(shape.dtype == DType::kF32 || shape.dtype == DType::kBF16);
    STRETTO_CHECK(shape.format != WeightFormat::kInt4);
    const size_t bytes = static_cast<size_t>(shape.num_layers * shape.num_blocks) *
                         CpuKvCache::Geometry(shape).block_bytes();
    auto buffer = Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    return std::make_unique<CpuKvCache>(*std::move(buffer), shape);
  }
  void WriteKv(Stream&, KvCache& cache, int64_t layer, const Tensor& k, const Tensor& v,
               const Tensor& slots_T) override {
    const auto& kv_cache = static_cast<const CpuKvCache&>(cache);
    const KvCacheShape& shape = kv_cache.shape();
    STRETTO_CHECK(k.cols == shape.num_kv_heads * shape.head_dim && SameShape(k, v));
    STRETTO_CHECK(IsFloat(k) && IsFloat(v) && IsInt(slots_T, k.rows));
    std::vector<cpu::KvWrite> writes;
    for (int64_t t = 0; t < k.rows; ++t) {
      const int32_t slot = cpu::Ints(slots_T)[t];
      STRETTO_CHECK(slot >= -1 && slot < shape.num_blocks * kBlockTokens);
      if (slot >= 0) writes.push_back({t, slot});
    }
    cpu::WriteKvRows(kernels_, pool_, kv_cache.Layer(layer), k, v, writes);
  }
  void CopyKvBlocks(Stream&, KvCache& cache, absl::Span<const int32_t> from,
                    absl::Span<const int32_t> to) override {
    const auto& kv_cache = static_cast<const CpuKvCache&>(cache);
    STRETTO_CHECK(from.size() == to.size());
    for (int64_t layer = 0; layer < kv_cache.shape().num_layers; ++layer) {
      const KvBlocks kv = kv_cache.Layer(layer);
      for (size_t i = 0; i < from.size(); ++i) {
        STRETTO_CHECK(from[i] >= 0 && from[i] < cache.num_blocks());
        STRETTO_CHECK(to[i] >= 0 && to[i] < cache.num_blocks());
        std::memmove(kv.At(to[i] * kv.block_elements()), kv.At(from[i] * kv.block_elements()),
                     kv.block_bytes());
      }
    }
  }
  void Attention(Stream&, const KvCache& cache, const PagedAttention& args) override {
    const auto& kv_cache = static_cast<const CpuKvCache&>(cache);
    CheckShape(args.shape);
    STRETTO_CHECK(args.shape.num_kv_heads == kv_cache.shape().num_kv_heads &&
                  args.shape.head_dim == kv_cache.shape().head_dim);
    STRETTO_CHECK(args.q.cols == args.shape.num_heads * args.shape.head_dim);
    STRETTO_CHECK(SameShape(args.q, args.out) && IsFloat(args.q) && IsFloat(args.out));
    STRETTO_CHECK(IsInt(args.row_sequence_T, args.q.rows) &&
                  IsInt(args.context_length_T, args.q.rows) &&
                  args.block_tables_SM.dtype == DType::kI32);
    cpu::AttendRuns(kernels_, pool_, args.shape, kv_cache.Layer(args.layer), args.out, args.q,
                    PagedRuns(args, cache.num_blocks()));
  }
  void Attention(Stream&, const PackedAttention& args) override {
    CheckPacked(args);
    STRETTO_CHECK(IsFloat(args.out));
    cpu::PackedAttentionForward(kernels_, pool_, allocator_, args);
  }
  void AttentionBackward(Stream&, const PackedAttentionBackward& args) override {
    CheckPacked(args.forward);
    STRETTO_CHECK(SameShape(args.d_out, args.forward.q) && SameShape(args.d_q, args.forward.q));
    STRETTO_CHECK(SameShape(args.d_k, args.forward.k) && SameShape(args.d_v, args.forward.v));
    STRETTO_CHECK(IsF32(args.d_out) && IsF32(args.d_q) && IsF32(args.d_k) && IsF32(args.d_v));
    cpu::PackedAttentionGradients(kernels_, pool_, args);
  }

  // --- vocabulary
  // ---------------------------------------------------------------------------------
  void LogProbs(Stream&, const Tensor& logprobs_T, const Tensor& entropy_T, const Tensor& logits_TV,
                const Tensor& targets_T, float temperature, const Tensor& stats_T3) override {
    STRETTO_CHECK(IsF32(logits_TV) && IsF32(logprobs_T) && IsInt(targets_T, logits_TV.rows));
    STRETTO_CHECK(logprobs_T.size() == logits_TV.rows && temperature > 0);
    STRETTO_CHECK(IsRowOrAbsent(entropy_T, logits_TV.rows));
    STRETTO_CHECK(!stats_T3 || IsStats(stats_T3, logits_TV.rows));
    cpu::ComputeLogProbs(kernels_, pool_,
                         {logprobs_T, entropy_T, logits_TV, targets_T, temperature, stats_T3});
  }
  void LogProbsBackward(Stream&, const LogitsGradient& args) override {
    const int64_t rows = args.logits_TV.rows;
    STRETTO_CHECK(IsF32(args.logits_TV) && IsF32(args.d_logprobs_T) && IsInt(args.targets_T, rows));
    STRETTO_CHECK(args.d_logprobs_T.size() == rows && args.temperature > 0);
    STRETTO_CHECK(IsRowOrAbsent(args.d_entropy_T, rows));
    STRETTO_CHECK(SameShape(args.d_logits_TV, args.logits_TV) && IsFloat(args.d_logits_TV) &&
                  args.d_logits_TV.handle == args.logits_TV.handle);
    STRETTO_CHECK(!args.stats_T3 || IsStats(args.stats_T3, rows));
    cpu::ComputeLogProbsBackward(kernels_, pool_, args);
  }
  void VocabularyMax(Stream&, const Tensor& max_T, const Tensor& logits_TV,
                     float temperature) override {
    STRETTO_CHECK(IsF32(logits_TV) && IsF32(max_T) && max_T.size() == logits_TV.rows);
    cpu::ComputeVocabularyMax(kernels_, pool_, max_T, logits_TV, temperature);
  }
  void VocabularySums(Stream&, const Tensor& sums_T3, const Tensor& logits_TV, const Tensor& max_T,
                      const Tensor& targets_T, int64_t first_id, float temperature) override {
    STRETTO_CHECK(IsF32(logits_TV) && IsF32(max_T) && max_T.size() == logits_TV.rows);
    STRETTO_CHECK(IsF32(sums_T3) && sums_T3.rows == logits_TV.rows && sums_T3.cols == 3);
    STRETTO_CHECK(IsInt(targets_T, logits_TV.rows));
    cpu::ComputeVocabularySums(kernels_, pool_,
                               {sums_T3, logits_TV, max_T, targets_T, first_id, temperature});
  }
  void VocabularyLogProbs(Stream&, const Tensor& logprobs_T, const Tensor& entropy_T,
                          const Tensor& sums_T3) override {
    STRETTO_CHECK(IsF32(sums_T3) && sums_T3.cols == 3 && logprobs_T.size() == sums_T3.rows);
    STRETTO_CHECK(IsF32(logprobs_T));
    STRETTO_CHECK(IsRowOrAbsent(entropy_T, sums_T3.rows));
    cpu::ComputeVocabularyLogProbs(kernels_, logprobs_T, entropy_T, sums_T3);
  }
  void VocabularyBackward(Stream&, const VocabularyGradient& args) override {
    const int64_t rows = args.logits_TV.rows;
    STRETTO_CHECK(IsF32(args.logits_TV) && IsF32(args.max_T) && args.max_T.size() == rows);
    STRETTO_CHECK(IsF32(args.sums_T3) && args.sums_T3.rows == rows && args.sums_T3.cols == 3);
    STRETTO_CHECK(IsInt(args.targets_T, rows) && IsF32(args.d_logprobs_T));
    STRETTO_CHECK(args.d_logprobs_T.size() == rows && args.temperature > 0);
    STRETTO_CHECK(IsRowOrAbsent(args.d_entropy_T, rows));
    cpu::ComputeVocabularyBackward(kernels_, pool_, args);
  }
  void Sample(Stream&, const Tensor& logits_BV, absl::Span<const SamplingRow> rows,
              absl::Span<Sampled> sampled) override {
    STRETTO_CHECK(IsF32(logits_BV) && logits_BV.cols > 0);
    STRETTO_CHECK(static_cast<int64_t>(rows.size()) == logits_BV.rows &&
                  sampled.size() == rows.size());
    pool_.ParallelFor(logits_BV.rows, [&](int64_t i) {
      sampled[i] = cpu::SampleRow(kernels_, cpu::F32Row(logits_BV, i), logits_BV.cols, rows[i]);
    });
  }

  // --- optimizer
  // ----------------------------------------------------------------------------------
  void AdamW(Stream&, const Tensor& weights, const Tensor& master, const Tensor& m, const Tensor& v,
             const Tensor& grad, const AdamWStep& step) override {
    STRETTO_CHECK(IsFloat(weights) && weights.contiguous() && step.step >= 1);
    for (const Tensor* t : {&master, &m, &v, &grad}) {
      STRETTO_CHECK(IsF32(*t) && t->contiguous() && t->size() == weights.size());
    }
    cpu::AdamWUpdate(kernels_, pool_, {weights, master, m, v, grad}, step);
  }
  double SquaredNorm(Stream&, const Tensor& x) override {
    STRETTO_CHECK(IsF32(x) && x.contiguous());
    return cpu::SumOfSquares(pool_, cpu::F32Row(x, 0), x.size());
  }
  void Scale(Stream&, const Tensor& x, float factor) override {
    STRETTO_CHECK(IsF32(x));
    cpu::ScaleRows(kernels_, pool_, x, factor);
  }

 private:
  void Gather(const Tensor& out, const Tensor& src, const Tensor& rows) {
    STRETTO_CHECK(out.cols == src.cols && IsInt(rows, out.rows) && IsFloat(out) && IsFloat(src));
    cpu::GatherRows(kernels_, pool_, out, src, rows);
  }
  void ScatterAdd(const Tensor& dst, const Tensor& src, const Tensor& rows) {
    STRETTO_CHECK(dst.cols == src.cols && IsInt(rows, src.rows) && IsF32(dst) && IsF32(src));
    cpu::ScatterAddRows(kernels_, pool_, dst, src, rows);
  }

  // Rows of one sequence whose contexts grow by one from row to row form a run.
  static std::vector<cpu::QueryRun> PagedRuns(const PagedAttention& args, int64_t num_blocks) {
    std::vector<cpu::QueryRun> runs;
    const int32_t* sequence = cpu::Ints(args.row_sequence_T);
    const int32_t* context = cpu::Ints(args.context_length_T);
    for (int64_t t = 0; t < args.q.rows; ++t) {
      const int64_t s = sequence[t], length = context[t];
      STRETTO_CHECK(s >= 0 && s < args.block_tables_SM.rows && length > 0);
      const int64_t needed = (length + kBlockTokens - 1) / kBlockTokens;
      STRETTO_CHECK(needed <= args.block_tables_SM.cols);
      const auto* blocks = static_cast<const int32_t*>(cpu::RowOf(args.block_tables_SM, s).data);
      const bool continues = t > 0 && sequence[t - 1] == s && context[t - 1] + 1 == length;
      const int64_t first_new = continues ? needed - 1 : 0;
      for (int64_t b = first_new; b < needed; ++b) {
        const bool seen = args.shape.sliding_window == 0 ||
                          (b + 1) * kBlockTokens > length - args.shape.sliding_window;
        STRETTO_CHECK(!seen || (blocks[b] >= 0 && blocks[b] < num_blocks));
      }
      if (continues) {
        ++runs.back().num_rows;
      } else {
        runs.push_back({t, 1, length, blocks});
      }
    }
    return runs;
  }

  const cpu::Kernels kernels_;
  cpu::ThreadPool pool_;
  BlockAllocator allocator_;
};
}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(const DeviceOptions& options,
                                                        std::optional<cpu::InstructionSet> set) {
  if (options.num_threads < 0 || options.num_threads > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: num_threads is ", options.num_threads, "; expected 0 (all) to 1024"));
  }
  const cpu::InstructionSet chosen = set.value_or(cpu::BestInstructionSet());
  if (!cpu::Available(chosen)) {
    return absl::UnavailableError("device: this machine lacks the requested instruction set");
  }
  const int threads = options.num_threads == 0 ? cpu::AvailableProcessors() : options.num_threads;
  return std::make_unique<CpuDevice>(cpu::SelectKernels(chosen, options.allow_fma, options.exact),
                                     threads);
}
}  // namespace stretto::engine
