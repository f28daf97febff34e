#include "engine/device/reference/reference_device.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "base/status.h"
#include "engine/device/reference/reference_memory.h"

namespace stretto::engine {
namespace {
using namespace reference;  // NOLINT(google-build-using-namespace): this backend's own helpers

class ReferenceWeight final : public PackedWeight {
 public:
  ReferenceWeight(int64_t n, int64_t k, WeightFormat format) : n_(n), k_(k), format_(format) {}
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  size_t bytes() const override { return values.size() * sizeof(float); }
  WeightFormat format() const override { return format_; }
  // Row n as it is multiplied; of int8 and fp8 the finished chain is multiplied by its scale.
  void AddRow(const float* w);
  Row values, scales;

 private:
  int64_t n_, k_;
  WeightFormat format_;
};

void ReferenceWeight::AddRow(const float* w) {
  std::vector<int8_t> q(k_);
  switch (format_) {
    case WeightFormat::kPlain:
      values.insert(values.end(), w, w + k_);
      return;
    case WeightFormat::kInt8:
      scales.push_back(QuantizeInt8(w, k_, q.data()));
      for (const int8_t x : q) values.push_back(x);
      return;
    case WeightFormat::kFp8:
      scales.push_back(QuantizeFp8(w, k_, q.data()));
      for (const int8_t x : q) values.push_back(Fp8ToF32(x));
      return;
    case WeightFormat::kInt4:
      for (int64_t begin = 0; begin < k_; begin += kInt4Group) {
        const int64_t count = std::min(kInt4Group, k_ - begin);
        const float scale = Bf16ToF32(QuantizeInt4Group(w + begin, count, q.data()));
        for (int64_t i = 0; i < count; ++i) values.push_back(scale * static_cast<float>(q[i]));
      }
      return;
  }
}

// One token's keys or values, all heads, as a quantised cache has them.
void StoreQuantized(const KvCacheShape& shape, const Row& row, float* values, float* scales) {
  std::vector<int8_t> q(static_cast<size_t>(shape.head_dim));
  for (int64_t g = 0; g < shape.num_kv_heads; ++g) {
    const int64_t begin = g * shape.head_dim;
    scales[g] = QuantizeKv(shape.format, &row[begin], shape.head_dim, q.data());
    for (int64_t c = 0; c < shape.head_dim; ++c) {
      values[begin + c] =
          shape.format == WeightFormat::kInt8 ? static_cast<float>(q[c]) : Fp8ToF32(q[c]);
    }
  }
}

class ReferenceDevice final : public Device {
 public:
  explicit ReferenceDevice(const DeviceOptions& options) : chain_{options.allow_fma} {}
  NumericProfile Profile(DType dtype) const override {
    return {"reference", chain_.fused ? "fma" : "nofma", dtype, 1};
  }
  int num_threads() const override { return 1; }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    return AllocateFilled(bytes, 0xff);  // NaN as f32 and as bf16
  }
  absl::StatusOr<Buffer> AllocateZeros(size_t bytes) override { return AllocateFilled(bytes, 0); }
  absl::StatusOr<Buffer> AllocateFilled(size_t bytes, int byte) {
    const size_t rounded = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    void* address = std::aligned_alloc(64, rounded);
    if (address == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("reference device: no ", bytes, " bytes"));
    }
    std::memset(address, byte, rounded);
    return Buffer(this, ToHandle(address), bytes);
  }
  void Free(uint64_t handle, size_t) override {
    std::free(reinterpret_cast<void*>(handle ^ kMark));
  }
  std::unique_ptr<Stream> CreateStream() override { return std::make_unique<Stream>(); }
  void Synchronize(Stream&) override {}
  void Upload(Stream&, const Tensor& dst, const void* src) override {
    const size_t row_bytes = dst.cols * SizeOf(dst.dtype);
    for (int64_t r = 0; r < dst.rows; ++r) {
      std::memcpy(Address<char>(dst, r), static_cast<const char*>(src) + r * row_bytes, row_bytes);
    }
  }
  void Download(Stream&, const Tensor& src, void* dst) override {
    const size_t row_bytes = src.cols * SizeOf(src.dtype);
    for (int64_t r = 0; r < src.rows; ++r) {
      std::memcpy(static_cast<char*>(dst) + r * row_bytes, Address<char>(src, r), row_bytes);
    }
  }
  void Copy(Stream&, const Tensor& dst, const Tensor& src) override {
    CheckSameShape(dst, src);
    for (int64_t r = 0; r < dst.rows; ++r) {
      if (dst.dtype == src.dtype) {
        std::memmove(Address<char>(dst, r), Address<char>(src, r), dst.cols * SizeOf(dst.dtype));
      } else {
        StoreRow(dst, r, LoadRow(src, r));
      }
    }
  }
  void Fill(Stream&, const Tensor& dst, float value) override {
    for (int64_t r = 0; r < dst.rows; ++r) StoreRow(dst, r, Row(dst.cols, value));
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Stream& stream,
                                                     absl::Span<const Tensor> parts_NK,
                                                     WeightFormat format) override {
    STRETTO_CHECK(!parts_NK.empty());
    int64_t n = 0;
    for (const Tensor& part : parts_NK) n += part.rows;
    auto weight = std::make_unique<ReferenceWeight>(n, parts_NK[0].cols, format);
    Repack(stream, *weight, parts_NK);
    return weight;
  }
  void Repack(Stream&, PackedWeight& weight, absl::Span<const Tensor> parts_NK) override {
    auto& w = static_cast<ReferenceWeight&>(weight);
    w.values.clear();
    w.scales.clear();
    for (const Tensor& part : parts_NK) {
      STRETTO_CHECK(part.cols == w.k());
      for (int64_t r = 0; r < part.rows; ++r) w.AddRow(LoadRow(part, r).data());
    }
    STRETTO_CHECK(static_cast<int64_t>(w.values.size()) == w.n() * w.k());
  }
  void Linear(Stream&, const Tensor& out_TN, const Tensor& x_TK, const PackedWeight& weight,
              const Tensor& bias_N) override {
    const auto& w = static_cast<const ReferenceWeight&>(weight);
    const int64_t N = w.n(), K = w.k();
    STRETTO_CHECK(x_TK.cols == K && out_TN.cols == N && out_TN.rows == x_TK.rows);
    const Row bias = bias_N ? LoadRow(bias_N, 0) : Row();
    STRETTO_CHECK(bias.empty() || static_cast<int64_t>(bias.size()) == N);
    for (int64_t t = 0; t < x_TK.rows; ++t) {
      const Row x = LoadRow(x_TK, t);
      Row out(N);
      for (int64_t n = 0; n < N; ++n) {
        float sum = 0;
        for (int64_t k = 0; k < K; ++k) sum = chain_(x[k], w.values[n * K + k], sum);
        if (!w.scales.empty()) sum *= w.scales[n];
        out[n] = bias.empty() ? sum : sum + bias[n];
      }
      StoreRow(out_TN, t, out);
    }
  }
  void LinearBackwardInput(Stream&, const Tensor& d_x_TK, const Tensor& d_y_TN, const Tensor& w_NK,
                           bool accumulate) override {
    STRETTO_CHECK(d_x_TK.cols == w_NK.cols && d_y_TN.cols == w_NK.rows);
    STRETTO_CHECK(d_x_TK.rows == d_y_TN.rows);
    const Row w = LoadAll(w_NK);
    const int64_t N = w_NK.rows, K = w_NK.cols;
    for (int64_t t = 0; t < d_y_TN.rows; ++t) {
      const Row d_y = LoadRow(d_y_TN, t);
      Row d_x = accumulate ? LoadRow(d_x_TK, t) : Row(K, 0.0f);
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t k = 0; k < K; ++k) d_x[k] = chain_(d_y[n], w[n * K + k], d_x[k]);
      }
      StoreRow(d_x_TK, t, d_x);
    }
  }
  void LinearBackwardWeight(Stream&, const Tensor& d_w_NK, const Tensor& d_y_TN,
                            const Tensor& x_TK) override {
    STRETTO_CHECK(d_w_NK.rows == d_y_TN.cols && d_w_NK.cols == x_TK.cols);
    STRETTO_CHECK(d_y_TN.rows == x_TK.rows);
    const Row d_y = LoadAll(d_y_TN), x = LoadAll(x_TK);
    const int64_t N = d_w_NK.rows, K = d_w_NK.cols;
    for (int64_t n = 0; n < N; ++n) {
      Row d_w = LoadRow(d_w_NK, n);
      for (int64_t t = 0; t < x_TK.rows; ++t) {
        for (int64_t k = 0; k < K; ++k) d_w[k] = chain_(d_y[t * N + n], x[t * K + k], d_w[k]);
      }
      StoreRow(d_w_NK, n, d_w);
    }
  }
  void BiasBackward(Stream&, const Tensor& d_b_N, const Tensor& d_y_TN) override {
    Row d_b = LoadRow(d_b_N, 0);
    for (int64_t t = 0; t < d_y_TN.rows; ++t) AddTo(d_b, LoadRow(d_y_TN, t));
    StoreRow(d_b_N, 0, d_b);
  }

  void Embedding(Stream& stream, const Tensor& out_TD, const Tensor& table_VD,
                 const Tensor& ids_T) override {
    GatherRows(stream, out_TD, table_VD, ids_T);
  }
  void EmbeddingBackward(Stream& stream, const Tensor& d_table_VD, const Tensor& d_out_TD,
                         const Tensor& ids_T) override {
    ScatterAddRows(stream, d_table_VD, d_out_TD, ids_T);
  }
  void GatherRows(Stream&, const Tensor& out_ND, const Tensor& src_TD,
                  const Tensor& rows_N) override {
    const auto rows = LoadInts(rows_N);
    STRETTO_CHECK(static_cast<int64_t>(rows.size()) == out_ND.rows);
    for (size_t i = 0; i < rows.size(); ++i) StoreRow(out_ND, i, LoadRow(src_TD, rows[i]));
  }
  void ScatterAddRows(Stream&, const Tensor& dst_TD, const Tensor& src_ND,
                      const Tensor& rows_N) override {
    const auto rows = LoadInts(rows_N);
    STRETTO_CHECK(static_cast<int64_t>(rows.size()) == src_ND.rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      Row sum = LoadRow(dst_TD, rows[i]);
      AddTo(sum, LoadRow(src_ND, i));
      StoreRow(dst_TD, rows[i], sum);
    }
  }
  void Add(Stream&, const Tensor& out, const Tensor& a, const Tensor& b) override {
    CheckSameShape(a, b);
    CheckSameShape(out, a);
    for (int64_t t = 0; t < out.rows; ++t) {
      Row sum = LoadRow(a, t);
      AddTo(sum, LoadRow(b, t));
      StoreRow(out, t, sum);
    }
  }
  void RmsNorm(Stream&, const Tensor& out, const Tensor& x, const Tensor& weight, float eps,
               int64_t num_groups) override {
    CheckSameShape(out, x);
    const Row w = LoadRow(weight, 0);
    const int64_t width = x.cols / num_groups;
    STRETTO_CHECK(static_cast<int64_t>(w.size()) == width && x.cols % num_groups == 0);
    for (int64_t t = 0; t < x.rows; ++t) {
      Row row = LoadRow(x, t);
      for (int64_t g = 0; g < num_groups; ++g) {
        float* y = &row[g * width];
        const float scale = InverseRms(y, width, eps);
        for (int64_t i = 0; i < width; ++i) y[i] = Round(y[i] * scale, x.dtype) * w[i];
      }
      StoreRow(out, t, row);
    }
  }
  // With r = 1/rms, n = x r and g = d_out · weight: d_x = r (g − n mean(g n)); d_weight += d_out n.
  void RmsNormBackward(Stream&, const Tensor& d_x, const Tensor& d_weight, const Tensor& d_out,
                       const Tensor& x, const Tensor& weight, float eps, int64_t num_groups,
                       bool accumulate) override {
    CheckSameShape(d_x, x);
    CheckSameShape(d_out, x);
    const Row w = LoadRow(weight, 0);
    Row d_w = LoadRow(d_weight, 0);
    const int64_t width = x.cols / num_groups;
    STRETTO_CHECK(static_cast<int64_t>(w.size()) == width && w.size() == d_w.size());
    for (int64_t t = 0; t < x.rows; ++t) {
      const Row in = LoadRow(x, t), d_o = LoadRow(d_out, t);
      Row d_in = accumulate ? LoadRow(d_x, t) : Row(x.cols, 0.0f);
      for (int64_t at = 0; at < x.cols; at += width) {
        const float scale = InverseRms(&in[at], width, eps);
        const float mean =
            OrderedSum(0, width,
                       [&](int64_t i) { return d_o[at + i] * w[i] * (in[at + i] * scale); }) /
            static_cast<float>(width);
        for (int64_t i = 0; i < width; ++i) {
          const float n = in[at + i] * scale;
          d_in[at + i] += scale * (d_o[at + i] * w[i] - n * mean);
          d_w[i] += d_o[at + i] * n;
        }
      }
      StoreRow(d_x, t, d_in);
    }
    StoreRow(d_weight, 0, d_w);
  }
  void Rope(Stream&, const Tensor& x, const Tensor& positions_T, const Tensor& cos_PC,
            const Tensor& sin_PC, int64_t num_heads, bool inverse) override {
    const auto positions = LoadInts(positions_T);
    const int64_t head_dim = x.cols / num_heads, half = head_dim / 2;
    STRETTO_CHECK(static_cast<int64_t>(positions.size()) == x.rows && cos_PC.cols == half);
    for (int64_t t = 0; t < x.rows; ++t) {
      Row row = LoadRow(x, t);
      const Row cos = LoadRow(cos_PC, positions[t]), sin = LoadRow(sin_PC, positions[t]);
      for (int64_t h = 0; h < num_heads; ++h) {
        for (int64_t i = 0; i < half; ++i) {
          float& a = row[h * head_dim + i];
          float& b = row[h * head_dim + half + i];
          const float s = inverse ? -sin[i] : sin[i];
          const float turned = a * cos[i] - b * s;
          b = b * cos[i] + a * s;
          a = turned;
        }
      }
      StoreRow(x, t, row);
    }
  }
  void SwiGlu(Stream&, const Tensor& out_TF, const Tensor& gate_up_T2F) override {
    const int64_t F = out_TF.cols;
    STRETTO_CHECK(gate_up_T2F.cols == 2 * F && gate_up_T2F.rows == out_TF.rows);
    for (int64_t t = 0; t < out_TF.rows; ++t) {
      const Row in = LoadRow(gate_up_T2F, t);
      Row out(F);
      for (int64_t i = 0; i < F; ++i) out[i] = in[i] / (1.0f + std::exp(-in[i])) * in[F + i];
      StoreRow(out_TF, t, out);
    }
  }
  void SwiGluBackward(Stream& stream, const Tensor& d_gate_up_T2F, const Tensor& out_TF,
                      const Tensor& d_out_TF, const Tensor& gate_up_T2F) override {
    const int64_t F = d_out_TF.cols;
    if (out_TF) SwiGlu(stream, out_TF, gate_up_T2F);
    CheckSameShape(d_gate_up_T2F, gate_up_T2F);
    STRETTO_CHECK(gate_up_T2F.cols == 2 * F && gate_up_T2F.rows == d_out_TF.rows);
    for (int64_t t = 0; t < d_out_TF.rows; ++t) {
      const Row in = LoadRow(gate_up_T2F, t), d_out = LoadRow(d_out_TF, t);
      Row d_in(2 * F);
      for (int64_t i = 0; i < F; ++i) {
        const float sigmoid = 1.0f / (1.0f + std::exp(-in[i]));
        d_in[i] = d_out[i] * in[F + i] * sigmoid * (1.0f + in[i] * (1.0f - sigmoid));
        d_in[F + i] = d_out[i] * in[i] * sigmoid;
      }
      StoreRow(d_gate_up_T2F, t, d_in);
    }
  }

  absl::StatusOr<std::unique_ptr<KvCache>> AllocateKvCache(const KvCacheShape& shape) override {
    return std::make_unique<ReferenceKvCache>(shape);
  }
  void WriteKv(Stream&, KvCache& cache, int64_t layer, const Tensor& k, const Tensor& v,
               const Tensor& slots_T) override {
    auto& kv = static_cast<ReferenceKvCache&>(cache);
    const auto slots = LoadInts(slots_T);
    STRETTO_CHECK(static_cast<int64_t>(slots.size()) == k.rows && k.cols == kv.token_size());
    for (int64_t t = 0; t < k.rows; ++t) {
      if (slots[t] < 0) continue;
      const Row k_row = LoadRow(k, t), v_row = LoadRow(v, t);
      const int64_t offset = kv.Offset(layer, slots[t]);
      if (kv.shape().format != WeightFormat::kPlain) {
        StoreQuantized(kv.shape(), k_row, &kv.k()[offset], &kv.k_scale()[offset / kv.head_dim()]);
        StoreQuantized(kv.shape(), v_row, &kv.v()[offset], &kv.v_scale()[offset / kv.head_dim()]);
        continue;
      }
      for (int64_t i = 0; i < k.cols; ++i) {
        kv.k()[offset + i] = Round(k_row[i], kv.shape().dtype);
        kv.v()[offset + i] = Round(v_row[i], kv.shape().dtype);
      }
    }
  }
  void CopyKvBlocks(Stream&, KvCache& cache, absl::Span<const int32_t> from,
                    absl::Span<const int32_t> to) override {
    auto& kv = static_cast<ReferenceKvCache&>(cache);
    STRETTO_CHECK(from.size() == to.size());
    for (size_t i = 0; i < from.size(); ++i) {
      for (Row* values : {&kv.k(), &kv.v(), &kv.k_scale(), &kv.v_scale()}) {
        const auto size = static_cast<int64_t>(values->size()) / kv.num_blocks();
        std::copy_n(values->begin() + from[i] * size, size, values->begin() + to[i] * size);
      }
    }
  }
  void Attention(Stream&, const KvCache& cache, const PagedAttention& args) override {
    PagedForward(chain_, static_cast<const ReferenceKvCache&>(cache), args);
  }
  void Attention(Stream&, const PackedAttention& args) override { PackedForward(chain_, args); }
  void AttentionBackward(Stream&, const PackedAttentionBackward& args) override {
    PackedBackward(args);
  }

  void LogProbs(Stream&, const Tensor& logprobs_T, const Tensor& entropy_T, const Tensor& logits_TV,
                const Tensor& targets_T, float temperature, const Tensor& stats_T3) override {
    LogProbsForward(logprobs_T, entropy_T, logits_TV, targets_T, temperature, stats_T3);
  }
  void LogProbsBackward(Stream&, const LogitsGradient& args) override { LogProbsGradient(args); }
  void VocabularyMax(Stream&, const Tensor& max_T, const Tensor& logits_TV,
                     float temperature) override {
    VocabularyMaxOf(max_T, logits_TV, temperature);
  }
  void VocabularySums(Stream&, const Tensor& sums_T3, const Tensor& logits_TV, const Tensor& max_T,
                      const Tensor& targets_T, int64_t first_id, float temperature) override {
    VocabularySumsOf(sums_T3, logits_TV, max_T, targets_T, first_id, temperature);
  }
  void VocabularyLogProbs(Stream&, const Tensor& logprobs_T, const Tensor& entropy_T,
                          const Tensor& sums_T3) override {
    VocabularyLogProbsOf(logprobs_T, entropy_T, sums_T3);
  }
  void VocabularyBackward(Stream&, const VocabularyGradient& args) override {
    VocabularyGradientOf(args);
  }
  void Sample(Stream&, const Tensor& logits_BV, absl::Span<const SamplingRow> rows,
              absl::Span<Sampled> sampled) override {
    SampleRows(logits_BV, rows, sampled);
  }

  // m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²; master −= lr (m̂ / (√v̂ + ε) + λ master), hats:
  // bias-corrected.
  void AdamW(Stream&, const Tensor& weights, const Tensor& master, const Tensor& m, const Tensor& v,
             const Tensor& grad, const AdamWStep& step) override {
    const auto steps = static_cast<double>(step.step);
    const auto correction1 = static_cast<float>(1.0 - std::pow(double{step.beta1}, steps));
    const auto correction2 = static_cast<float>(1.0 - std::pow(double{step.beta2}, steps));
    for (int64_t r = 0; r < master.rows; ++r) {
      Row w = LoadRow(master, r), m_r = LoadRow(m, r), v_r = LoadRow(v, r);
      const Row g_r = LoadRow(grad, r);
      for (size_t i = 0; i < w.size(); ++i) {
        const float g = g_r[i] * step.grad_scale;
        m_r[i] = step.beta1 * m_r[i] + (1.0f - step.beta1) * g;
        v_r[i] = step.beta2 * v_r[i] + (1.0f - step.beta2) * g * g;
        const float update = m_r[i] / correction1 / (std::sqrt(v_r[i] / correction2) + step.eps);
        w[i] -= step.lr * (update + step.weight_decay * w[i]);
      }
      StoreRow(master, r, w);
      StoreRow(m, r, m_r);
      StoreRow(v, r, v_r);
      StoreRow(weights, r, w);
    }
  }
  double SquaredNorm(Stream&, const Tensor& x) override {
    const Row values = LoadAll(x);
    double total = 0;
    for (size_t begin = 0; begin < values.size(); begin += 4096) {
      double block = 0;
      for (size_t i = begin; i < std::min(begin + 4096, values.size()); ++i) {
        block += static_cast<double>(values[i]) * values[i];
      }
      total += block;
    }
    return total;
  }
  void Scale(Stream&, const Tensor& x, float factor) override {
    for (int64_t r = 0; r < x.rows; ++r) {
      Row row = LoadRow(x, r);
      for (float& value : row) value *= factor;
      StoreRow(x, r, row);
    }
  }

 private:
  static void AddTo(Row& sum, const Row& other) {
    STRETTO_CHECK(sum.size() == other.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
  }
  static float InverseRms(const float* x, int64_t width, float eps) {
    const float sum = OrderedSum(0, width, [&](int64_t i) { return x[i] * x[i]; });
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  }

  Chain chain_;
};
}  // namespace

std::unique_ptr<Device> CreateReferenceDevice(const DeviceOptions& options) {
  return std::make_unique<ReferenceDevice>(options);
}
}  // namespace stretto::engine
