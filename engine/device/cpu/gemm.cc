#include "engine/device/cpu/gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "base/check.h"
#include "engine/device/cpu/memory.h"

namespace stretto::engine::cpu {
namespace {
constexpr int64_t kFewRows = 16;            // up to here K is walked in one piece
constexpr int64_t kRowBlock = 96;           // rows of A that share one pass over B
constexpr int64_t kDepth = 320;             // longest piece of K
constexpr int64_t kDepthUnit = kInt4Group;  // pieces of K begin where groups of int4 do
constexpr int64_t kPanelGroup = 32;         // panels of one task, at most
constexpr int64_t kPanelsNear = 4;          // that are finished together where A is near
constexpr int64_t kNearBytes = 256 << 10;   // half a second-level cache of today

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The panels of a product in groups, each one task. Where rows make one block, groups shrink from
// twice their mean to nothing: threads take them by turns, and end together.
class PanelGroups {
 public:
  PanelGroups(int64_t num_panels, int64_t unit, int num_threads, int64_t num_row_blocks)
      : num_panels_(num_panels), unit_(unit), shrinking_(num_row_blocks == 1 && num_threads > 1) {
    count_ = CeilDiv((shrinking_ ? 2 : 1) * num_panels, kPanelGroup);
    const int64_t wanted = (shrinking_ ? 3 : 8) * int64_t{num_threads};
    if (num_threads > 1) count_ = std::max(count_, CeilDiv(wanted, num_row_blocks));
    if (shrinking_) return;
    size_ = CeilDiv(CeilDiv(num_panels, count_), unit) * unit;
    count_ = CeilDiv(num_panels, size_);
  }
  int64_t count() const { return count_; }
  // May be the end of the group, too.
  int64_t Begin(int64_t i) const {
    if (i >= count_) return num_panels_;
    if (!shrinking_) return i * size_;
    return num_panels_ * i * (2 * count_ - i) / (count_ * count_) / unit_ * unit_;
  }

 private:
  const int64_t num_panels_, unit_;
  const bool shrinking_;
  int64_t count_, size_ = 0;
};

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

// The tiles of a task: rows as equal as can be.
struct RowTiles {
  RowTiles(int64_t rows, int64_t max_rows)
      : count(CeilDiv(rows, max_rows)), size_(rows / count), num_larger_(rows % count) {}
  const int64_t count;
  int64_t Begin(int64_t i) const { return i * size_ + std::min(i, num_larger_); }
  int Size(int64_t i) const { return static_cast<int>(size_ + (i < num_larger_ ? 1 : 0)); }

 private:
  const int64_t size_, num_larger_;
};

// The rows of a task as f32: pieces of k one after another, each tile after tile, each [depth][rows
// of the tile]. A thread that goes on with other panels of the same rows finds them as it left
// them.
const float* InterleaveA(const Kernels& kernels, const Product& p, const Task& t,
                         const RowTiles& tiles, int64_t depth, uint64_t product) {
  thread_local uint64_t last_product = 0;
  thread_local int64_t last_row = 0;
  float* a = FloatScratch(ScratchUse::kA, static_cast<size_t>(t.rows * p.b.k));
  if (last_product == product && last_row == t.m0) return a;
  last_product = product;
  last_row = t.m0;
  for (int64_t k0 = 0; k0 < p.b.k; k0 += depth) {
    const int64_t length = std::min(depth, p.b.k - k0);
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t row = t.m0 + tiles.Begin(i);
      float* to = a + t.rows * k0 + tiles.Begin(i) * length;
      if (p.a_transposed) {
        kernels.gemm->interleave_columns(RowOf(p.a, k0) + row, p.a.row_stride, tiles.Size(i),
                                         length, to);
      } else {
        kernels.gemm->interleave(RowOf(p.a, row) + k0, p.a.row_stride, tiles.Size(i), length, to);
      }
    }
  }
  return a;
}

// Walks ahead over what a task will read of B: as many lines at a time as one tile can fetch.
class Lookahead {
 public:
  Lookahead(const Product& p, const Task& t, int64_t depth)
      : p_(p),
        t_(t),
        lines_(depth / kKPerLine),
        panel_lines_(depth * kPanel * (p.b.data.bf16 ? 2 : 4) / kLineBytes) {}
  // Begins with number `panel` of the task at k0; past the last of either, with nothing.
  void Begin(int64_t panel, int64_t k0) {
    panel_ = panel;
    k0_ = k0;
    line_ = 0;
    Find();
  }
  const void* Next() {
    if (begin_ == nullptr) return nullptr;
    const char* result = begin_ + line_ * kLineBytes;
    line_ += lines_;
    if (line_ >= panel_lines_) {
      line_ = 0;
      ++panel_;
      Find();
    }
    return result;
  }

 private:
  void Find() {
    const bool any = lines_ > 0 && panel_ < t_.panels && k0_ < p_.b.k;
    begin_ = any ? static_cast<const char*>(p_.b.Panel(t_.p0 + panel_, k0_).data) : nullptr;
  }

  const Product& p_;
  const Task& t_;
  const int64_t lines_, panel_lines_;
  int64_t panel_ = 0, k0_ = 0, line_ = 0;
  const char* begin_ = nullptr;
};

// Where a task's sums are kept: in the product itself, if they can stay as they are.
struct Sums {
  float* data;
  ptrdiff_t stride;
  bool in_place;
};
Sums PlaceOfSums(const Product& p, const Task& t) {
  const int64_t n0 = t.p0 * kPanel, n = t.panels * kPanel;
  if (p.out.dtype == DType::kF32 && !p.bias && p.b.column_scales == nullptr &&
      n0 + n <= p.out.cols) {
    return {MutableF32Row(p.out, t.m0) + n0, p.out.row_stride, true};
  }
  return {FloatScratch(ScratchUse::kC, static_cast<size_t>(t.rows * n)), n, false};
}

// A task whose rows make several tiles.
class InterleavedTask {
 public:
  InterleavedTask(const Kernels& kernels, const Product& p, const Task& t, int64_t depth,
                  uint64_t product)
      : kernels_(kernels),
        p_(p),
        t_(t),
        depth_(depth),
        at_once_(kernels.gemm->panels_at_once),
        tiles_(t.rows, kernels.gemm->max_rows),
        a_(InterleaveA(kernels, p, t, tiles_, depth, product)),
        ahead_(p, t, std::min(depth, p.b.k)) {}

  // Where all of A stays near, some panels are finished before the next ones, and their sums are
  // still in the first-level cache when they are stored. Else a piece of A serves all panels.
  void Run() {
    const bool near = t_.rows * p_.b.k * static_cast<int64_t>(sizeof(float)) <= kNearBytes;
    const int64_t group = near ? std::max(at_once_, kPanelsNear) : t_.panels;
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
        LookAhead(first, count, j + at_once_, k0);
        RunTiles(part, j, k0, c);
      }
    }
    if (!c.in_place) StoreC(kernels_, p_, part, c.data, c.stride);
  }

  // To panel j of these and the piece at k0; past the last panel is the next piece, past the last
  // piece the next panels.
  void LookAhead(int64_t first, int64_t count, int64_t j, int64_t k0) {
    if (j >= count) {
      j = 0;
      k0 += depth_;
    }
    if (k0 >= p_.b.k) {
      j = count;
      k0 = 0;
    }
    ahead_.Begin(first + j, k0);
  }

  Sums Begin(const Task& t) const {
    FetchOutput(t);
    const Sums c = PlaceOfSums(p_, t);
    if (p_.accumulate && !c.in_place) LoadC(p_, t, c.data, c.stride);
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
  void RunTiles(const Task& t, int64_t j, int64_t k0, const Sums& c) {
    Tile tile;
    tile.k = std::min(depth_, p_.b.k - k0);
    tile.a_k_major = true;
    tile.panels = p_.b.Panel(t.p0 + j, k0);
    tile.panel_stride = p_.b.panel_stride();
    tile.num_panels = std::min(at_once_, t.panels - j);
    tile.c_stride = c.stride;
    tile.load_c = p_.accumulate || k0 > 0;
    for (int64_t i = 0; i < tiles_.count; ++i) {
      const int64_t row = tiles_.Begin(i);
      tile.ahead = ahead_.Next();
      tile.rows = tiles_.Size(i);
      tile.a = a_ + t_.rows * k0 + row * tile.k;
      tile.a_stride = tile.rows;
      tile.c = c.data + row * c.stride + j * kPanel;
      kernels_.gemm->tile(tile);
    }
  }

  const Kernels& kernels_;
  const Product& p_;
  const Task& t_;
  const int64_t depth_, at_once_;
  const RowTiles tiles_;
  const float* const a_;
  Lookahead ahead_;
};
}  // namespace

void Multiply(const Kernels& kernels, ThreadPool& pool, const Product& p) {
  const int64_t m = p.out.rows;
  if (m == 0 || p.out.cols == 0) return;
  const Blocking b(m, p.b.k, kernels.gemm->max_rows);
  // Several tiles of rows: then interleaving A is worth its while.
  const bool interleaved = p.b.format == WeightFormat::kPlain && m > kernels.gemm->max_rows;
  static std::atomic<uint64_t> num_products{0};
  const uint64_t product = num_products.fetch_add(1, std::memory_order_relaxed) + 1;
  // A tile of few rows computes up to four panels at once.
  const PanelGroups groups(p.b.num_panels(), m > kernels.gemm->max_rows ? 1 : 4, pool.num_threads(),
                           b.num_row_blocks);
  pool.ParallelFor(b.num_row_blocks * groups.count(), [&](int64_t i) {
    Task t;
    t.m0 = i / groups.count() * b.row_block;
    t.rows = std::min(b.row_block, m - t.m0);
    t.p0 = groups.Begin(i % groups.count());
    t.panels = groups.Begin(i % groups.count() + 1) - t.p0;
    if (t.panels == 0) return;
    if (interleaved) {
      InterleavedTask(kernels, p, t, b.depth, product).Run();
    } else {
      RunTask(kernels, p, t, b.depth);
    }
  });
}

size_t QuantPanelBytes(int64_t k, WeightFormat format) {
  return static_cast<size_t>(
      format == WeightFormat::kInt4 ? CeilDiv(k, kInt4Group) * kInt4GroupBytes : k * kPanel);
}

Source PanelMatrix::Panel(int64_t p, int64_t k0) const {
  if (format == WeightFormat::kPlain) return data + (p * panel_stride() + k0 * kPanel);
  const auto* bytes = static_cast<const int8_t*>(data.data);
  return {bytes + p * panel_stride() + QuantPanelBytes(k0, format), false};
}

size_t PackedBytes(int64_t n, int64_t k, DType dtype) {
  return static_cast<size_t>(CeilDiv(n, kPanel) * kPanel * k) * SizeOf(dtype);
}

void PackWeight(const Kernels& kernels, ThreadPool& pool, void* data,
                absl::Span<const Tensor> parts_NK) {
  int64_t n = 0;
  for (const Tensor& part : parts_NK) n += part.rows;
  const int64_t k = parts_NK[0].cols;
  const bool bf16 = parts_NK[0].dtype == DType::kBF16;
  const size_t element = bf16 ? 2 : 4;
  pool.ParallelFor(CeilDiv(n, kPanel), [&](int64_t panel) {
    const int64_t begin = panel * kPanel, rows = std::min<int64_t>(kPanel, n - begin);
    const Sink to = Sink{data, bf16} + begin * k;
    int64_t first = 0;  // of the part
    for (const Tensor& part : parts_NK) {
      if (begin >= first && begin + rows <= first + part.rows) {
        kernels.gemm->pack_transposed(to, RowOf(part, begin - first), part.row_stride, k, rows);
        return;
      }
      first += part.rows;
    }
    // The panel crosses parts: bring its rows together first.
    char* rows_together = static_cast<char*>(
        ThreadScratch(ScratchUse::kMore, static_cast<size_t>(rows * k) * element));
    first = 0;
    for (const Tensor& part : parts_NK) {
      for (int64_t r = std::max(begin, first); r < std::min(begin + rows, first + part.rows); ++r) {
        const char* from = static_cast<const char*>(RowOf(part, r - first).data);
        std::copy(from, from + k * element, rows_together + (r - begin) * k * element);
      }
      first += part.rows;
    }
    kernels.gemm->pack_transposed(to, Source{rows_together, bf16}, k, k, rows);
  });
}

QuantLayout::QuantLayout(int64_t n, int64_t k, WeightFormat format) {
  const auto panels = static_cast<size_t>(CeilDiv(n, kPanel));
  scales_offset = (panels * QuantPanelBytes(k, format) + 63) / 64 * 64;
  bytes = scales_offset + (format == WeightFormat::kInt4 ? 0 : panels * kPanel * sizeof(float));
}

namespace {
// One row of each column of a panel, as f32; nullptr past the last.
using PanelRows = std::array<const float*, kPanel>;

void QuantizeBytesPanel(const PanelRows& rows, int64_t k, WeightFormat format, int8_t* panel,
                        float* scales) {
  auto* q = static_cast<int8_t*>(ThreadScratch(ScratchUse::kC, static_cast<size_t>(k * kPanel)));
  for (int64_t j = 0; j < kPanel; ++j) {
    scales[j] = 0;
    if (rows[j] == nullptr) {
      std::fill(q + j * k, q + (j + 1) * k, int8_t{0});
    } else if (format == WeightFormat::kInt8) {
      scales[j] = QuantizeInt8(rows[j], k, q + j * k);
    } else {
      scales[j] = QuantizeFp8(rows[j], k, q + j * k);
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < kPanel; ++j) panel[i * kPanel + j] = q[j * k + i];
  }
}

void QuantizeInt4Panel(const Kernels& kernels, const PanelRows& rows, int64_t k, int8_t* panel) {
  std::fill(panel, panel + QuantPanelBytes(k, WeightFormat::kInt4), int8_t{0});
  for (int64_t k0 = 0; k0 < k; k0 += kInt4Group) {
    int8_t* group = panel + k0 / kInt4Group * kInt4GroupBytes;
    auto* scales = reinterpret_cast<uint16_t*>(group);
    int8_t q[kPanel][kInt4Group] = {};
    const int64_t count = std::min(kInt4Group, k - k0);
    for (int64_t j = 0; j < kPanel; ++j) {
      if (rows[j] == nullptr) continue;
      scales[kernels.gemm->bf16_slot[j]] = QuantizeInt4Group(rows[j] + k0, count, q[j]);
    }
    constexpr int64_t kHalf = kPanel / 2;
    int8_t* bytes = group + 2 * kPanel;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < kHalf; ++j) {
        bytes[i * kHalf + j] =
            static_cast<int8_t>((q[j][i] & 15) | (static_cast<int>(q[j + kHalf][i]) << 4));
      }
    }
  }
}
}  // namespace

void QuantizeWeight(const Kernels& kernels, ThreadPool& pool, void* data, WeightFormat format,
                    absl::Span<const Tensor> parts_NK) {
  std::vector<Source> row_of;
  for (const Tensor& part : parts_NK) {
    for (int64_t r = 0; r < part.rows; ++r) row_of.push_back(RowOf(part, r));
  }
  const auto n = static_cast<int64_t>(row_of.size());
  const int64_t k = parts_NK[0].cols;
  const QuantLayout layout(n, k, format);
  auto* panels = static_cast<int8_t*>(data);
  auto* scales = reinterpret_cast<float*>(panels + layout.scales_offset);
  pool.ParallelFor(CeilDiv(n, kPanel), [&](int64_t p) {
    float* wide = FloatScratch(ScratchUse::kA, static_cast<size_t>(k * kPanel));
    PanelRows rows = {};
    for (int64_t j = 0; j < std::min<int64_t>(kPanel, n - p * kPanel); ++j) {
      kernels.row->convert(Sink{wide + j * k, false}, row_of[p * kPanel + j], k);
      rows[j] = wide + j * k;
    }
    int8_t* panel = panels + static_cast<size_t>(p) * QuantPanelBytes(k, format);
    if (format == WeightFormat::kInt4) {
      QuantizeInt4Panel(kernels, rows, k, panel);
    } else {
      QuantizeBytesPanel(rows, k, format, panel, scales + p * kPanel);
    }
  });
}

void MultiplyRows(const Kernels& kernels, ThreadPool& pool, const RowProduct& p) {
  const int64_t n = p.b.cols, k = p.b.rows;
  const size_t element = SizeOf(p.b.dtype);
  // About 32 MiB of panels at a time; pieces of k continue the chain through `out`.
  const int64_t per_piece = std::max<int64_t>(
      kDepth, (int64_t{32} << 20) / std::max<int64_t>(1, CeilDiv(n, kPanel) * kPanel *
                                                             static_cast<int64_t>(element)));
  for (int64_t k0 = 0; k0 < k || k0 == 0; k0 += per_piece) {
    const int64_t depth = std::min(per_piece, k - k0);
    void* panels = ThreadScratch(ScratchUse::kShared, PackedBytes(n, depth, p.b.dtype));
    const Sink sink{panels, p.b.dtype == DType::kBF16};
    PanelMatrix b{Source{panels, sink.bf16}, n, depth};
    pool.ParallelRanges(depth, 64, [&](int64_t begin, int64_t end) {
      kernels.gemm->pack_panels(sink + begin * kPanel, b.panel_stride(), RowOf(p.b, k0 + begin),
                                p.b.row_stride, end - begin, n);
    });
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
