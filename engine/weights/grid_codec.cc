#include "engine/weights/grid_codec.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/weights/bit_stream.h"
#include "engine/weights/dense_code.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
constexpr uint8_t kNoGroup = 15;

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("delta: ", what));
}

// A chunk's elements in whole lines: those of the tensor, or, at its end, a copy that ends with
// zeros which are in no group.
class Chunk {
 public:
  Chunk(absl::Span<const uint16_t> all, size_t begin)
      : size_(std::min(kChunk, all.size() - begin)) {
    data_ = all.data() + begin;
    if (size_ % kLine == 0) return;
    std::copy_n(data_, size_, copy_.begin());
    std::fill(copy_.begin() + static_cast<ptrdiff_t>(size_),
              copy_.begin() + static_cast<ptrdiff_t>(num_lines() * kLine), uint16_t{0});
    data_ = copy_.data();
  }
  Chunk(const Chunk&) = delete;

  const uint16_t* data() const { return data_; }
  size_t size() const { return size_; }
  size_t num_lines() const { return (size_ + kLine - 1) / kLine; }
  void Group(const ClassGroups& groups, LineMasks& masks) const {
    GroupLines(groups, data_, num_lines(), masks);
    if (size_ % kLine == 0) return;
    uint64_t* const last = &masks[(num_lines() - 1) * kMaskSlots];
    for (int g = 0; g < kMaskSlots; ++g) last[g] &= (uint64_t{1} << (size_ % kLine)) - 1;
  }

 private:
  const uint16_t* data_;
  const size_t size_;
  std::array<uint16_t, kChunk> copy_;
};

class GridEncoder {
 public:
  explicit GridEncoder(const GridPlan& plan) : plan_(plan), groups_(plan.groups) {
    for (int g = 0; g < groups_.num_sparse; ++g) gaps_.emplace_back(plan.gap_bits[g]);
  }

  void Add(const Chunk& base, const Chunk& next) {
    const size_t num_lines = base.num_lines();
    base.Group(groups_, masks_);
    CompareLines(base.data(), next.data(), num_lines, changes_.data());
    GroupCounts counts;
    GatherRanks(groups_.num_sparse, masks_, num_lines, changes_.data(), bits_, counts, signs_);
    for (int g = 0; g < groups_.num_sparse; ++g) gaps_[g].Write(bits_[g], counts[g]);
    for (size_t line = 0; line < num_lines; ++line) {
      const uint64_t dense = masks_[line * kMaskSlots + kDenseGroup];
      const uint64_t changed = changes_[line].changed;
      if (dense != 0) Dense(base.data() + line * kLine, next.data() + line * kLine, dense);
      if ((changed & ~dense) != 0) Others(line * kLine, base.data(), next.data(), changed & ~dense);
    }
    begin_ += base.size();
  }

  Bytes Finish() {
    std::vector<Bytes> parts;
    for (GapWriter& gaps : gaps_) parts.push_back(gaps.Finish());
    parts.push_back(signs_.Finish());
    parts.push_back(dense_.Finish());
    parts.push_back(std::move(others_));
    Bytes out = {groups_.first_exponent};
    for (size_t c = 0; c < kNumClasses; c += 2) {
      out.push_back(static_cast<uint8_t>(GroupOf(c) | GroupOf(c + 1) << 4));
    }
    out.push_back(static_cast<uint8_t>(groups_.num_sparse));
    for (int g = 0; g < groups_.num_sparse; ++g) {
      out.push_back(static_cast<uint8_t>(plan_.gap_bits[g]));
    }
    for (const Bytes& part : parts) PutVarint(out, part.size());
    for (const Bytes& part : parts) out.insert(out.end(), part.begin(), part.end());
    return out;
  }

 private:
  uint32_t GroupOf(size_t c) const {
    const uint32_t bit = groups_.bits[c];
    return bit == 0 ? kNoGroup : static_cast<uint32_t>(__builtin_ctz(bit));
  }
  void Dense(const uint16_t* base, const uint16_t* next, uint64_t mask) {
    for (; mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      dense_.Add(base[i], next[i]);
    }
  }
  void Others(size_t line_begin, const uint16_t* base, const uint16_t* next, uint64_t mask) {
    for (; mask != 0; mask &= mask - 1) {
      const size_t i = line_begin + static_cast<size_t>(__builtin_ctzll(mask));
      PutVarint(others_, begin_ + i - after_other_);
      PutVarint(others_, ZigZag(static_cast<int16_t>(static_cast<uint16_t>(next[i] - base[i]))));
      after_other_ = begin_ + i + 1;
    }
  }

  const GridPlan plan_;
  const ClassGroups& groups_;
  size_t begin_ = 0, after_other_ = 0;
  std::vector<GapWriter> gaps_;
  BitWriter signs_;
  DenseEncoder dense_;
  Bytes others_;
  LineMasks masks_ = {};
  std::array<LineChanges, kChunkLines> changes_;
  GroupBits bits_;
};

// The parts of a delta, and bytes after them that may be read.
struct Parts {
  ClassGroups groups;
  std::array<int, kMaxSparseGroups> gap_bits = {};
  std::vector<absl::Span<const uint8_t>> gaps;
  absl::Span<const uint8_t> signs, dense, others;
  Bytes bytes;
};

absl::Status ReadGroups(absl::Span<const uint8_t>& in, Parts& parts) {
  if (in.size() < kNumClasses / 2 + 2) return Corrupt("its header is cut off");
  ClassGroups& groups = parts.groups;
  groups.first_exponent = in[0];
  groups.num_sparse = in[kNumClasses / 2 + 1];
  if (groups.num_sparse > kMaxSparseGroups) return Corrupt("an impossible number of groups");
  for (size_t c = 0; c < kNumClasses; ++c) {
    const int group = in[1 + c / 2] >> (4 * (c % 2)) & 15;
    if (group == kNoGroup) continue;
    if (group >= groups.num_sparse && group != kDenseGroup) return Corrupt("an impossible group");
    groups.bits[c] = static_cast<uint8_t>(1u << group);
  }
  in.remove_prefix(kNumClasses / 2 + 2);
  if (in.size() < static_cast<size_t>(groups.num_sparse)) return Corrupt("its header is cut off");
  for (int g = 0; g < groups.num_sparse; ++g) {
    parts.gap_bits[g] = in[g];
    if (in[g] > GapMean::kMostBits) return Corrupt("an impossible length of gaps");
  }
  in.remove_prefix(static_cast<size_t>(groups.num_sparse));
  return absl::OkStatus();
}

absl::Status ReadParts(absl::Span<const uint8_t> in, Parts& parts) {
  RETURN_IF_ERROR(ReadGroups(in, parts));
  std::vector<uint64_t> sizes(static_cast<size_t>(parts.groups.num_sparse) + 3);
  for (uint64_t& size : sizes) {
    if (!GetVarint(in, size)) return Corrupt("its header is cut off");
  }
  uint64_t left = in.size();
  for (const uint64_t size : sizes) {
    if (size > left) return Corrupt("it is cut off");
    left -= size;
  }
  if (left != 0) return Corrupt("it is followed by something else");
  parts.bytes.reserve(in.size() + kReadAhead);
  parts.bytes.assign(in.begin(), in.end());
  parts.bytes.resize(in.size() + kReadAhead);
  absl::Span<const uint8_t> rest(parts.bytes.data(), in.size());
  std::vector<absl::Span<const uint8_t>> all;
  for (const uint64_t size : sizes) {
    all.push_back(rest.subspan(0, size));
    rest.remove_prefix(size);
  }
  parts.others = all.back();
  parts.dense = all[all.size() - 2];
  parts.signs = all[all.size() - 3];
  parts.gaps.assign(all.begin(), all.end() - 3);
  return absl::OkStatus();
}

class GridDecoder {
 public:
  explicit GridDecoder(const Parts& parts)
      : groups_(parts.groups), signs_(parts.signs), others_(parts.others) {
    for (int g = 0; g < groups_.num_sparse; ++g) {
      const absl::Span<const uint8_t> part = parts.gaps[g];
      gaps_.emplace_back(parts.gap_bits[g], part.data(), 0, part.size() * 8);
    }
  }

  absl::Status Start(const Parts& parts) { return dense_.Start(parts.dense); }
  absl::Status Add(const Chunk& base, uint16_t* out) {
    const size_t num_lines = base.num_lines();
    base.Group(groups_, masks_);
    GroupCounts counts;
    CountGroups(groups_.num_sparse, masks_, num_lines, counts);
    for (int g = 0; g < groups_.num_sparse; ++g) {
      if (!gaps_[g].Read(counts[g], bits_[g])) return Corrupt("its gaps are cut off");
    }
    ScatterRanks(groups_.num_sparse, masks_, num_lines, bits_, signs_.data(), sign_at_,
                 changes_.data());
    if (sign_at_ > signs_.size() * 8) return Corrupt("its signs are cut off");
    StepLines(base.data(), changes_.data(), num_lines, out);
    for (size_t line = 0; line < num_lines; ++line) {
      const uint64_t dense = masks_[line * kMaskSlots + kDenseGroup];
      if (dense == 0) continue;
      Dense(base.data() + line * kLine, dense, out + line * kLine);
      if (dense_.IsCutOff()) return Corrupt("its elements are cut off");
    }
    return absl::OkStatus();
  }
  // All chunks have been added.
  absl::Status Finish(absl::Span<uint16_t> out) {
    for (const GapReader& gaps : gaps_) {
      if (!gaps.AtEnd()) return Corrupt("its gaps don't end with the tensor");
    }
    const size_t rest = signs_.size() * 8 - sign_at_;
    if (rest >= 8 || (rest > 0 && signs_.back() >> (8 - rest) != 0)) {
      return Corrupt("other signs than it has changes");
    }
    if (!dense_.AtEnd()) return Corrupt("more bytes than its changes need");
    for (size_t at = 0; !others_.empty(); ++at) {
      uint64_t gap = 0, by = 0;
      if (!GetVarint(others_, gap) || !GetVarint(others_, by))
        return Corrupt("a change is cut off");
      if (gap >= out.size() - at) return Corrupt("a change lies outside the tensor");
      if (by == 0 || by > UINT16_MAX) return Corrupt("an impossible change");
      at += gap;
      out[at] = static_cast<uint16_t>(out[at] + UnZigZag(by));
    }
    return absl::OkStatus();
  }

 private:
  void Dense(const uint16_t* base, uint64_t mask, uint16_t* out) {
    for (; mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      out[i] = dense_.Next(base[i]);
    }
  }

  const ClassGroups groups_;
  std::vector<GapReader> gaps_;
  const absl::Span<const uint8_t> signs_;
  size_t sign_at_ = 0;
  DenseDecoder dense_;
  absl::Span<const uint8_t> others_;
  LineMasks masks_ = {};
  std::array<LineChanges, kChunkLines> changes_;
  GroupBits bits_;
};
}  // namespace

Bytes EncodeGrid(const GridPlan& plan, absl::Span<const uint16_t> base,
                 absl::Span<const uint16_t> next) {
  if (base.size() > UINT32_MAX) return {};
  GridEncoder encoder(plan);
  for (size_t begin = 0; begin < base.size(); begin += kChunk) {
    encoder.Add(Chunk(base, begin), Chunk(next, begin));
  }
  return encoder.Finish();
}

absl::Status DecodeGrid(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                        absl::Span<uint16_t> out) {
  Parts parts;
  RETURN_IF_ERROR(ReadParts(bytes, parts));
  GridDecoder decoder(parts);
  RETURN_IF_ERROR(decoder.Start(parts));
  std::array<uint16_t, kChunk> last;
  for (size_t begin = 0; begin < base.size(); begin += kChunk) {
    const Chunk chunk(base, begin);
    const bool is_whole = chunk.size() % kLine == 0;
    RETURN_IF_ERROR(decoder.Add(chunk, is_whole ? out.data() + begin : last.data()));
    if (!is_whole)
      std::copy_n(last.begin(), chunk.size(), out.begin() + static_cast<ptrdiff_t>(begin));
  }
  return decoder.Finish(out);
}
}  // namespace stretto::engine
