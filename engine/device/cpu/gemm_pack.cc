// Weights as panels: as they are, in pairs of k, or quantised.
#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "engine/device/cpu/gemm.h"
#include "engine/device/cpu/memory.h"

namespace stretto::engine::cpu {
namespace {
constexpr size_t kPastCaches = size_t{512} << 10;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
}  // namespace

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

namespace {
// A panel of one weight, of rows that stand together.
class PanelPacker {
 public:
  PanelPacker(const Kernels& kernels, const PanelMatrix& b) : kernels_(kernels), b_(b) {}

  void Pack(int64_t panel, Source rows, ptrdiff_t row_stride, int64_t num_rows) {
    const int64_t begin = panel * kPanel * b_.k;
    const Sink to = Sink{const_cast<void*>(b_.data.data), b_.data.bf16} + begin;
    if (!b_.pairs) return kernels_.gemm->pack_transposed(to, rows, row_stride, b_.k, num_rows);
    const uint16_t least =
        kernels_.dot->pack(static_cast<uint32_t*>(to.data), static_cast<const uint16_t*>(rows.data),
                           row_stride, b_.k, num_rows, past_caches_);
    uint16_t before = least_.load(std::memory_order_relaxed);
    while (least < before && !least_.compare_exchange_weak(before, least)) {
    }
  }
  uint16_t least() const { return least_; }

 private:
  const Kernels& kernels_;
  const PanelMatrix& b_;
  // What is this large has left the caches before it is read.
  const bool past_caches_ = static_cast<size_t>(b_.n * b_.k) * sizeof(uint16_t) >= kPastCaches;
  std::atomic<uint16_t> least_{kNoneSmall};
};
}  // namespace

bool TakesPairs(const Kernels& kernels, int64_t k, DType dtype, WeightFormat format) {
  const bool plain = format == WeightFormat::kPlain && dtype == DType::kBF16;
  if (kernels.dot == nullptr || k % 2 != 0) return false;
  return plain || format == WeightFormat::kInt8 || TakesOrder(kernels, k, format);
}

bool TakesOrder(const Kernels& kernels, int64_t k, WeightFormat format) {
  const bool bytes = format == WeightFormat::kInt8 || format == WeightFormat::kFp8;
  return bytes && kernels.dot != nullptr && kernels.dot->bytes != nullptr && k % 4 == 0;
}

uint16_t PackWeight(const Kernels& kernels, ThreadPool& pool, const PanelMatrix& b,
                    absl::Span<const Tensor> parts_NK) {
  const int64_t k = b.k;
  const size_t element = b.data.bf16 ? 2 : 4;
  PanelPacker packer(kernels, b);
  pool.ParallelFor(b.num_panels(), [&](int64_t panel) {
    const int64_t begin = panel * kPanel, rows = std::min<int64_t>(kPanel, b.n - begin);
    int64_t first = 0;  // of the part
    for (const Tensor& part : parts_NK) {
      if (begin >= first && begin + rows <= first + part.rows) {
        return packer.Pack(panel, RowOf(part, begin - first), part.row_stride, rows);
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
    packer.Pack(panel, Source{rows_together, b.data.bf16}, k, rows);
  });
  return packer.least();
}

QuantLayout::QuantLayout(int64_t n, int64_t k, WeightFormat format) {
  const auto panels = static_cast<size_t>(CeilDiv(n, kPanel));
  scales_offset = (panels * QuantPanelBytes(k, format) + 63) / 64 * 64;
  bytes = scales_offset + (format == WeightFormat::kInt4 ? 0 : panels * kPanel * sizeof(float));
}

namespace {
// One row of each column of a panel, as f32; nullptr past the last.
using PanelRows = std::array<const float*, kPanel>;

void QuantizeBytesPanel(const Kernels& kernels, const PanelRows& rows, int64_t k,
                        WeightFormat format, int8_t* panel, float* scales) {
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
  if (TakesOrder(kernels, k, format)) {
    return kernels.dot->bytes->order(q, k, format == WeightFormat::kInt8, panel);
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
      QuantizeBytesPanel(kernels, rows, k, format, panel, scales + p * kPanel);
    }
  });
}
}  // namespace stretto::engine::cpu
