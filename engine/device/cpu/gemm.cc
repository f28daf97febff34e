#include "engine/device/cpu/gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "engine/device/cpu/memory.h"

namespace stretto::engine::cpu {
namespace {
constexpr int64_t kFewRows = 16;            // up to here K is walked in one piece
constexpr int64_t kRowBlock = 96;           // rows of A that share one pass over B
constexpr int64_t kDepth = 576;             // longest piece of K
constexpr int64_t kDepthUnit = kInt4Group;  // pieces of K begin where groups of int4 do
constexpr int64_t kTasksPerThread = 4;      // at least, of those that shrink
constexpr int64_t kPanelGroup = 32;         // panels of one task, at most
constexpr int64_t kPanelsNear = 4;          // that are finished together where A is near
constexpr int64_t kPanelsAhead = 1;         // times those computed at once, that are fetched
constexpr int64_t kNearBytes = 256 << 10;   // half a second-level cache of today

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool IsNear(int64_t rows, int64_t k) {
  return rows * k * static_cast<int64_t>(sizeof(float)) <= kNearBytes;
}

// Any blocking gives the same bits; this one balances threads and keeps pieces in the caches.
struct Blocking {
  Blocking(int64_t m, int64_t k, int tile_rows)
      : num_row_blocks(CeilDiv(m, kRowBlock)),
        row_block(CeilDiv(CeilDiv(m, num_row_blocks), tile_rows) * tile_rows),
        depth(m <= kFewRows ? k
                            : CeilDiv(CeilDiv(k, CeilDiv(k, kDepth)), kDepthUnit) * kDepthUnit) {
    num_row_blocks = CeilDiv(m, row_block);
  }
  int64_t num_row_blocks, row_block, depth;
};

// One task: rows [m0, m0 + rows) times panels [p0, p0 + panels).
struct Task {
  int64_t m0, rows, p0, panels;
};

// A product's tasks, in the order in which threads take them. Most blocks of rows are few tasks, so
// that a thread seldom prepares rows of A that another one has, too. The last blocks are split into
// groups of panels that shrink from twice their mean to nothing: threads end together.
class Tasks {
 public:
  // Groups are multiples of `unit` panels; `most` of them at most where that isn't 0.
  Tasks(int64_t m, int64_t num_panels, int64_t row_block, int64_t unit, int64_t most,
        int num_threads)
      : m_(m),
        num_panels_(num_panels),
        row_block_(row_block),
        unit_(unit),
        num_blocks_(CeilDiv(m, row_block)),
        num_shrinking_(num_threads == 1 ? 0 : std::min<int64_t>(num_blocks_, num_threads)),
        groups_(most == 0 ? 1 : CeilDiv(num_panels, most)) {
    if (num_shrinking_ == 0) return;
    shrinking_groups_ =
        std::max({CeilDiv(kTasksPerThread * num_threads, num_shrinking_), 2 * groups_ - 1,
                  static_cast<int64_t>(std::sqrt(static_cast<double>(num_panels / unit)))});
  }
  int64_t count() const { return num_whole() * groups_ + num_last(); }
  // Those that shrink.
  int64_t num_last() const { return num_shrinking_ * shrinking_groups_; }
  // May have no panels.
  Task operator[](int64_t i) const {
    int64_t block = i / groups_;
    int64_t begin = num_panels_ * (i % groups_) / groups_;
    int64_t end = num_panels_ * (i % groups_ + 1) / groups_;
    if (block >= num_whole()) {
      i -= num_whole() * groups_;
      block = num_whole() + i % num_shrinking_;
      begin = ShrinkingBegin(i / num_shrinking_);
      end = ShrinkingBegin(i / num_shrinking_ + 1);
    } else {
      begin = begin / unit_ * unit_;
      end = end == num_panels_ ? end : end / unit_ * unit_;
    }
    const int64_t m0 = block * row_block_;
    return {m0, std::min(row_block_, m_ - m0), begin, end - begin};
  }

 private:
  int64_t num_whole() const { return num_blocks_ - num_shrinking_; }
  int64_t ShrinkingBegin(int64_t i) const {
    const int64_t c = shrinking_groups_;
    return i >= c ? num_panels_ : num_panels_ * i * (2 * c - i) / (c * c) / unit_ * unit_;
  }

  const int64_t m_, num_panels_, row_block_, unit_, num_blocks_, num_shrinking_, groups_;
  int64_t shrinking_groups_ = 0;
};

// A's piece of k as f32 in scratch memory, in the order Tile wants.
void LoadA(const Kernels& kernels, const Product& p, const Task& t, int64_t k0, int64_t depth,
           Tile& tile) {
  tile.a_k_major = p.a_transposed;
  if (!p.a_transposed && p.a.dtype == DType::kF32) {
    tile.a = F32Row(p.a, t.m0) + k0;
    tile.a_stride = p.a.row_stride;
    return;
  }
  float* a = FloatScratch(ScratchUse::kA, static_cast<size_t>(t.rows * depth));
  const int64_t outer = p.a_transposed ? depth : t.rows;
  const int64_t inner = p.a_transposed ? t.rows : depth;
  const int64_t row0 = p.a_transposed ? k0 : t.m0;
  const int64_t col0 = p.a_transposed ? t.m0 : k0;
  for (int64_t i = 0; i < outer; ++i) {
    kernels.row->convert(Sink{a + i * inner, false}, RowOf(p.a, row0 + i) + col0, inner);
  }
  tile.a = a;
  tile.a_stride = inner;
}

void LoadC(const Product& p, const Task& t, float* c, int64_t c_stride) {
  const int64_t n0 = t.p0 * kPanel;
  const int64_t n = std::min(t.panels * kPanel, p.out.cols - n0);
  for (int64_t r = 0; r < t.rows; ++r) {
    const float* from = F32Row(p.out, t.m0 + r) + n0;
    std::copy(from, from + n, c + r * c_stride);
    std::fill(c + r * c_stride + n, c + (r + 1) * c_stride, 0.0f);
  }
}

void MultiplyBy(const float* scales, int64_t n, float* c) {
  for (int64_t j = 0; j < n; ++j) c[j] *= scales[j];
}

void StoreC(const Kernels& kernels, const Product& p, const Task& t, float* c, int64_t c_stride) {
  const int64_t n0 = t.p0 * kPanel;
  const int64_t n = std::min(t.panels * kPanel, p.out.cols - n0);
  if (p.b.column_scales != nullptr) {
    for (int64_t r = 0; r < t.rows; ++r) MultiplyBy(p.b.column_scales + n0, n, c + r * c_stride);
  }
  const Source from{c, false};
  const Sink to = MutableRowOf(p.out, t.m0) + n0;
  if (!p.bias) {
    kernels.row->convert_rows(to, p.out.row_stride, from, c_stride, t.rows, n);
    return;
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    kernels.row->add(to + r * p.out.row_stride, from + r * c_stride, RowOf(p.bias, 0) + n0, n);
  }
}

void RunTask(const Kernels& kernels, const Product& p, const Task& t, int64_t depth) {
  const int64_t c_stride = t.panels * kPanel;
  const bool quantised = p.b.format != WeightFormat::kPlain;
  float* c = FloatScratch(ScratchUse::kC, static_cast<size_t>(t.rows * c_stride));
  if (p.accumulate) LoadC(p, t, c, c_stride);
  const int64_t num_tiles = CeilDiv(t.rows, kernels.gemm->max_rows);
  const int64_t panels_at_once = num_tiles == 1 ? t.panels : 1;
  for (int64_t k0 = 0; k0 < p.b.k || k0 == 0; k0 += depth) {
    Tile tile;
    tile.k = std::min(depth, p.b.k - k0);
    tile.panel_stride = p.b.panel_stride();
    tile.c_stride = c_stride;
    tile.load_c = p.accumulate || k0 > 0;
    LoadA(kernels, p, t, k0, tile.k, tile);
    const float* a = tile.a;
    for (int64_t j = 0; j < t.panels; j += panels_at_once) {
      tile.panels = p.b.Panel(t.p0 + j, k0);
      tile.num_panels = std::min(panels_at_once, t.panels - j);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t r0 = t.rows * i / num_tiles;
        tile.rows = static_cast<int>(t.rows * (i + 1) / num_tiles - r0);
        tile.a = a + r0 * (tile.a_k_major ? 1 : tile.a_stride);
        tile.c = c + r0 * c_stride + j * kPanel;
        if (quantised) {
          kernels.quant->tile(tile, p.b.format);
        } else {
          kernels.gemm->tile(tile);
        }
      }
    }
  }
  StoreC(kernels, p, t, c, c_stride);
}

constexpr int64_t kMostTiles = kRowBlock;
using LeastOfTiles = std::array<uint16_t, kMostTiles>;

// The rows of a task, tile after tile, in pieces of k one after another: each [depth][rows of the
// tile] in f32, or half of it words of gemm_dot.h where `dots` says so.
struct Rows {
  const float* data = nullptr;
  const bool* dots = nullptr;  // of each tile, where panels are pairs
};

class RowsOfTask {
 public:
  RowsOfTask(const Kernels& kernels, const Product& p, const Task& t, const RowTiles& tiles,
             int64_t depth)
      : kernels_(kernels), p_(p), t_(t), tiles_(tiles), depth_(depth) {}

  // A thread that goes on with other panels of the same rows finds them as it left them.
  Rows Prepare(uint64_t product) {
    thread_local uint64_t last_product = 0;
    thread_local int64_t last_row = 0;
    thread_local std::array<bool, kMostTiles> dots;
    STRETTO_CHECK(tiles_.count <= kMostTiles);
    a_ = FloatScratch(ScratchUse::kA, static_cast<size_t>(t_.rows * p_.b.k));
    const Rows rows{a_, dots.data()};
    if (last_product == product && last_row == t_.m0) return rows;
    last_product = product;
    last_row = t_.m0;
    const bool words = p_.b.pairs && p_.a.dtype == DType::kBF16;
    LeastOfTiles least;
    least.fill(kNoneSmall);
    if (words) InterleaveWords(least);
    for (int64_t i = 0; i < tiles_.count; ++i) {
      dots[static_cast<size_t>(i)] =
          words && (!kernels_.exact || SameBitsAsChain(least[i], p_.b.least));
      if (!dots[static_cast<size_t>(i)]) InterleaveFloats(i);
    }
    return rows;
  }

 private:
  float* Place(int64_t tile, int64_t k0, int64_t length) const {
    return a_ + t_.rows * k0 + tiles_.Begin(tile) * length;
  }

  void InterleaveWords(LeastOfTiles& least) {
    for (int64_t k0 = 0; k0 < p_.b.k; k0 += depth_) {
      const int64_t length = std::min(depth_, p_.b.k - k0);
      if (p_.a_transposed) {
        STRETTO_CHECK(tiles_.count <= DotKernels::kMostTiles);
        const Source first = RowOf(p_.a, k0) + t_.m0;
        kernels_.dot->interleave_columns(Words(0, k0, length), Bf16(first), p_.a.row_stride, tiles_,
                                         length, least.data());
        continue;
      }
      for (int64_t i = 0; i < tiles_.count; ++i) {
        const Source first = RowOf(p_.a, t_.m0 + tiles_.Begin(i)) + k0;
        least[i] =
            std::min(least[i], kernels_.dot->interleave(Words(i, k0, length), Bf16(first),
                                                        p_.a.row_stride, tiles_.Size(i), length));
      }
    }
  }
  uint32_t* Words(int64_t tile, int64_t k0, int64_t length) const {
    return reinterpret_cast<uint32_t*>(Place(tile, k0, length));
  }
  static const uint16_t* Bf16(Source s) { return static_cast<const uint16_t*>(s.data); }

  void InterleaveFloats(int64_t tile) {
    const int64_t row = t_.m0 + tiles_.Begin(tile);
    for (int64_t k0 = 0; k0 < p_.b.k; k0 += depth_) {
      const int64_t length = std::min(depth_, p_.b.k - k0);
      float* to = Place(tile, k0, length);
      if (p_.a_transposed) {
        kernels_.gemm->interleave_columns(RowOf(p_.a, k0) + row, p_.a.row_stride, tiles_.Size(tile),
                                          length, to);
      } else {
        kernels_.gemm->interleave(RowOf(p_.a, row) + k0, p_.a.row_stride, tiles_.Size(tile), length,
                                  to);
      }
    }
  }

  const Kernels& kernels_;
  const Product& p_;
  const Task& t_;
  const RowTiles& tiles_;
  const int64_t depth_;
  float* a_ = nullptr;
};

// Where a task's sums are kept: in the product itself, if they can stay as they are; else apart,
// from where whole panels without a bias leave as bf16 with the last piece of k.
struct Sums {
  float* data;
  ptrdiff_t stride;
  enum class End : uint8_t { kInPlace, kNarrowed, kStored } end;
};
Sums PlaceOfSums(const Product& p, const Task& t) {
  const int64_t n0 = t.p0 * kPanel, n = t.panels * kPanel;
  const bool scaled = p.b.column_scales == nullptr || p.b.pairs;  // by the tiles
  const bool plain = !p.bias && scaled && n0 + n <= p.out.cols;
  if (plain && p.out.dtype == DType::kF32) {
    return {MutableF32Row(p.out, t.m0) + n0, p.out.row_stride, Sums::End::kInPlace};
  }
  return {FloatScratch(ScratchUse::kC, static_cast<size_t>(t.rows * n)), n,
          plain ? Sums::End::kNarrowed : Sums::End::kStored};
}

int MaxRows(const Kernels& kernels, const Product& p) {
  return p.b.pairs ? kernels.dot->max_rows : kernels.gemm->max_rows;
}

// That the tiles of `rows` rows share their loads of A among.
int64_t PanelsAtOnce(const Kernels& kernels, const Product& p, int rows) {
  return p.b.pairs ? kernels.dot->panels_at_once(rows) : kernels.gemm->panels_at_once;
}

// Of panels that are pairs.
auto RowTilesOf(const Kernels& kernels, const PanelMatrix& b) {
  const DotKernels& dot = *kernels.dot;
  switch (b.format) {
    case WeightFormat::kInt8:
      return TakesOrder(kernels, b.k, b.format) ? dot.bytes->row_tiles_int8 : dot.row_tiles_int8;
    case WeightFormat::kFp8:
      return dot.bytes->row_tiles_fp8;
    default:
      return dot.row_tiles;
  }
}

// A task whose rows make several tiles, or whose panels are pairs.
class InterleavedTask {
 public:
  InterleavedTask(const Kernels& kernels, const Product& p, const Task& t, int64_t depth,
                  uint64_t product)
      : kernels_(kernels),
        p_(p),
        t_(t),
        depth_(depth),
        tiles_(t.rows, MaxRows(kernels, p)),
        at_once_(PanelsAtOnce(kernels, p, tiles_.Size(0))),
        a_(RowsOfTask(kernels, p, t, tiles_, depth).Prepare(product)) {}

  // Where all of A stays near, some panels are finished before the next ones, and their sums are
  // still in the first-level cache when they are stored. Else a piece of A serves all panels.
  void Run() {
    const int64_t group = IsNear(t_.rows, p_.b.k) ? std::max(at_once_, kPanelsNear) : t_.panels;
    for (int64_t j = 0; j < t_.panels; j += group) RunPanels(j, std::min(group, t_.panels - j));
  }

 private:
  void RunPanels(int64_t first, int64_t count) {
    Task part = t_;
    part.p0 += first;
    part.panels = count;
    const Sums c = Begin(part);
    for (int64_t k0 = 0; k0 < p_.b.k || k0 == 0; k0 += depth_) {
      for (int64_t j = 0; j < count; j += at_once_) {
        RunTiles(part, j, k0, c, Ahead(first, count, j + at_once_, k0));
      }
    }
    if (c.end == Sums::End::kStored) StoreC(kernels_, p_, part, c.data, c.stride);
  }

  // From panel j of these and the piece at k0 on; past the last panel is the next piece, past the
  // last piece the next panels.
  PanelsAhead Ahead(int64_t first, int64_t count, int64_t j, int64_t k0) const {
    if (j >= count) {
      j = 0;
      k0 += depth_;
    }
    if (k0 >= p_.b.k) {
      j = count;
      k0 = 0;
    }
    PanelsAhead ahead;
    ahead.num_panels = std::min(kPanelsAhead * at_once_, t_.panels - first - j);
    if (ahead.num_panels <= 0) return ahead;
    const int64_t element = p_.b.format != WeightFormat::kPlain ? 1 : (p_.b.data.bf16 ? 2 : 4);
    ahead.begin = static_cast<const char*>(p_.b.Panel(t_.p0 + first + j, k0).data);
    ahead.num_lines = std::min(depth_, p_.b.k - k0) * kPanel * element / kLineBytes;
    ahead.panel_bytes = p_.b.panel_stride() * element;
    return ahead;
  }

  Sums Begin(const Task& t) const {
    FetchOutput(t);
    const Sums c = PlaceOfSums(p_, t);
    if (p_.accumulate && c.end != Sums::End::kInPlace) LoadC(p_, t, c.data, c.stride);
    return c;
  }

  // The product's place was last written by any thread: it is this thread's own again when the sums
  // are ready.
  void FetchOutput(const Task& t) const {
    const auto element = static_cast<int64_t>(SizeOf(p_.out.dtype));
    const int64_t n0 = t.p0 * kPanel, n = std::min(t.panels * kPanel, p_.out.cols - n0);
    for (int64_t r = 0; r < t.rows; ++r) {
      const auto* row = static_cast<const char*>((MutableRowOf(p_.out, t.m0 + r) + n0).data);
      for (int64_t i = 0; i < n * element; i += kLineBytes) PrefetchForWriting(row + i);
    }
  }

  // All rows, for the panels of t from number j on that are computed at once and the piece of k
  // that begins at k0.
  void RunTiles(const Task& t, int64_t j, int64_t k0, const Sums& c, const PanelsAhead& ahead) {
    Tile tile;
    tile.k = std::min(depth_, p_.b.k - k0);
    tile.a = a_.data + t_.rows * k0;
    tile.a_k_major = true;
    tile.panels = p_.b.Panel(t.p0 + j, k0);
    tile.panel_stride = p_.b.panel_stride();
    tile.num_panels = std::min(at_once_, t.panels - j);
    tile.c = c.data + j * kPanel;
    tile.c_stride = c.stride;
    tile.load_c = p_.accumulate || k0 > 0;
    const bool last = k0 + tile.k >= p_.b.k;
    if (last && c.end != Sums::End::kStored && p_.b.column_scales != nullptr) {
      tile.scales = p_.b.column_scales + (t.p0 + j) * kPanel;
    }
    if (last && c.end == Sums::End::kNarrowed) {
      tile.out = static_cast<uint16_t*>((MutableRowOf(p_.out, t.m0) + (t.p0 + j) * kPanel).data);
      tile.out_stride = p_.out.row_stride;
    }
    if (p_.b.pairs) {
      RowTilesOf(kernels_, p_.b)(tile, tiles_, ahead, a_.dots);
    } else {
      kernels_.gemm->row_tiles(tile, tiles_, ahead);
    }
  }

  const Kernels& kernels_;
  const Product& p_;
  const Task& t_;
  const int64_t depth_;
  const RowTiles tiles_;
  const int64_t at_once_;
  const Rows a_;
};
}  // namespace

void Multiply(const Kernels& kernels, ThreadPool& pool, const Product& p) {
  const int64_t m = p.out.rows;
  if (m == 0 || p.out.cols == 0) return;
  const int max_rows = MaxRows(kernels, p);
  const Blocking b(m, p.b.k, max_rows);
  // Several tiles of rows: then interleaving A is worth its while.
  const bool several = (p.b.format == WeightFormat::kPlain || p.b.pairs) && m > max_rows;
  const bool interleaved = several || p.b.pairs;
  static std::atomic<uint64_t> num_products{0};
  const uint64_t product = num_products.fetch_add(1, std::memory_order_relaxed) + 1;
  // A tile of few rows computes four panels at once, or eight. Where rows stay near, panels are
  // finished a few at a time, whatever the size of a task.
  const bool near = several && IsNear(b.row_block, p.b.k);
  const int64_t few =
      p.b.pairs ? PanelsAtOnce(kernels, p, static_cast<int>(std::min<int64_t>(m, max_rows))) : 4;
  const Tasks tasks(m, p.b.num_panels(), b.row_block, several ? 1 : few, near ? 0 : kPanelGroup,
                    pool.num_threads());
  const auto run = [&](int64_t i) {
    const Task t = tasks[i];
    if (t.panels == 0) return;
    if (interleaved) {
      InterleavedTask(kernels, p, t, b.depth, product).Run();
    } else {
      RunTask(kernels, p, t, b.depth);
    }
  };
  pool.ParallelFor(tasks.count(), run, tasks.num_last());
}

namespace {
// A piece of B, rows from k0 on, as panels in `panels`.
PanelMatrix PackPiece(const Kernels& kernels, ThreadPool& pool, const RowProduct& p, int64_t k0,
                      int64_t depth, bool pairs) {
  const int64_t n = p.b.cols;
  void* panels = ThreadScratch(ScratchUse::kShared, PackedBytes(n, depth, p.b.dtype));
  const Sink sink{panels, p.b.dtype == DType::kBF16};
  PanelMatrix b{Source{panels, sink.bf16}, n, depth};
  std::atomic<uint16_t> least{kNoneSmall};
  const int64_t unit = pairs ? 2 : 1;
  pool.ParallelRanges(depth / unit, 64 / unit, [&](int64_t first, int64_t last) {
    const int64_t begin = first * unit, end = last * unit;
    const Source rows = RowOf(p.b, k0 + begin);
    if (!pairs) {
      return kernels.gemm->pack_panels(sink + begin * kPanel, b.panel_stride(), rows,
                                       p.b.row_stride, end - begin, n);
    }
    const uint16_t of_these = kernels.dot->pack_rows(
        static_cast<uint32_t*>(panels) + begin / 2 * kPanel, b.panel_stride() / 2,
        static_cast<const uint16_t*>(rows.data), p.b.row_stride, end - begin, n);
    uint16_t before = least.load(std::memory_order_relaxed);
    while (of_these < before && !least.compare_exchange_weak(before, of_these)) {
    }
  });
  b.pairs = pairs;
  b.least = least;
  return b;
}
}  // namespace

void MultiplyRows(const Kernels& kernels, ThreadPool& pool, const RowProduct& p) {
  const int64_t n = p.b.cols, k = p.b.rows;
  const size_t element = SizeOf(p.b.dtype);
  const bool takes_pairs =
      kernels.dot != nullptr && p.a.dtype == DType::kBF16 && p.b.dtype == DType::kBF16;
  // About 32 MiB of panels at a time; pieces of k continue the chain through `out`.
  const int64_t per_piece =
      std::max<int64_t>(
          kDepth, (int64_t{32} << 20) / std::max<int64_t>(1, CeilDiv(n, kPanel) * kPanel *
                                                                 static_cast<int64_t>(element))) /
      2 * 2;
  int64_t depth = 0;
  for (int64_t k0 = 0; k0 < k || k0 == 0; k0 += std::max<int64_t>(depth, 1)) {
    depth = std::min(per_piece, k - k0);
    // The last of an odd number of rows is a piece by itself.
    const bool pairs = takes_pairs && depth > 1;
    if (pairs) depth = depth / 2 * 2;
    const PanelMatrix b = PackPiece(kernels, pool, p, k0, depth, pairs);
    Product piece;
    piece.out = p.out;
    piece.a = p.a_transposed ? p.a.Rows(k0, depth) : p.a.Cols(k0, depth);
    piece.a_transposed = p.a_transposed;
    piece.b = b;
    piece.accumulate = p.accumulate || k0 > 0;
    Multiply(kernels, pool, piece);
  }
}
}  // namespace stretto::engine::cpu
