// Attention of the reference backend. Paged and packed forms share one body that asks for the keys
// and values of a logical position.
#include <algorithm>
#include <functional>

#include "engine/device/reference/reference_memory.h"

namespace stretto::engine::reference {
namespace {
struct KeyValue {
  const float* k;  // [G*C] of one position
  const float* v;
  const float* k_scale = nullptr;  // [G] of a quantised cache
  const float* v_scale = nullptr;
};
using Lookup = std::function<KeyValue(int64_t position)>;

// Softmax weights of one query head over positions [first, first + count): exp(s - max), their sum.
struct Weights {
  int64_t first = 0;
  Row p;
  float sum = 0;
};

Weights SoftmaxWeights(const Chain& chain, const AttentionShape& shape, const float* q,
                       int64_t kv_offset, int64_t context, const Lookup& lookup) {
  Weights w;
  const int64_t g = kv_offset / shape.head_dim;
  if (shape.sliding_window > 0) w.first = std::max<int64_t>(0, context - shape.sliding_window);
  const int64_t count = context - w.first;
  w.p.resize(count);
  for (int64_t j = 0; j < count; ++j) {
    const KeyValue kv = lookup(w.first + j);
    const float* k = kv.k + kv_offset;
    float dot = 0;
    for (int64_t c = 0; c < shape.head_dim; ++c) dot = chain(q[c], k[c], dot);
    if (kv.k_scale != nullptr) dot *= kv.k_scale[g];
    w.p[j] = shape.scale * dot;
  }
  const float max = *std::max_element(w.p.begin(), w.p.end());
  for (float& p : w.p) p = std::exp(p - max);
  w.sum = OrderedSum(w.first, count, [&](int64_t j) { return w.p[j]; });
  return w;
}

Row AttendRow(const Chain& chain, const AttentionShape& shape, const Row& q, int64_t context,
              const Lookup& lookup) {
  const int64_t C = shape.head_dim, heads_per_kv = shape.num_heads / shape.num_kv_heads;
  Row out(q.size(), 0.0f);
  for (int64_t h = 0; h < shape.num_heads; ++h) {
    const int64_t kv_offset = h / heads_per_kv * C;
    const Weights w = SoftmaxWeights(chain, shape, &q[h * C], kv_offset, context, lookup);
    float* o = &out[h * C];
    for (int64_t j = 0; j < static_cast<int64_t>(w.p.size()); ++j) {
      const KeyValue kv = lookup(w.first + j);
      const float* v = kv.v + kv_offset;
      const float p = kv.v_scale == nullptr ? w.p[j] : w.p[j] * kv.v_scale[kv_offset / C];
      for (int64_t c = 0; c < C; ++c) o[c] = chain(p, v[c], o[c]);
    }
    for (int64_t c = 0; c < C; ++c) o[c] /= w.sum;
  }
  return out;
}

// The row of every position that the last row of `segment` sees.
std::vector<int64_t> PositionRows(const SegmentTable& segments, int64_t segment) {
  std::vector<int64_t> path;
  for (int64_t s = segment; s >= 0; s = segments.parent[s]) path.push_back(s);
  std::vector<int64_t> rows;
  for (auto s = path.rbegin(); s != path.rend(); ++s) {
    for (int32_t i = 0; i < segments.num_rows[*s]; ++i) rows.push_back(segments.row_begin[*s] + i);
  }
  return rows;
}

void CheckPacked(const PackedAttention& args) {
  const AttentionShape& s = args.shape;
  STRETTO_CHECK(args.segments != nullptr && s.num_heads % s.num_kv_heads == 0);
  STRETTO_CHECK(args.q.cols == s.num_heads * s.head_dim);
  STRETTO_CHECK(args.k.cols == s.num_kv_heads * s.head_dim);
  CheckSameShape(args.out, args.q);
  CheckSameShape(args.k, args.v);
  STRETTO_CHECK(args.k.rows == args.q.rows);
}
}  // namespace

void PagedForward(const Chain& chain, const ReferenceKvCache& cache, const PagedAttention& args) {
  const auto sequence_T = LoadInts(args.row_sequence_T);
  const auto context_T = LoadInts(args.context_length_T);
  const auto tables_SM = LoadInts(args.block_tables_SM);
  CheckSameShape(args.out, args.q);
  STRETTO_CHECK(static_cast<int64_t>(sequence_T.size()) == args.q.rows);
  STRETTO_CHECK(static_cast<int64_t>(context_T.size()) == args.q.rows);
  for (int64_t t = 0; t < args.q.rows; ++t) {
    const int32_t* table = &tables_SM[sequence_T[t] * args.block_tables_SM.cols];
    const Lookup lookup = [&](int64_t j) {
      const int64_t slot = int64_t{table[j / kBlockTokens]} * kBlockTokens + j % kBlockTokens;
      const int64_t offset = cache.Offset(args.layer, slot);
      KeyValue kv{&cache.k()[offset], &cache.v()[offset]};
      if (cache.shape().format != WeightFormat::kPlain) {
        kv.k_scale = &cache.k_scale()[offset / args.shape.head_dim];
        kv.v_scale = &cache.v_scale()[offset / args.shape.head_dim];
      }
      return kv;
    };
    StoreRow(args.out, t, AttendRow(chain, args.shape, LoadRow(args.q, t), context_T[t], lookup));
  }
}

void PackedForward(const Chain& chain, const PackedAttention& args) {
  CheckPacked(args);
  const SegmentTable& segments = *args.segments;
  const Row k = LoadAll(args.k), v = LoadAll(args.v);
  for (int64_t s = 0; s < segments.num_segments(); ++s) {
    const auto rows = PositionRows(segments, s);
    const Lookup lookup = [&](int64_t j) {
      return KeyValue{&k[rows[j] * args.k.cols], &v[rows[j] * args.k.cols]};
    };
    const int64_t start = segments.StartPosition(s);
    for (int64_t j = start; j < static_cast<int64_t>(rows.size()); ++j) {
      StoreRow(args.out, rows[j],
               AttendRow(chain, args.shape, LoadRow(args.q, rows[j]), j + 1, lookup));
    }
  }
}

// With P = p / sum, O = sum_j P_j v_j and D = d_O·O = sum_j P_j (d_O·v_j):
//   d_v_j += P_j d_O;  d_s_j = P_j (d_O·v_j − D);  d_q += scale d_s_j k_j;  d_k_j += scale d_s_j q.
void PackedBackward(const PackedAttentionBackward& args) {
  const PackedAttention& fwd = args.forward;
  CheckPacked(fwd);
  const AttentionShape& shape = fwd.shape;
  const SegmentTable& segments = *fwd.segments;
  const int64_t C = shape.head_dim, heads_per_kv = shape.num_heads / shape.num_kv_heads;
  const int64_t kv_cols = fwd.k.cols;
  const Row k = LoadAll(fwd.k), v = LoadAll(fwd.v);
  Row d_k(k.size(), 0.0f), d_v(v.size(), 0.0f);
  for (int64_t s = 0; s < segments.num_segments(); ++s) {
    const auto rows = PositionRows(segments, s);
    const Lookup lookup = [&](int64_t j) {
      return KeyValue{&k[rows[j] * kv_cols], &v[rows[j] * kv_cols]};
    };
    for (int64_t t = segments.StartPosition(s); t < static_cast<int64_t>(rows.size()); ++t) {
      const Row q = LoadRow(fwd.q, rows[t]), d_out = LoadRow(args.d_out, rows[t]);
      Row d_q(q.size(), 0.0f);
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        const int64_t kv_offset = h / heads_per_kv * C;
        const Weights w = SoftmaxWeights({}, shape, &q[h * C], kv_offset, t + 1, lookup);
        const auto count = static_cast<int64_t>(w.p.size());
        Row d_p(count, 0.0f);
        float mean = 0;  // D
        for (int64_t j = 0; j < count; ++j) {
          const float* v_j = lookup(w.first + j).v + kv_offset;
          for (int64_t c = 0; c < C; ++c) d_p[j] += d_out[h * C + c] * v_j[c];
          mean += w.p[j] / w.sum * d_p[j];
        }
        for (int64_t j = 0; j < count; ++j) {
          const int64_t at = rows[w.first + j] * kv_cols + kv_offset;
          const float p = w.p[j] / w.sum;
          const float d_s = shape.scale * p * (d_p[j] - mean);
          for (int64_t c = 0; c < C; ++c) {
            d_v[at + c] += p * d_out[h * C + c];
            d_q[h * C + c] += d_s * k[at + c];
            d_k[at + c] += d_s * q[h * C + c];
          }
        }
      }
      StoreRow(args.d_q, rows[t], d_q);
    }
  }
  for (int64_t t = 0; t < fwd.k.rows; ++t) {
    const int64_t at = t * kv_cols;
    StoreRow(args.d_k, t, Row(d_k.begin() + at, d_k.begin() + at + kv_cols));
    StoreRow(args.d_v, t, Row(d_v.begin() + at, d_v.begin() + at + kv_cols));
  }
}
}  // namespace stretto::engine::reference
