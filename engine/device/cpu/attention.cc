#include "engine/device/cpu/attention.h"

#include <algorithm>

#include "base/check.h"

namespace stretto::engine::cpu {
namespace {
template <class T>
void ScatterToken(const KvBlocks& kv, T* block, int64_t token, const uint8_t* slot, const T* k,
                  const T* v) {
  const int64_t c_size = kv.head_dim, padded = kv.padded_head_dim();
  const int64_t token_slot = slot[token];
  for (int64_t g = 0; g < kv.num_kv_heads; ++g) {
    T* keys = block + kv.KeyOffset(g);
    for (int64_t c = 0; c < c_size; ++c) keys[c * kPanel + token_slot] = k[g * c_size + c];
    T* values = block + kv.ValueOffset(g);
    for (int64_t c = 0; c < padded; ++c) {
      values[(c / kPanel * kBlockTokens + token) * kPanel + slot[c % kPanel]] =
          c < c_size ? v[g * c_size + c] : T{};
    }
  }
}

// A token's keys or values of one head as bytes, from f32; returns their scale.
float QuantizeHead(const KvBlocks& kv, const float* row, int8_t* q) {
  return QuantizeKv(kv.format, row, kv.head_dim, q);
}

// k and v are f32 rows, q has room for one head.
void ScatterQuantized(const KvBlocks& kv, int64_t first, int64_t token, const float* k,
                      const float* v, int8_t* q) {
  const int64_t c_size = kv.head_dim, padded = kv.padded_head_dim();
  for (int64_t g = 0; g < kv.num_kv_heads; ++g) {
    kv.ScalesAt(first + kv.KeyScaleOffset(g))[token] = QuantizeHead(kv, k + g * c_size, q);
    char* keys = kv.At(first + kv.KeyOffset(g));
    for (int64_t c = 0; c < c_size; ++c) keys[c * kPanel + token] = static_cast<char>(q[c]);
    kv.ScalesAt(first + kv.ValueScaleOffset(g))[token] = QuantizeHead(kv, v + g * c_size, q);
    std::fill(q + c_size, q + padded, int8_t{0});
    for (int64_t c = 0; c < padded; c += kPanel) {
      std::copy_n(q + c, kPanel,
                  kv.At(first + kv.ValueOffset(g) + c * kBlockTokens + token * kPanel));
    }
  }
}

constexpr uint8_t kInOrder[kPanel] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int64_t kBlocksAhead = 2;
constexpr int64_t kQueriesAtOnce = 24;  // (row, head) pairs that share one pass over keys

// What a task works on: a piece of a run, one kv head.
struct Place {
  const QueryRun* run = nullptr;
  int64_t g = 0;
};

int64_t LastOf(const QueryRun& run) { return run.context + run.num_rows - 1; }
int64_t NumBlocks(const QueryRun& run) { return (LastOf(run) + kBlockTokens - 1) / kBlockTokens; }

// The work of one task.
class Piece {
 public:
  // `next`: where the same thread is likely to go on; run is nullptr where it ends.
  Piece(const Kernels& kernels, const AttentionShape& shape, const KvBlocks& kv, const Place& place,
        const Place& next)
      : kernels_(kernels), shape_(shape), kv_(kv), run_(*place.run), g_(place.g), next_(next) {
    heads_ = shape.num_heads / shape.num_kv_heads;
    queries_ = run_.num_rows * heads_;
    num_blocks_ = NumBlocks(run_);
    padded_context_ = num_blocks_ * kBlockTokens;
    const int64_t padded = kv.padded_head_dim();
    float* memory = FloatScratch(
        ScratchUse::kScores,
        static_cast<size_t>(queries_ * (shape.head_dim + padded + padded_context_ + 1)));
    q_ = memory;
    acc_ = q_ + queries_ * shape.head_dim;
    scores_ = acc_ + queries_ * padded;
    sums_ = scores_ + queries_ * padded_context_;
    offsets_ = static_cast<int64_t*>(
        ThreadScratch(ScratchUse::kKeys, static_cast<size_t>(2 * num_blocks_) * sizeof(int64_t)));
    next_offsets_ = offsets_ + num_blocks_;
    for (int64_t b = 0; b < num_blocks_; ++b) offsets_[b] = run_.blocks[b] * kv.block_elements();
    FindAhead();
  }

  void Compute(const Tensor& out, const Tensor& q) {
    for (int64_t i = 0; i < run_.num_rows; ++i) {
      kernels_.row->convert(Sink{q_ + i * heads_ * shape_.head_dim, false},
                            RowOf(q, run_.row + i) + g_ * heads_ * shape_.head_dim,
                            heads_ * shape_.head_dim);
    }
    Scores();
    for (int64_t i = 0; i < queries_; ++i) {
      const int64_t row = i / heads_;
      sums_[i] = kernels_.softmax->attention_softmax(scores_ + i * padded_context_, Begin(row),
                                                     End(row), shape_.scale);
    }
    if (kv_.quantized()) ApplyValueScales();
    Outputs();
    const int64_t padded = kv_.padded_head_dim();
    for (int64_t i = 0; i < queries_; ++i) {
      const Sink to =
          MutableRowOf(out, run_.row + i / heads_) + (g_ * heads_ + i % heads_) * shape_.head_dim;
      kernels_.softmax->divide(to, acc_ + i * padded, sums_[i], shape_.head_dim);
    }
  }

 private:
  int64_t End(int64_t row) const { return run_.context + row; }
  int64_t Begin(int64_t row) const {
    return shape_.sliding_window > 0 ? std::max<int64_t>(0, End(row) - shape_.sliding_window) : 0;
  }

  // Calls fn(first query, number) for runs of queries that fit one register tile.
  template <class Fn>
  void ForTiles(int64_t first, int64_t count, const Fn& fn) const {
    const int64_t tiles = (count + kernels_.gemm->max_rows - 1) / kernels_.gemm->max_rows;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = count * i / tiles, end = count * (i + 1) / tiles;
      fn(first + begin, end - begin);
    }
  }

  // Keys and values of more than about half the second-level cache would be gone from there before
  // their turn came.
  bool Long() const {
    return num_blocks_ * kBlockTokens * 2 * kv_.head_dim * kv_.element_bytes() > 256 * 1024;
  }
  // Where the blocks are whose keys or values are fetched while those of block b are used: of a
  // long context the block after next; else, while keys are used, the values of block b, and while
  // values are used, the keys of block b of what comes next.
  void FindAhead() {
    for (int64_t b = 0; b < num_blocks_; ++b) {
      int64_t block = run_.blocks[std::min(b + kBlocksAhead, num_blocks_ - 1)];
      if (!Long() && next_.run != nullptr) {
        block = next_.run->blocks[std::min(b, NumBlocks(*next_.run) - 1)];
      }
      next_offsets_[b] = block * kv_.block_elements();
    }
  }
  // Not for quantised caches, whose tiles don't fetch.
  void FetchDuringScores(int64_t b, Tile& t) const {
    t.ahead = kv_.At(Long() ? kv_.KeyOffset(g_) : kv_.ValueOffset(g_));
    t.ahead_offsets = (Long() ? next_offsets_ : offsets_) + b;
  }
  void FetchDuringOutputs(int64_t first_block, Tile& t) const {
    if (!Long() && next_.run == nullptr) return;
    t.ahead = kv_.At(Long() ? kv_.ValueOffset(g_) : kv_.KeyOffset(next_.g));
    t.ahead_offsets = next_offsets_ + first_block;
  }

  void Scores() {
    const int64_t first = Begin(0) / kBlockTokens;
    if (kv_.quantized()) {
      for (int64_t b = first; b < num_blocks_; ++b) QuantizedScores(b);
      return;
    }
    // Two blocks share the loads of queries: the second is the first one's neighbouring panel,
    // wherever it lies.
    for (int64_t b = first; b < num_blocks_; b += 2) {
      const bool two = b + 1 < num_blocks_;
      ForTiles(0, queries_, [&](int64_t query, int64_t count) {
        Tile t = ScoresTile(query, count, b);
        t.num_panels = two ? 2 : 1;
        t.panel_stride = two ? offsets_[b + 1] - offsets_[b] : 0;
        if (query == 0) FetchDuringScores(b, t);
        kernels_.gemm->tile(t);
      });
    }
  }
  Tile ScoresTile(int64_t query, int64_t count, int64_t b) const {
    Tile t;
    t.rows = static_cast<int>(count);
    t.a = q_ + query * shape_.head_dim;
    t.a_stride = shape_.head_dim;
    t.k = shape_.head_dim;
    t.panels = Source{kv_.At(offsets_[b] + kv_.KeyOffset(g_)), kv_.bf16};
    t.c = scores_ + query * padded_context_ + b * kBlockTokens;
    t.c_stride = padded_context_;
    return t;
  }
  void QuantizedScores(int64_t b) {
    PrefetchForBlock(b);
    const float* scales = kv_.ScalesAt(offsets_[b] + kv_.KeyScaleOffset(g_));
    ForTiles(0, queries_, [&](int64_t query, int64_t count) {
      const Tile t = ScoresTile(query, count, b);
      kernels_.quant->tile(t, kv_.format);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < kBlockTokens; ++j) t.c[i * padded_context_ + j] *= scales[j];
      }
    });
  }

  // Each weight p_j of a query times the scale of the values that it will meet.
  void ApplyValueScales() {
    for (int64_t b = Begin(0) / kBlockTokens; b < padded_context_ / kBlockTokens; ++b) {
      const float* scales = kv_.ScalesAt(offsets_[b] + kv_.ValueScaleOffset(g_));
      for (int64_t i = 0; i < queries_; ++i) {
        float* p = scores_ + i * padded_context_ + b * kBlockTokens;
        for (int64_t j = 0; j < kBlockTokens; ++j) p[j] *= scales[j];
      }
    }
  }

  static void Prefetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
  }
  // Blocks lie anywhere in memory: asks for the keys of the block after next, and for the values of
  // this one, which are needed when all scores are known.
  void PrefetchForBlock(int64_t b) const {
    const int64_t bytes = kv_.padded_head_dim() * kBlockTokens * kv_.element_bytes();
    Prefetch(kv_.At(offsets_[b] + kv_.ValueOffset(g_)), bytes);
    if (b + kBlocksAhead < num_blocks_) {
      Prefetch(kv_.At(offsets_[b + kBlocksAhead] + kv_.KeyOffset(g_)), bytes);
    }
  }

  // Continues the chains of queries [query, query + count) over tokens [begin, end) of which all
  // queries see every one; begin is a multiple of 16, or the range lies within one block.
  void Extend(int64_t query, int64_t count, int64_t begin, int64_t end) {
    const int64_t padded = kv_.padded_head_dim();
    while (begin < end) {
      const int64_t block = begin / kBlockTokens, token = begin % kBlockTokens;
      const bool whole = token == 0 && end - begin >= kBlockTokens;
      const int64_t num_blocks = whole ? (end - begin) / kBlockTokens : 1;
      const int64_t num_tokens = whole ? kBlockTokens : std::min(end - begin, kBlockTokens - token);
      ForTiles(query, count, [&](int64_t first, int64_t rows) {
        if (kv_.quantized()) {
          ExtendQuantized(first, rows, begin, num_tokens, num_blocks);
          return;
        }
        Tile t;
        t.rows = static_cast<int>(rows);
        t.a = scores_ + first * padded_context_ + begin;
        t.a_stride = padded_context_;
        t.k = num_tokens;
        t.panels = Source{kv_.At(kv_.ValueOffset(g_) + token * kPanel), kv_.bf16};
        t.panel_stride = kBlockTokens * kPanel;
        t.num_panels = padded / kPanel;
        t.c = acc_ + first * padded;
        t.c_stride = padded;
        t.load_c = true;
        if (first == 0) FetchDuringOutputs(block, t);
        kernels_.gemm->block_tile(t, offsets_ + block, num_blocks);
      });
      begin += num_blocks * num_tokens;
    }
  }

  // One tile's part of Extend: the panels of bytes have no block_tile of their own.
  void ExtendQuantized(int64_t query, int64_t rows, int64_t begin, int64_t num_tokens,
                       int64_t num_blocks) {
    const int64_t padded = kv_.padded_head_dim();
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t at = begin + b * kBlockTokens;
      Tile t;
      t.rows = static_cast<int>(rows);
      t.a = scores_ + query * padded_context_ + at;
      t.a_stride = padded_context_;
      t.k = num_tokens;
      t.panels.data =
          kv_.At(offsets_[at / kBlockTokens] + kv_.ValueOffset(g_) + at % kBlockTokens * kPanel);
      t.panel_stride = kBlockTokens * kPanel;
      t.num_panels = padded / kPanel;
      t.c = acc_ + query * padded;
      t.c_stride = padded;
      t.load_c = true;
      kernels_.quant->tile(t, kv_.format);
    }
  }

  // Each row's chain runs over exactly its own positions: first those that earlier rows of the
  // piece see but later ones don't (a sliding window), then whole blocks that all see, then the
  // rest.
  void Outputs() {
    std::fill(acc_, acc_ + queries_ * kv_.padded_head_dim(), 0.0f);
    const int64_t common_begin =
        (Begin(run_.num_rows - 1) + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
    const int64_t common_end = End(0) / kBlockTokens * kBlockTokens;
    const bool any_common = common_begin < common_end;
    for (int64_t i = 0; i < run_.num_rows; ++i) {
      ExtendUnaligned(i, Begin(i), any_common ? common_begin : End(i));
    }
    if (!any_common) return;
    Extend(0, queries_, common_begin, common_end);
    for (int64_t i = 0; i < run_.num_rows; ++i) ExtendUnaligned(i, common_end, End(i));
  }
  void ExtendUnaligned(int64_t row, int64_t begin, int64_t end) {
    Extend(row * heads_, heads_, begin, end);
  }

  const Kernels& kernels_;
  const AttentionShape& shape_;
  const KvBlocks& kv_;
  const QueryRun& run_;
  const int64_t g_;
  const Place next_;
  int64_t heads_, queries_, num_blocks_, padded_context_;
  float *q_, *acc_, *scores_, *sums_;
  int64_t *offsets_, *next_offsets_;  // in elements of the cache
};

// The physical blocks of every segment and the writes that fill them. Whole blocks of an ancestor
// are shared; a block that the ancestors end in is filled again for each child.
struct PackedBlocks {
  std::vector<std::vector<int32_t>> blocks;  // by segment
  std::vector<int64_t> start;                // first position of each segment
  std::vector<KvWrite> writes;
  int32_t num_blocks = 0;
};

PackedBlocks PlanBlocks(const SegmentTable& table) {
  PackedBlocks plan;
  for (int64_t s = 0; s < table.num_segments(); ++s) {
    const int32_t parent = table.parent[s];
    STRETTO_CHECK(parent < s);
    const int64_t start = parent < 0 ? 0 : plan.start[parent] + table.num_rows[parent];
    const int64_t shared = start / kBlockTokens;
    const int64_t end = start + table.num_rows[s];
    std::vector<int32_t> blocks;
    if (parent >= 0) {
      blocks.assign(plan.blocks[parent].begin(), plan.blocks[parent].begin() + shared);
    }
    while (static_cast<int64_t>(blocks.size()) * kBlockTokens < end) {
      blocks.push_back(plan.num_blocks++);
    }
    // Walk up through the ancestors while their rows lie in the first block of our own.
    int64_t segment = s, first = start;
    int64_t last = end;
    while (segment >= 0 && last > shared * kBlockTokens) {
      for (int64_t p = std::max(first, shared * kBlockTokens); p < last; ++p) {
        plan.writes.push_back(
            {table.row_begin[segment] + (p - first),
             int64_t{blocks[p / kBlockTokens]} * kBlockTokens + p % kBlockTokens});
      }
      last = first;
      segment = table.parent[segment];
      if (segment >= 0) first = plan.start[segment];
    }
    plan.blocks.push_back(std::move(blocks));
    plan.start.push_back(start);
  }
  return plan;
}
}  // namespace

void WriteKvRows(const Kernels& kernels, ThreadPool& pool, const KvBlocks& kv, const Tensor& k,
                 const Tensor& v, const std::vector<KvWrite>& writes) {
  const int64_t width = kv.num_kv_heads * kv.head_dim;
  const size_t element = kv.bf16 ? 2 : 4;  // of the rows below; quantised from f32
  pool.ParallelRanges(static_cast<int64_t>(writes.size()), 8, [&](int64_t begin, int64_t end) {
    char* rows = static_cast<char*>(ThreadScratch(
        ScratchUse::kMore,
        2 * static_cast<size_t>(width) * element + static_cast<size_t>(kv.padded_head_dim())));
    const Sink k_row{rows, kv.bf16}, v_row = k_row + width;
    for (int64_t i = begin; i < end; ++i) {
      const KvWrite& w = writes[i];
      kernels.row->convert(k_row, RowOf(k, w.row), width);
      kernels.row->convert(v_row, RowOf(v, w.row), width);
      const int64_t first = w.slot / kBlockTokens * kv.block_elements();
      void* block = kv.At(first);
      const int64_t token = w.slot % kBlockTokens;
      if (kv.quantized()) {
        ScatterQuantized(kv, first, token, static_cast<const float*>(k_row.data),
                         static_cast<const float*>(v_row.data),
                         reinterpret_cast<int8_t*>(rows + 2 * width * sizeof(float)));
      } else if (kv.bf16) {
        ScatterToken(kv, static_cast<uint16_t*>(block), token, kernels.gemm->bf16_slot,
                     static_cast<const uint16_t*>(k_row.data),
                     static_cast<const uint16_t*>(v_row.data));
      } else {
        ScatterToken(kv, static_cast<float*>(block), token, kInOrder,
                     static_cast<const float*>(k_row.data), static_cast<const float*>(v_row.data));
      }
    }
  });
}

void AttendRuns(const Kernels& kernels, ThreadPool& pool, const AttentionShape& shape,
                const KvBlocks& kv, const Tensor& out, const Tensor& q,
                const std::vector<QueryRun>& runs) {
  const int64_t heads = shape.num_heads / shape.num_kv_heads;
  const int64_t rows_at_once = std::max<int64_t>(1, kQueriesAtOnce / heads);
  std::vector<QueryRun> pieces;
  for (const QueryRun& run : runs) {
    for (int64_t i = 0; i < run.num_rows; i += rows_at_once) {
      pieces.push_back(
          {run.row + i, std::min(rows_at_once, run.num_rows - i), run.context + i, run.blocks});
    }
  }
  // Long pieces first would balance best; the last rows of a run are its longest.
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  // Where pieces are many, one thread computes all heads of a piece.
  const int64_t heads_of_task = num_pieces >= 4 * pool.num_threads() ? shape.num_kv_heads : 1;
  const int64_t tasks_of_piece = shape.num_kv_heads / heads_of_task;
  const int64_t num_tasks = num_pieces * tasks_of_piece;
  const auto first_of = [&](int64_t task) {
    return Place{&pieces[num_pieces - 1 - task / tasks_of_piece],
                 task % tasks_of_piece * heads_of_task};
  };
  pool.ParallelFor(num_tasks, [&](int64_t i) {
    Place place = first_of(i);
    const Place next_task = i + 1 < num_tasks ? first_of(i + 1) : Place{};
    for (int64_t left = heads_of_task; left > 0; --left, ++place.g) {
      const Place next = left > 1 ? Place{place.run, place.g + 1} : next_task;
      Piece(kernels, shape, kv, place, next).Compute(out, q);
    }
  });
}

void PackedAttentionForward(const Kernels& kernels, ThreadPool& pool, BlockAllocator& allocator,
                            const PackedAttention& args) {
  const PackedBlocks plan = PlanBlocks(*args.segments);
  KvBlocks kv;
  kv.bf16 = args.k.dtype == DType::kBF16;
  kv.num_kv_heads = args.shape.num_kv_heads;
  kv.head_dim = args.shape.head_dim;
  const size_t bytes = kv.block_bytes() * static_cast<size_t>(plan.num_blocks);
  kv.data = allocator.Allocate(bytes);
  STRETTO_CHECK_MSG(kv.data != nullptr, "out of memory for the keys and values of attention");
  WriteKvRows(kernels, pool, kv, args.k, args.v, plan.writes);
  std::vector<QueryRun> runs;
  for (int64_t s = 0; s < args.segments->num_segments(); ++s) {
    if (args.segments->num_rows[s] == 0) continue;
    runs.push_back({args.segments->row_begin[s], args.segments->num_rows[s], plan.start[s] + 1,
                    plan.blocks[s].data()});
  }
  AttendRuns(kernels, pool, args.shape, kv, args.out, args.q, runs);
  allocator.Free(kv.data, bytes);
}
}  // namespace stretto::engine::cpu
