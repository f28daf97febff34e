// Gradients of packed attention (formulas of Dao et al. 2022, section B.2, without the blocking
// over keys): probabilities are computed again from q and k; with dp_j = d_out · v_j,
//   d_s_j = p_j (dp_j − Σ_i p_i dp_i) · scale,  d_q = Σ_j d_s_j k_j,  d_k_j += d_s_j q,  d_v_j +=
//   p_j d_out.
//
// Where queries and keys are bf16, their products take the instructions of gemm_dot.h, if there are
// any.
//
// A task is one tree of segments (a root and all that continue it) and one kv head; inside it
// segments and queries go in order, so no gradient depends on threads. d_k and d_v of a segment's
// context are one chain over its queries and are then added to the rows, segment by segment.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "engine/device/cpu/attention.h"
#include "engine/device/cpu/gemm_dot.h"

namespace stretto::engine::cpu {
namespace {
constexpr int64_t kRowsAtOnce = 16;

int64_t RoundUp(int64_t x) { return (x + kPanel - 1) / kPanel * kPanel; }

// Gradient of one segment for one kv head. Legend: L context positions (padded to 16), Q queries =
// (row, head) pairs of one step, P padded head size.
class SegmentGradient {
 public:
  SegmentGradient(const Kernels& kernels, const PackedAttentionBackward& args, int64_t g)
      : kernels_(kernels), args_(args), shape_(args.forward.shape), g_(g) {
    heads_ = shape_.num_heads / shape_.num_kv_heads;
    c_ = shape_.head_dim;
    padded_c_ = RoundUp(c_);
    const auto is_bf16 = [](const Tensor& t) { return t.dtype == DType::kBF16; };
    pairs_ = kernels.dot != nullptr && c_ % 2 == 0 && heads_ <= kernels.dot->max_rows &&
             is_bf16(args.forward.q) && is_bf16(args.forward.k);
  }

  void Compute(int64_t segment) {
    const SegmentTable& table = *args_.forward.segments;
    CollectContext(segment);
    Reserve();
    GatherContext();
    const int64_t num_rows = table.num_rows[segment];
    start_ = static_cast<int64_t>(context_rows_.size()) - num_rows;
    for (int64_t i = 0; i < num_rows; i += kRowsAtOnce) {
      Step(table.row_begin[segment] + i, start_ + i, std::min(kRowsAtOnce, num_rows - i));
    }
    for (size_t j = 0; j < context_rows_.size(); ++j) {
      AddRow(args_.d_k, context_rows_[j], d_k_ + static_cast<int64_t>(j) * padded_c_);
      AddRow(args_.d_v, context_rows_[j], d_v_ + static_cast<int64_t>(j) * padded_c_);
    }
  }

 private:
  void CollectContext(int64_t segment) {
    const SegmentTable& table = *args_.forward.segments;
    std::vector<int64_t> path;
    for (int64_t s = segment; s >= 0; s = table.parent[s]) path.push_back(s);
    context_rows_.clear();
    for (auto it = path.rbegin(); it != path.rend(); ++it) {
      for (int64_t i = 0; i < table.num_rows[*it]; ++i) {
        context_rows_.push_back(table.row_begin[*it] + i);
      }
    }
    padded_l_ = RoundUp(static_cast<int64_t>(context_rows_.size()));
  }

  // One piece of scratch memory cut into the arrays of this segment.
  void Reserve() {
    const int64_t q = kRowsAtOnce * heads_, l = padded_l_, p = padded_c_;
    const int64_t total = 2 * l * c_ + 4 * l * p + 2 * q * l + 4 * q * c_ + 3 * q * p + q + 64;
    float* next = FloatScratch(ScratchUse::kScores, static_cast<size_t>(total));
    const auto take = [&next](int64_t n) {
      float* mine = next;
      next += n;
      return mine;
    };
    keys_by_token_ = take(l * c_);
    values_by_token_ = take(l * c_);
    key_panels_ = take(l * p);
    gathered_ = take(l * p);
    d_k_ = take(l * p);
    d_v_ = take(l * p);
    scores_ = take(q * l);
    d_scores_ = take(q * l);
    q_ = take(q * c_);
    d_out_ = take(q * c_);
    narrow_q_ = reinterpret_cast<uint16_t*>(take(q * c_));
    q_tiles_ = take(q * c_);
    q_panels_ = take(q * p);
    d_out_panels_ = take(q * p);
    d_q_ = take(q * p);
    sums_ = take(q);
  }

  Source HeadOf(const Tensor& t, int64_t row) const { return RowOf(t, row) + g_ * c_; }

  // Keys and values of the context as f32 panels: with tokens in the lanes and, for keys, with c.
  void GatherContext() {
    const int64_t l = static_cast<int64_t>(context_rows_.size());
    for (int which = 0; which < 2; ++which) {
      const Tensor& from = which == 0 ? args_.forward.k : args_.forward.v;
      float* by_token = which == 0 ? keys_by_token_ : values_by_token_;
      for (int64_t j = 0; j < l; ++j) {
        kernels_.row->convert(Sink{gathered_ + j * c_, false}, HeadOf(from, context_rows_[j]), c_);
      }
      for (int64_t j = 0; j < l && !(which == 0 && pairs_); j += kPanel) {
        kernels_.gemm->pack_transposed(Sink{by_token + j * c_, false},
                                       Source{gathered_ + j * c_, false}, c_, c_,
                                       std::min<int64_t>(kPanel, l - j));
      }
      if (which == 0) {
        kernels_.gemm->pack_panels(Sink{key_panels_, false}, padded_l_ * kPanel,
                                   Source{gathered_, false}, c_, l, c_);
      }
    }
    if (pairs_) PackKeys();
    std::fill(d_k_, d_k_ + padded_l_ * padded_c_, 0.0f);
    std::fill(d_v_, d_v_ + padded_l_ * padded_c_, 0.0f);
  }

  // Keys with tokens in the lanes, as words of two c.
  void PackKeys() {
    const int64_t l = static_cast<int64_t>(context_rows_.size());
    auto* narrow = reinterpret_cast<uint16_t*>(gathered_);
    for (int64_t j = 0; j < l; ++j) {
      std::memcpy(narrow + j * c_, HeadOf(args_.forward.k, context_rows_[j]).data,
                  static_cast<size_t>(c_) * sizeof(uint16_t));
    }
    least_key_ = kNoneSmall;
    auto* words = reinterpret_cast<uint32_t*>(keys_by_token_);
    for (int64_t j = 0; j < l; j += kPanel) {
      const uint16_t least = kernels_.dot->pack(words + j * c_ / 2, narrow + j * c_, c_, c_,
                                                std::min<int64_t>(kPanel, l - j),
                                                /*past_caches=*/false);
      least_key_ = std::min(least_key_, least);
    }
  }

  // c[rows × 16·panels] (+)= a · panels, over as many register tiles as it takes.
  void Product(Tile t, int64_t rows) const {
    const int64_t tiles = (rows + kernels_.gemm->max_rows - 1) / kernels_.gemm->max_rows;
    const float* a = t.a;
    float* c = t.c;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = rows * i / tiles;
      t.rows = static_cast<int>(rows * (i + 1) / tiles - begin);
      t.a = a + begin * (t.a_k_major ? 1 : t.a_stride);
      t.c = c + begin * t.c_stride;
      kernels_.gemm->tile(t);
    }
  }

  // scores[Q × visible] = a[Q × C] · (panels with tokens in the lanes)
  void TokenProduct(const float* a, const float* panels, float* scores, int64_t queries,
                    int64_t visible) const {
    Tile t = ScoreTile(Source{panels, false}, scores, visible);
    t.a = a;
    t.a_stride = c_;
    Product(t, queries);
  }
  // All but the rows of A.
  Tile ScoreTile(Source panels, float* scores, int64_t visible) const {
    Tile t;
    t.k = c_;
    t.panels = panels;
    t.panel_stride = c_ * kPanel;
    t.num_panels = visible / kPanel;
    t.c = scores;
    t.c_stride = padded_l_;
    return t;
  }

  // scores[Q × visible] = q · (words of keys): in f32 for tiles where words would show in the bits.
  void ScoresOfPairs(int64_t queries, int64_t visible) {
    const RowTiles tiles(queries, kernels_.dot->max_rows);
    std::array<bool, kRowsAtOnce> dots;
    STRETTO_CHECK(tiles.count <= kRowsAtOnce);
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t begin = tiles.Begin(i) * c_;
      const uint16_t least = kernels_.dot->interleave(reinterpret_cast<uint32_t*>(q_tiles_ + begin),
                                                      narrow_q_ + begin, c_, tiles.Size(i), c_);
      dots[i] = SameBitsAsChain(least, least_key_);
      if (dots[i]) continue;
      kernels_.gemm->interleave(Source{q_ + begin, false}, c_, tiles.Size(i), c_, q_tiles_ + begin);
    }
    Tile t = ScoreTile(Source{keys_by_token_, true}, scores_, visible);
    t.a = q_tiles_;
    t.a_k_major = true;
    kernels_.dot->row_tiles(t, tiles, PanelsAhead{}, dots.data());
  }

  // d[visible × P] += scoresᵀ · panels of Q rows
  void ContextProduct(const float* scores, const float* panels, float* d, int64_t queries,
                      int64_t visible) const {
    Tile t;
    t.a = scores;
    t.a_stride = padded_l_;
    t.a_k_major = true;
    t.k = queries;
    t.panels = Source{panels, false};
    t.panel_stride = queries * kPanel;
    t.num_panels = padded_c_ / kPanel;
    t.c = d;
    t.c_stride = padded_c_;
    t.load_c = true;
    Product(t, visible);
  }

  void LoadQueries(int64_t row, int64_t num_rows) {
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t width = heads_ * c_;
      kernels_.row->convert(Sink{q_ + i * width, false},
                            RowOf(args_.forward.q, row + i) + g_ * width, width);
      if (pairs_) {
        std::memcpy(narrow_q_ + i * width, (RowOf(args_.forward.q, row + i) + g_ * width).data,
                    static_cast<size_t>(width) * sizeof(uint16_t));
      }
      kernels_.row->convert(Sink{d_out_ + i * width, false},
                            RowOf(args_.d_out, row + i) + g_ * width, width);
    }
    const int64_t queries = num_rows * heads_;
    kernels_.gemm->pack_panels(Sink{q_panels_, false}, queries * kPanel, Source{q_, false}, c_,
                               queries, c_);
    kernels_.gemm->pack_panels(Sink{d_out_panels_, false}, queries * kPanel, Source{d_out_, false},
                               c_, queries, c_);
  }

  // Rows [row, row + num_rows), the first of which has `position` positions before it.
  void Step(int64_t row, int64_t position, int64_t num_rows) {
    LoadQueries(row, num_rows);
    const int64_t queries = num_rows * heads_;
    const int64_t visible = RoundUp(position + num_rows);
    if (pairs_) {
      ScoresOfPairs(queries, visible);
    } else {
      TokenProduct(q_, keys_by_token_, scores_, queries, visible);
    }
    TokenProduct(d_out_, values_by_token_, d_scores_, queries, visible);
    for (int64_t i = 0; i < queries; ++i) {
      float* s = scores_ + i * padded_l_;
      float* d = d_scores_ + i * padded_l_;
      const int64_t end = position + i / heads_ + 1;
      const int64_t begin =
          shape_.sliding_window > 0 ? std::max<int64_t>(0, end - shape_.sliding_window) : 0;
      const float sum = kernels_.softmax->attention_softmax(s, begin, end, shape_.scale);
      std::fill(s, s + begin / kPanel * kPanel, 0.0f);
      std::fill(s + RoundUp(end), s + visible, 0.0f);
      const float delta = kernels_.row->dot(Source{s, false}, Source{d, false}, visible) / sum;
      kernels_.softmax->attention_backward_row(s, d, sum, delta, shape_.scale, visible);
    }
    StoreQueryGradient(row, num_rows, visible);
    ContextProduct(scores_, d_out_panels_, d_v_, queries, visible);
    ContextProduct(d_scores_, q_panels_, d_k_, queries, visible);
  }

  void StoreQueryGradient(int64_t row, int64_t num_rows, int64_t visible) {
    Tile t;
    t.a = d_scores_;
    t.a_stride = padded_l_;
    t.k = std::min<int64_t>(visible, static_cast<int64_t>(context_rows_.size()));
    t.panels = Source{key_panels_, false};
    t.panel_stride = padded_l_ * kPanel;
    t.num_panels = padded_c_ / kPanel;
    t.c = d_q_;
    t.c_stride = padded_c_;
    Product(t, num_rows * heads_);
    for (int64_t i = 0; i < num_rows * heads_; ++i) {
      const Sink to = MutableRowOf(args_.d_q, row + i / heads_) + (g_ * heads_ + i % heads_) * c_;
      kernels_.row->convert(to, Source{d_q_ + i * padded_c_, false}, c_);
    }
  }

  void AddRow(const Tensor& t, int64_t row, const float* d) const {
    const Sink to = MutableRowOf(t, row) + g_ * c_;
    kernels_.row->add(to, Source{to.data, false}, Source{d, false}, c_);
  }

  const Kernels& kernels_;
  const PackedAttentionBackward& args_;
  const AttentionShape& shape_;
  bool pairs_ = false;      // keys_by_token_ are words
  uint16_t least_key_ = 0;  // of gemm_dot.h
  int64_t g_, heads_ = 0, c_ = 0, padded_c_ = 0, padded_l_ = 0, start_ = 0;
  std::vector<int64_t> context_rows_;
  float *keys_by_token_ = nullptr, *values_by_token_ = nullptr, *key_panels_ = nullptr;
  float *gathered_ = nullptr, *d_k_ = nullptr, *d_v_ = nullptr;
  float *scores_ = nullptr, *d_scores_ = nullptr, *q_ = nullptr, *d_out_ = nullptr;
  uint16_t* narrow_q_ = nullptr;
  float* q_tiles_ = nullptr;
  float *q_panels_ = nullptr, *d_out_panels_ = nullptr, *d_q_ = nullptr, *sums_ = nullptr;
};
}  // namespace

void PackedAttentionGradients(const Kernels& kernels, ThreadPool& pool,
                              const PackedAttentionBackward& args) {
  const SegmentTable& table = *args.forward.segments;
  std::vector<std::vector<int64_t>> trees;  // segments of each, in order
  std::vector<size_t> tree_of;
  for (int64_t s = 0; s < table.num_segments(); ++s) {
    if (table.parent[s] < 0) {
      tree_of.push_back(trees.size());
      trees.emplace_back();
    } else {
      tree_of.push_back(tree_of[table.parent[s]]);
    }
    trees[tree_of[s]].push_back(s);
  }
  for (const Tensor* t : {&args.d_k, &args.d_v}) {
    for (int64_t r = 0; r < t->rows; ++r) kernels.row->fill(MutableRowOf(*t, r), 0.0f, t->cols);
  }
  const int64_t groups = args.forward.shape.num_kv_heads;
  pool.ParallelFor(static_cast<int64_t>(trees.size()) * groups, [&](int64_t i) {
    SegmentGradient gradient(kernels, args, i % groups);
    for (int64_t segment : trees[i / groups]) gradient.Compute(segment);
  });
}
}  // namespace stretto::engine::cpu
