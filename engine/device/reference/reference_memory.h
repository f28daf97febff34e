// How the reference backend reads and writes tensors: rows come and go as vectors of float. A
// handle is an address marked in its upper 16 bits, which makes it no valid pointer.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/bfloat16.h"
#include "engine/device/device.h"

namespace stretto::engine::reference {
using Row = std::vector<float>;

inline constexpr uint64_t kMark = uint64_t{0xA5F0} << 48;

inline uint64_t ToHandle(const void* address) {
  return reinterpret_cast<uint64_t>(address) ^ kMark;
}
template <class T>
T* Address(const Tensor& t, int64_t row = 0) {
  STRETTO_CHECK_MSG((t.handle & kMark) == kMark, "not a handle of the reference device");
  STRETTO_CHECK(sizeof(T) == SizeOf(t.dtype) || sizeof(T) == 1);
  return reinterpret_cast<T*>((t.handle ^ kMark) +
                              static_cast<uint64_t>(row * t.row_stride) * SizeOf(t.dtype));
}

inline float Round(float value, DType dtype) {
  return dtype == DType::kBF16 ? Bf16ToF32(F32ToBf16(value)) : value;
}

inline Row LoadRow(const Tensor& t, int64_t row) {
  STRETTO_CHECK(row >= 0 && row < t.rows);
  Row values(t.cols);
  if (t.dtype == DType::kBF16) {
    const auto* p = Address<uint16_t>(t, row);
    for (int64_t i = 0; i < t.cols; ++i) values[i] = Bf16ToF32(p[i]);
  } else {
    STRETTO_CHECK(t.dtype == DType::kF32);
    std::memcpy(values.data(), Address<float>(t, row), t.cols * sizeof(float));
  }
  return values;
}

inline void StoreRow(const Tensor& t, int64_t row, const Row& values) {
  STRETTO_CHECK(row >= 0 && row < t.rows && static_cast<int64_t>(values.size()) == t.cols);
  if (t.dtype == DType::kBF16) {
    auto* p = Address<uint16_t>(t, row);
    for (int64_t i = 0; i < t.cols; ++i) p[i] = F32ToBf16(values[i]);
  } else {
    STRETTO_CHECK(t.dtype == DType::kF32);
    std::memcpy(Address<float>(t, row), values.data(), t.cols * sizeof(float));
  }
}

// All rows, one after another.
inline Row LoadAll(const Tensor& t) {
  Row all;
  all.reserve(t.size());
  for (int64_t r = 0; r < t.rows; ++r) {
    const Row row = LoadRow(t, r);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

inline std::vector<int32_t> LoadInts(const Tensor& t) {
  STRETTO_CHECK(t.dtype == DType::kI32 && t.contiguous());
  const auto* p = Address<int32_t>(t);
  return {p, p + t.size()};
}

inline void CheckSameShape(const Tensor& a, const Tensor& b) {
  STRETTO_CHECK(a.rows == b.rows && a.cols == b.cols);
}

// The sum of a row in the order of device.h. `first` is the index of values[0] in the row.
template <class F>
float OrderedSum(int64_t first, int64_t count, F value) {
  std::array<float, 16> partial{};
  for (int64_t i = 0; i < count; ++i) partial[(first + i) % 16] += value(i);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  return partial[0];
}

// One step of a chain of products: fused unless the profile forbids it.
struct Chain {
  bool fused = true;
  float operator()(float a, float b, float sum) const {
    return fused ? std::fma(a, b, sum) : a * b + sum;
  }
};

class ReferenceKvCache final : public KvCache {
 public:
  explicit ReferenceKvCache(const KvCacheShape& shape)
      : shape_(shape),
        k_(shape.num_blocks * block_size(), NAN),
        v_(shape.num_blocks * block_size(), NAN) {
    if (shape.format == WeightFormat::kPlain) return;
    k_scale_.resize(k_.size() / static_cast<size_t>(shape.head_dim), NAN);
    v_scale_ = k_scale_;
  }
  int64_t num_blocks() const override { return shape_.num_blocks; }
  size_t bytes() const override {
    return (k_.size() + v_.size() + k_scale_.size() + v_scale_.size()) * sizeof(float);
  }
  const KvCacheShape& shape() const { return shape_; }
  int64_t block_size() const { return shape_.num_layers * kBlockTokens * token_size(); }
  int64_t head_dim() const { return shape_.head_dim; }
  int64_t token_size() const { return shape_.num_kv_heads * shape_.head_dim; }
  // Offset of a token's keys (or values) of one layer.
  int64_t Offset(int64_t layer, int64_t slot) const {
    const int64_t block = slot / kBlockTokens, in_block = slot % kBlockTokens;
    STRETTO_CHECK(block >= 0 && block < shape_.num_blocks && layer < shape_.num_layers);
    return block * block_size() + (layer * kBlockTokens + in_block) * token_size();
  }
  // Keys (or values) of one token from Offset(…) on, all heads, where a quantised cache has the
  // stored values; and its scales from Offset(…) / head_dim on, one for each head.
  Row& k() { return k_; }
  Row& v() { return v_; }
  Row& k_scale() { return k_scale_; }
  Row& v_scale() { return v_scale_; }
  const Row& k() const { return k_; }
  const Row& v() const { return v_; }
  const Row& k_scale() const { return k_scale_; }
  const Row& v_scale() const { return v_scale_; }

 private:
  KvCacheShape shape_;
  Row k_, v_;
  Row k_scale_, v_scale_;  // empty unless quantised
};

// The bodies of the larger operations, in files of their own.
void PagedForward(const Chain& chain, const ReferenceKvCache& cache, const PagedAttention& args);
void PackedForward(const Chain& chain, const PackedAttention& args);
void PackedBackward(const PackedAttentionBackward& args);
void LogProbsForward(const Tensor& logprobs_T, const Tensor& entropy_T, const Tensor& logits_TV,
                     const Tensor& targets_T, float temperature, const Tensor& stats_T3);
void LogProbsGradient(const Device::LogitsGradient& args);
void VocabularyMaxOf(const Tensor& max_T, const Tensor& logits_TV, float temperature);
void VocabularySumsOf(const Tensor& sums_T3, const Tensor& logits_TV, const Tensor& max_T,
                      const Tensor& targets_T, int64_t first_id, float temperature);
void VocabularyLogProbsOf(const Tensor& logprobs_T, const Tensor& entropy_T, const Tensor& sums_T3);
void VocabularyGradientOf(const Device::VocabularyGradient& args);
void SampleRows(const Tensor& logits_BV, absl::Span<const SamplingRow> rows,
                absl::Span<Sampled> sampled);
}  // namespace stretto::engine::reference
