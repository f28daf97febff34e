#include "engine/weights/grid_codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/weights/grid_scan.h"
#include "engine/weights/range_coder.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
constexpr size_t kPiece = 1 << 14;  // elements that are compared at a time
constexpr size_t kCountEvery = 16;  // pieces of kCountRun elements of which one is counted
constexpr size_t kCountRun = 256;
constexpr int kUnary = 15;  // of grid steps

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("delta: ", what));
}

// t(x) = 1 − 2^(−x/kHalfLife) in units of 2^−kFrequencyBits, from integers alone.
class ChangeTable {
 public:
  static const ChangeTable& Get() {
    static const ChangeTable& table = *new ChangeTable;
    return table;
  }
  uint32_t operator[](uint64_t x) const { return table_[x]; }
  // The largest x with table[x] <= at.
  uint32_t Find(uint32_t at) const {
    uint32_t x = coarse_[at >> kCoarseShift];
    while (table_[x + 1] <= at) ++x;
    return x;
  }

 private:
  ChangeTable() : table_(kMostHazard + 2), coarse_(1 << kCoarseBits) {
    constexpr uint64_t kFactor = 18445183311048607332u;  // 2^64 · 2^(−1/kHalfLife), rounded
    uint64_t power = ~uint64_t{0};
    for (uint32_t x = 0; x <= kMostHazard; ++x) {
      table_[x] = static_cast<uint32_t>((~power) >> (64 - kFrequencyBits));
      power = static_cast<uint64_t>((static_cast<unsigned __int128>(power) * kFactor) >> 64);
    }
    table_[kMostHazard + 1] = ~uint32_t{0};
    uint32_t x = 0;
    for (uint32_t i = 0; i < coarse_.size(); ++i) {
      while (table_[x + 1] <= i << kCoarseShift) ++x;
      coarse_[i] = x;
    }
  }
  static constexpr int kCoarseBits = 14, kCoarseShift = kFrequencyBits - kCoarseBits;
  std::vector<uint32_t> table_, coarse_;
};

constexpr uint32_t kOne = 1u << kFrequencyBits;

// Elements [begin, end) of which at most one is said to change at a time.
struct Window {
  Window(const Hazards& hazards, absl::Span<const uint16_t> elements, size_t from) : begin(from) {
    uint64_t rest = kHalfLife;
    // More elements than this never add up to so little unless most hazards are 0.
    end = from + WalkHazards(hazards, elements.subspan(from, kLongest), rest);
    hazard = kHalfLife - rest;
    if (end == from) hazard = hazards.Of(elements[end++]);
  }
  size_t begin, end;
  uint64_t hazard;

 private:
  static constexpr size_t kLongest = 1 << 14;
};

// What both sides learn on the way.
struct Models {
  AdaptiveBit negative[2];  // by the weight's sign
  std::array<std::array<AdaptiveBit, kUnary>, kNumClasses> larger;
};

int BitLength(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

void EncodeStep(RangeEncoder& coder, Models& models, int c, uint16_t weight, int64_t step) {
  coder.EncodeBit(models.negative[weight >> 15], step < 0);
  const auto more = static_cast<uint64_t>((step < 0 ? -step : step) - 1);
  for (int i = 0; i < kUnary; ++i) {
    const bool larger = more > static_cast<uint64_t>(i);
    coder.EncodeBit(models.larger[c][i], larger);
    if (!larger) return;
  }
  const uint64_t rest = more - kUnary + 1;  // > 0
  const int length = BitLength(rest);
  coder.EncodeEven(0, length - 1);
  coder.EncodeEven(rest, length);
}

// 0 for what no encoder writes.
int64_t DecodeStep(RangeDecoder& coder, Models& models, int c, uint16_t weight) {
  const bool negative = coder.DecodeBit(models.negative[weight >> 15]);
  uint64_t size = 1;
  for (int i = 0; i < kUnary; ++i) {
    if (!coder.DecodeBit(models.larger[c][i])) return negative ? -static_cast<int64_t>(size) : size;
    ++size;
  }
  int zeros = 0;
  while (coder.DecodeEven(1) == 0) {
    if (++zeros > 16) return 0;
  }
  size += (uint64_t{1} << zeros | coder.DecodeEven(zeros)) - 1;
  return negative ? -static_cast<int64_t>(size) : static_cast<int64_t>(size);
}

// Counts of elements by exponent.
using Counts = std::array<uint64_t, 256>;

// Of a part of all elements, scaled to all.
Counts EstimateCounts(absl::Span<const uint16_t> elements) {
  Counts counts = {};
  const bool all = elements.size() < kCountRun * kCountEvery * 16;
  const size_t stride = all ? kCountRun : kCountRun * kCountEvery;
  uint64_t seen = 0;
  for (size_t begin = 0; begin < elements.size(); begin += stride) {
    const size_t end = std::min(begin + kCountRun, elements.size());
    for (size_t i = begin; i < end; ++i) ++counts[elements[i] >> 7 & 0xff];
    seen += end - begin;
  }
  for (uint64_t& count : counts) count = count * elements.size() / seen;
  return counts;
}

Hazards FindHazards(absl::Span<const uint16_t> base, absl::Span<const uint32_t> changed) {
  const Counts all = EstimateCounts(base);
  Counts changes = {};
  for (uint32_t i : changed) ++changes[base[i] >> 7 & 0xff];
  Hazards hazards;
  // The last class is the largest exponent of which there are more than a few.
  int last = 255;
  for (uint64_t above = 0; last > kNumClasses - 1; --last) {
    above += std::max(all[last], changes[last]);
    if (above * 4096 > base.size()) break;
  }
  hazards.first_exponent = static_cast<uint8_t>(last - (kNumClasses - 1));
  std::array<uint64_t, kNumClasses> total = {}, moved = {};
  for (int e = 0; e < 256; ++e) {
    const int c = hazards.ClassOf(static_cast<uint16_t>(e << 7));
    total[c] += all[e];
    moved[c] += changes[e];
  }
  for (int c = 0; c < kNumClasses; ++c) {
    if (moved[c] == 0) continue;
    const double of = static_cast<double>(std::max(total[c], moved[c]));
    const double stay = std::max(1.0 - static_cast<double>(moved[c]) / of, 0.25 / of);
    const double hazard = std::round(-std::log2(stay) * kHalfLife);
    hazards.SetClass(c, static_cast<uint32_t>(std::clamp(hazard, 1.0, double{kMostHazard})));
  }
  return hazards;
}
}  // namespace

Bytes EncodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next) {
  if (base.size() > UINT32_MAX) return {};
  std::vector<uint32_t> changed;
  for (size_t begin = 0; begin < base.size(); begin += kPiece) {
    FindChanges(base.subspan(begin, kPiece), next.subspan(begin, kPiece), begin, changed);
  }
  const Hazards hazards = FindHazards(base, changed);
  Bytes out;
  PutVarint(out, changed.size());
  out.push_back(hazards.first_exponent);
  for (int c = 0; c < kNumClasses; ++c) PutVarint(out, hazards.OfClass(c));
  const ChangeTable& table = ChangeTable::Get();
  Models models;
  Bytes coded;
  RangeEncoder coder(&coded);
  size_t from = 0;
  for (uint32_t i : changed) {
    Window window(hazards, base, from);
    for (; i >= window.end; window = Window(hazards, base, window.end)) {
      coder.Encode(table[window.hazard], kOne - table[window.hazard]);
    }
    const int c = hazards.ClassOf(base[i]);
    const uint64_t begin = SumHazards(hazards, base.subspan(window.begin, i - window.begin));
    coder.Encode(table[begin], table[begin + hazards.OfClass(c)] - table[begin]);
    EncodeStep(coder, models, c, base[i], ToGrid(next[i]) - ToGrid(base[i]));
    from = i + 1;
  }
  coder.Finish();
  PutVarint(out, coded.size());
  out.insert(out.end(), coded.begin(), coded.end());
  return out;
}

namespace {
class GridDecoder {
 public:
  GridDecoder(absl::Span<const uint16_t> base, const Hazards& hazards,
              absl::Span<const uint8_t> coded, absl::Span<uint16_t> out)
      : base_(base), hazards_(hazards), coder_(coded), out_(out) {}

  absl::Status Run(uint64_t count) {
    for (; count > 0; --count) RETURN_IF_ERROR(Change());
    CopyTo(base_.size());
    if (!coder_.AtEnd()) return Corrupt("more bytes than its changes need");
    return absl::OkStatus();
  }

 private:
  absl::Status Change() {
    while (at_ < base_.size()) {
      const Window window(hazards_, base_, at_);
      CopyTo(window.end);
      const uint32_t symbol = coder_.Peek();
      const uint32_t none = table_[window.hazard];
      if (symbol < none) return ChangeWithin(window, symbol);
      coder_.Take(none, kOne - none);
      at_ = window.end;
    }
    return Corrupt("a change lies outside the tensor");
  }

  absl::Status ChangeWithin(const Window& window, uint32_t symbol) {
    const uint32_t place_of_symbol = table_.Find(symbol);
    uint64_t rest = place_of_symbol;
    at_ += WalkHazards(hazards_, base_.subspan(at_, window.end - at_), rest);
    const int c = hazards_.ClassOf(base_[at_]);
    const uint64_t begin = place_of_symbol - rest;
    coder_.Take(table_[begin], table_[begin + hazards_.OfClass(c)] - table_[begin]);
    const int64_t step = DecodeStep(coder_, models_, c, base_[at_]);
    const int64_t place = ToGrid(base_[at_]) + step;
    if (step == 0 || place < 0 || place > UINT16_MAX) return Corrupt("a step leads off the grid");
    CopyTo(at_ + 1);
    out_[at_++] = FromGrid(static_cast<uint16_t>(place));
    return absl::OkStatus();
  }

  void CopyTo(size_t end) {
    if (end <= copied_) return;
    std::memcpy(out_.data() + copied_, base_.data() + copied_, (end - copied_) * sizeof(uint16_t));
    copied_ = end;
  }

  const absl::Span<const uint16_t> base_;
  const Hazards& hazards_;
  const ChangeTable& table_ = ChangeTable::Get();
  RangeDecoder coder_;
  Models models_;
  const absl::Span<uint16_t> out_;
  size_t at_ = 0, copied_ = 0;
};
}  // namespace

absl::Status DecodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                        absl::Span<uint16_t> out) {
  uint64_t count = 0;
  if (!GetVarint(bytes, count) || bytes.empty()) return Corrupt("its header is cut off");
  if (count == 0 || count > base.size()) return Corrupt("an impossible number of changes");
  Hazards hazards;
  hazards.first_exponent = bytes[0];
  bytes.remove_prefix(1);
  for (int c = 0; c < kNumClasses; ++c) {
    uint64_t hazard = 0;
    if (!GetVarint(bytes, hazard)) return Corrupt("its header is cut off");
    if (hazard > kMostHazard) return Corrupt("an impossible hazard");
    hazards.SetClass(c, static_cast<uint32_t>(hazard));
  }
  uint64_t size = 0;
  if (!GetVarint(bytes, size)) return Corrupt("its header is cut off");
  if (size != bytes.size()) return Corrupt("it is cut off or followed by something else");
  if (!bytes.empty() && bytes.back() == 0) return Corrupt("more bytes than its changes need");
  return GridDecoder(base, hazards, bytes, out).Run(count);
}
}  // namespace stretto::engine
