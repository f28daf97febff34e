#include "engine/weights/grid_codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/weights/change_table.h"
#include "engine/weights/grid_scan.h"
#include "engine/weights/range_coder.h"
#include "engine/weights/step_model.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
constexpr size_t kPiece = 4096;  // elements
constexpr size_t kMaxGroups = kPiece / kGroup;
constexpr int kMaxWindowLog = 7;  // of groups: a piece
static_assert(kMaxGroups == 1 << kMaxWindowLog);
constexpr size_t kCountEvery = 64;  // pieces of kCountRun elements of which one is counted
constexpr size_t kCountRun = 256;

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("delta: ", what));
}

constexpr uint32_t kOne = 1u << kFrequencyBits;

// What both sides know beforehand.
struct Plan {
  Hazards hazards;
  int window_log = 0;

  size_t WindowGroups() const { return size_t{1} << window_log; }
};

// What both sides learn on the way.
struct Models {
  std::array<AdaptiveBit, kNumClasses> dense_changed;
  StepModel step;
};

// A way through one piece, from change to change within a window; hazards are counted from the
// beginning of the window.
class Walk {
 public:
  // `sums`: of the piece's groups.
  Walk(const Hazards& hazards, absl::Span<const uint16_t> piece, const uint32_t* sums)
      : hazards_(hazards), piece_(piece), sums_(sums) {}
  size_t num_groups() const { return (piece_.size() + kGroup - 1) / kGroup; }

  void StartWindow(size_t group, size_t num) {
    group_ = group;
    before_group_ = begin_ = total_ = 0;
    at_ = group * kGroup;
    window_end_ = std::min(piece_.size(), (group + num) * kGroup);
    const size_t end = std::min(num_groups(), group + num);
    for (size_t g = group; g < end; ++g) total_ += sums_[g];
    StartStretch();
  }
  bool AtEnd() const { return begin_ == total_; }

  // Of the stretch from the last change on, of which one symbol tells.
  uint32_t hazard() const { return hazard_; }
  size_t stretch_end() const { return stretch_end_; }
  void SkipStretch() {
    at_ = stretch_end_;
    begin_ += hazard_;
    StartStretch();
  }

  struct Place {
    uint32_t begin, size;  // hazards before it from the last change on, and its own
  };
  // Of element i of the stretch.
  Place PlaceOf(size_t i) {
    while (i >= (group_ + 1) * kGroup) before_group_ += sums_[group_++];
    uint32_t before = before_group_;
    for (size_t j = group_ * kGroup; j < i; ++j) before += hazards_.Of(piece_[j]);
    return {before - begin_, hazards_.Of(piece_[i])};
  }
  // The element at hazard x < hazard() of the stretch.
  size_t Find(uint32_t x, Place& place) {
    const uint32_t target = begin_ + x;
    while (before_group_ + sums_[group_] <= target) before_group_ += sums_[group_++];
    size_t i = group_ * kGroup;
    uint32_t before = before_group_, own = hazards_.Of(piece_[i]);
    while (before + own <= target) {
      before += own;
      own = hazards_.Of(piece_[++i]);
    }
    place = {before - begin_, own};
    return i;
  }
  void Take(size_t i, const Place& place) {
    begin_ += place.begin + place.size;
    at_ = i + 1;
    StartStretch();
  }

 private:
  void StartStretch() {
    hazard_ = total_ - begin_;
    stretch_end_ = window_end_;
    if (hazard_ <= ChangeTable::kMostOfStretch) return;
    hazard_ = 0;
    for (stretch_end_ = at_; stretch_end_ < window_end_; ++stretch_end_) {
      const uint32_t own = hazards_.Of(piece_[stretch_end_]);
      if (hazard_ + own > ChangeTable::kMostOfStretch) break;
      hazard_ += own;
    }
  }

  const Hazards& hazards_;
  const absl::Span<const uint16_t> piece_;
  const uint32_t* const sums_;
  size_t group_ = 0, at_ = 0, window_end_ = 0, stretch_end_ = 0;
  uint32_t before_group_ = 0, begin_ = 0, total_ = 0, hazard_ = 0;
};

// What is known of a piece before its changes are.
struct Scan {
  void Of(const Plan& plan, absl::Span<const uint16_t> piece, uint16_t* copy = nullptr) {
    num_dense = ScanGroups(plan.hazards, piece, sums.data(), dense_places.data(), copy);
  }
  absl::Span<const uint32_t> dense() const { return {dense_places.data(), num_dense}; }

  std::array<uint32_t, kMaxGroups> sums;
  std::array<uint32_t, kPiece> dense_places;
  size_t num_dense = 0;
};

// Counts of elements by exponent.
using Counts = std::array<uint64_t, 256>;

// Of a part of all elements, scaled to all.
Counts EstimateCounts(absl::Span<const uint16_t> elements) {
  Counts counts = {};
  const bool all = elements.size() < kCountRun * kCountEvery * 4;
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

// The exponent of the first class: the last is the largest of which there are more than a few.
uint8_t FirstExponent(const Counts& all, const Counts& changes, size_t size) {
  int last = 255;
  for (uint64_t above = 0; last > kNumClasses - 1; --last) {
    above += std::max(all[last], changes[last]);
    if (above * 4096 > size) break;
  }
  return static_cast<uint8_t>(last - (kNumClasses - 1));
}

uint8_t CodeOf(uint64_t moved, uint64_t total) {
  if (moved == 0) return 0;
  const double of = static_cast<double>(std::max(total, moved));
  const double stay = std::max(1.0 - static_cast<double>(moved) / of, 0.25 / of);
  const double hazard = std::max(1.0, -std::log2(stay) * kHalfLife);
  uint8_t code = 1;
  while (code < kMostHazardCode && (HazardOfCode(code) + HazardOfCode(code + 1)) * 0.5 < hazard) {
    ++code;
  }
  return code < kMostHazardCode ? code : kDenseCode;
}

Plan MakePlan(absl::Span<const uint16_t> base, absl::Span<const GridChange> changed) {
  const Counts all = EstimateCounts(base);
  Counts changes = {};
  for (const GridChange& change : changed) ++changes[change.from >> 7 & 0xff];
  const uint8_t first = FirstExponent(all, changes, base.size());
  std::array<uint8_t, kNumClasses> codes = {};
  const Hazards classes(first, codes);
  std::array<uint64_t, kNumClasses> total = {}, moved = {};
  for (int e = 0; e < 256; ++e) {
    const int c = classes.ClassOf(static_cast<uint16_t>(e << 7));
    total[c] += all[e];
    moved[c] += changes[e];
  }
  double hazard = 0;
  for (int c = 0; c < kNumClasses; ++c) {
    codes[c] = CodeOf(moved[c], total[c]);
    if (codes[c] == kDenseCode || codes[c] == 0) continue;
    hazard += static_cast<double>(total[c]) * HazardOfCode(codes[c]);
  }
  Plan plan{Hazards(first, codes)};
  // Most windows have one change or a few.
  double window = hazard / static_cast<double>(base.size()) * kGroup;
  while (plan.window_log < kMaxWindowLog && window * 2 <= 3 * kHalfLife) {
    window *= 2;
    ++plan.window_log;
  }
  return plan;
}

class GridEncoder {
 public:
  GridEncoder(const Plan& plan, absl::Span<const uint16_t> base, Bytes* out)
      : plan_(plan), base_(base), coder_(out) {}

  void Run(absl::Span<const GridChange> changes) {
    for (size_t begin = 0; begin < base_.size(); begin += kPiece) {
      const absl::Span<const uint16_t> piece = base_.subspan(begin, kPiece);
      size_t count = 0;
      while (count < changes.size() && changes[count].at < begin + piece.size()) ++count;
      sparse_.assign(changes.begin(), changes.begin() + static_cast<ptrdiff_t>(count));
      for (GridChange& change : sparse_) change.at -= static_cast<uint32_t>(begin);
      scan_.Of(plan_, piece);
      if (scan_.num_dense > 0) Dense(piece);
      Sparse(piece);
      changes.remove_prefix(count);
    }
    coder_.Finish();
  }

 private:
  // Leaves the others in sparse_.
  void Dense(absl::Span<const uint16_t> piece) {
    size_t next = 0, kept = 0;
    for (const uint32_t i : scan_.dense()) {
      while (next < sparse_.size() && sparse_[next].at < i) sparse_[kept++] = sparse_[next++];
      const bool moved = next < sparse_.size() && sparse_[next].at == i;
      coder_.EncodeBit(models_.dense_changed[plan_.hazards.ClassOf(piece[i])], moved);
      if (moved) Step(sparse_[next++]);
    }
    sparse_.erase(sparse_.begin() + static_cast<ptrdiff_t>(kept),
                  sparse_.begin() + static_cast<ptrdiff_t>(next));
  }

  void Sparse(absl::Span<const uint16_t> piece) {
    Walk walk(plan_.hazards, piece, scan_.sums.data());
    next_ = 0;
    for (size_t g = 0; g < walk.num_groups(); g += plan_.WindowGroups()) {
      for (walk.StartWindow(g, plan_.WindowGroups()); !walk.AtEnd();) Symbol(walk);
    }
  }

  void Symbol(Walk& walk) {
    if (next_ == sparse_.size() || sparse_[next_].at >= walk.stretch_end()) {
      const uint32_t none = table_[walk.hazard()];
      coder_.Encode(none, kOne - none, kFrequencyBits);
      return walk.SkipStretch();
    }
    const GridChange& change = sparse_[next_++];
    const Walk::Place place = walk.PlaceOf(change.at);
    const uint32_t from = table_[place.begin];
    coder_.Encode(from, table_[place.begin + place.size] - from, kFrequencyBits);
    Step(change);
    walk.Take(change.at, place);
  }

  void Step(const GridChange& change) {
    models_.step.Encode(coder_, plan_.hazards.ClassOf(change.from), change.from,
                        ToGrid(change.to) - ToGrid(change.from));
  }

  const Plan& plan_;
  const absl::Span<const uint16_t> base_;
  const ChangeTable& table_ = ChangeTable::Get();
  RangeEncoder coder_;
  Models models_;
  Scan scan_;
  std::vector<GridChange> sparse_;  // of the piece, places counted from its beginning
  size_t next_ = 0;                 // of sparse_
};

class GridDecoder {
 public:
  GridDecoder(const Plan& plan, absl::Span<const uint16_t> base, absl::Span<const uint8_t> coded,
              absl::Span<uint16_t> out)
      : plan_(plan), base_(base), coder_(coded), out_(out) {}

  absl::Status Run(uint64_t count) {
    for (size_t begin = 0; begin < base_.size(); begin += kPiece) {
      const absl::Span<const uint16_t> piece = base_.subspan(begin, kPiece);
      scan_.Of(plan_, piece, out_.data() + begin);
      if (scan_.num_dense > 0) Dense(begin, piece);
      Sparse(begin, piece);
      if (off_grid_) return Corrupt("a step leads off the grid");
    }
    if (num_changes_ != count) return Corrupt("another number of changes than it says");
    if (!coder_.AtEnd()) return Corrupt("more bytes than its changes need");
    return absl::OkStatus();
  }

 private:
  void Dense(size_t begin, absl::Span<const uint16_t> piece) {
    for (const uint32_t i : scan_.dense()) {
      AdaptiveBit& changed = models_.dense_changed[plan_.hazards.ClassOf(piece[i])];
      if (coder_.DecodeBit(changed)) Step(begin + i);
    }
  }

  void Sparse(size_t begin, absl::Span<const uint16_t> piece) {
    Walk walk(plan_.hazards, piece, scan_.sums.data());
    for (size_t g = 0; g < walk.num_groups(); g += plan_.WindowGroups()) {
      for (walk.StartWindow(g, plan_.WindowGroups()); !walk.AtEnd();) Symbol(begin, walk);
    }
  }

  void Symbol(size_t begin, Walk& walk) {
    const uint32_t none = table_[walk.hazard()];
    const uint32_t symbol = coder_.Peek(kFrequencyBits);
    if (symbol >= none) {
      coder_.Take(none, kOne - none);
      return walk.SkipStretch();
    }
    Walk::Place place;
    const size_t i = walk.Find(table_.Find(symbol), place);
    const uint32_t from = table_[place.begin];
    coder_.Take(from, table_[place.begin + place.size] - from);
    Step(begin + i);
    walk.Take(i, place);
  }

  void Step(size_t i) {
    const uint16_t weight = base_[i];
    const int64_t step = models_.step.Decode(coder_, plan_.hazards.ClassOf(weight), weight);
    const int64_t place = ToGrid(weight) + step;
    off_grid_ |= place < 0 || place > UINT16_MAX;
    out_[i] = FromGrid(static_cast<uint16_t>(place));
    ++num_changes_;
  }

  const Plan& plan_;
  const absl::Span<const uint16_t> base_;
  const ChangeTable& table_ = ChangeTable::Get();
  RangeDecoder coder_;
  Models models_;
  const absl::Span<uint16_t> out_;
  Scan scan_;
  uint64_t num_changes_ = 0;
  bool off_grid_ = false;
};
}  // namespace

Bytes EncodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next) {
  if (base.size() > UINT32_MAX) return {};
  std::vector<GridChange> changes;
  FindChanges(base, next, changes);
  const Plan plan = MakePlan(base, changes);
  Bytes out;
  PutVarint(out, changes.size());
  out.push_back(plan.hazards.first_exponent);
  out.insert(out.end(), plan.hazards.codes.begin(), plan.hazards.codes.end());
  out.push_back(static_cast<uint8_t>(plan.window_log));
  Bytes coded;
  GridEncoder(plan, base, &coded).Run(changes);
  PutVarint(out, coded.size());
  out.insert(out.end(), coded.begin(), coded.end());
  return out;
}

absl::Status DecodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                        absl::Span<uint16_t> out) {
  uint64_t count = 0;
  if (!GetVarint(bytes, count) || bytes.size() < kNumClasses + 2) {
    return Corrupt("its header is cut off");
  }
  if (count == 0 || count > base.size()) return Corrupt("an impossible number of changes");
  std::array<uint8_t, kNumClasses> codes;
  std::copy_n(bytes.begin() + 1, kNumClasses, codes.begin());
  for (const uint8_t code : codes) {
    if (code > kMostHazardCode && code != kDenseCode) return Corrupt("an impossible hazard");
  }
  const int window_log = bytes[kNumClasses + 1];
  if (window_log > kMaxWindowLog) return Corrupt("an impossible window");
  const Plan plan{Hazards(bytes[0], codes), window_log};
  bytes.remove_prefix(kNumClasses + 2);
  uint64_t size = 0;
  if (!GetVarint(bytes, size)) return Corrupt("its header is cut off");
  if (size != bytes.size()) return Corrupt("it is cut off or followed by something else");
  if (!bytes.empty() && bytes.back() == 0) return Corrupt("more bytes than its changes need");
  return GridDecoder(plan, base, bytes, out).Run(count);
}
}  // namespace stretto::engine
