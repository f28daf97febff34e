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
// zeros.
class Chunk {
 public:
  Chunk(absl::Span<const uint16_t> all, size_t begin)
      : size_(std::min(kChunk, all.size() - begin)), elements_(all.data() + begin) {
    if (size_ % kLine == 0) return;
    const auto end = std::copy_n(elements_, size_, copy_.begin());
    std::fill(end, copy_.end(), uint16_t{0});
    elements_ = copy_.data();
  }
  Chunk(const Chunk&) = delete;

  const uint16_t* elements() const { return elements_; }
  size_t size() const { return size_; }
  Lines lines() const {
    const size_t rest = size_ % kLine;
    return {elements_, (size_ + kLine - 1) / kLine,
            rest == 0 ? ~uint64_t{0} : (uint64_t{1} << rest) - 1};
  }

 private:
  const size_t size_;
  const uint16_t* elements_;
  std::array<uint16_t, kChunk> copy_;
};

class GridEncoder {
 public:
  explicit GridEncoder(const GridPlan& plan) : plan_(plan), groups_(plan.groups) {
    for (int g = 0; g < groups_.num_sparse; ++g) gaps_.emplace_back(plan.gap_bits[g]);
  }

  void Add(const Chunk& base, const Chunk& next) {
    const Lines lines = base.lines();
    GatherRanks(groups_, lines, next.elements(), chunk_, ranks_, signs_, others_in_.data());
    for (int g = 0; g < groups_.num_sparse; ++g) {
      gaps_[g].Write(ranks_.of[g].data(), ranks_.num[g], chunk_.sizes[g]);
    }
    for (size_t k = 0; k < chunk_.num_rest_lines; ++k) {
      const size_t line = chunk_.rest_lines[k];
      const uint64_t dense = chunk_.masks[line * ChunkGroups::kSlots + kDenseGroup];
      const uint64_t other = others_in_[line];
      const size_t begin = line * kLine;
      Dense(base.elements() + begin, next.elements() + begin, dense);
      Others(base.elements() + begin, next.elements() + begin, other, begin_ + begin);
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
      PutVarint(out, gaps_[g].num_changes());
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
  void Others(const uint16_t* base, const uint16_t* next, uint64_t mask, size_t begin) {
    for (; mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      PutVarint(others_, begin + static_cast<size_t>(i) - after_other_);
      PutVarint(others_, ZigZag(static_cast<int16_t>(static_cast<uint16_t>(next[i] - base[i]))));
      after_other_ = begin + static_cast<size_t>(i) + 1;
    }
  }

  const GridPlan plan_;
  const ClassGroups& groups_;
  size_t begin_ = 0, after_other_ = 0;
  std::vector<GapWriter> gaps_;
  BitWriter signs_;
  DenseEncoder dense_;
  Bytes others_;
  ChunkGroups chunk_;
  ChangedRanks ranks_;
  std::array<uint64_t, kChunkLines> others_in_;  // of lines
};

// The parts of a delta, and bytes after them that may be read.
struct Parts {
  ClassGroups groups;
  std::array<int, kMaxSparseGroups> gap_bits = {};
  std::array<uint64_t, kMaxSparseGroups> num_changes = {};
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
  groups.SetGroups();
  in.remove_prefix(kNumClasses / 2 + 2);
  for (int g = 0; g < groups.num_sparse; ++g) {
    if (in.empty()) return Corrupt("its header is cut off");
    if (in[0] > GapMean::kMostBits) return Corrupt("an impossible length of gaps");
    parts.gap_bits[g] = in[0];
    in.remove_prefix(1);
    if (!GetVarint(in, parts.num_changes[g])) return Corrupt("its header is cut off");
    if (parts.num_changes[g] > UINT32_MAX) return Corrupt("an impossible number of changes");
  }
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
      gaps_.emplace_back(parts.gap_bits[g], parts.num_changes[g], parts.gaps[g]);
    }
  }
  absl::Status Start(const Parts& parts) {
    RETURN_IF_ERROR(dense_.Start(parts.dense));
    return NextOther();
  }

  absl::Status Add(const Chunk& base, uint16_t* out, SeeElements see) {
    const Lines lines = base.lines();
    GroupLines(groups_, lines, chunk_);
    changed_ = {};
    for (int g = 0; g < groups_.num_sparse; ++g) {
      if (!gaps_[g].Read(chunk_, g, changed_)) return Corrupt("its gaps are cut off");
    }
    StepLines(lines, changed_, signs_.data(), sign_at_, next_.data());
    if (sign_at_ > signs_.size() * 8) return Corrupt("its signs are cut off");
    for (size_t k = 0; k < chunk_.num_rest_lines; ++k) {
      const size_t line = chunk_.rest_lines[k];
      const uint64_t dense = chunk_.masks[line * ChunkGroups::kSlots + kDenseGroup];
      Dense(base.elements() + line * kLine, dense, next_.data() + line * kLine);
      if (dense_.IsCutOff()) return Corrupt("its elements are cut off");
    }
    while (other_at_ < begin_ + base.size()) {
      uint16_t& other = next_[other_at_ - begin_];
      other = static_cast<uint16_t>(other + other_by_);
      ++other_at_;
      RETURN_IF_ERROR(NextOther());
    }
    StreamElements(next_.data(), base.size(), out);
    see({next_.data(), base.size()});
    begin_ += base.size();
    return absl::OkStatus();
  }
  // All chunks have been added.
  absl::Status Finish() {
    FinishStream();
    for (int g = 0; g < groups_.num_sparse; ++g) {
      if (!gaps_[g].AtEnd()) return Corrupt("other gaps than it has changes");
    }
    const size_t rest = signs_.size() * 8 - sign_at_;
    if (rest >= 8 || (rest > 0 && signs_.back() >> (8 - rest) != 0)) {
      return Corrupt("other signs than it has changes");
    }
    if (!dense_.AtEnd()) return Corrupt("more bytes than its changes need");
    return other_at_ == kNone ? absl::OkStatus() : Corrupt("a change lies outside the tensor");
  }

 private:
  static constexpr uint64_t kNone = UINT64_MAX;

  void Dense(const uint16_t* base, uint64_t mask, uint16_t* out) {
    for (; mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      out[i] = dense_.Next(base[i]);
    }
  }
  // From other_at_ on.
  absl::Status NextOther() {
    if (others_.empty()) {
      other_at_ = kNone;
      return absl::OkStatus();
    }
    uint64_t gap = 0, by = 0;
    if (!GetVarint(others_, gap) || !GetVarint(others_, by)) return Corrupt("a change is cut off");
    if (by == 0 || by > UINT16_MAX) return Corrupt("an impossible change");
    if (gap > UINT32_MAX) return Corrupt("a change lies outside the tensor");
    other_at_ += gap;
    other_by_ = UnZigZag(by);
    return absl::OkStatus();
  }

  const ClassGroups groups_;
  std::vector<GapReader> gaps_;
  ChunkGroups chunk_;
  ChangedLines changed_;
  const absl::Span<const uint8_t> signs_;
  size_t sign_at_ = 0, begin_ = 0;
  DenseDecoder dense_;
  absl::Span<const uint8_t> others_;
  uint64_t other_at_ = 0;  // of the next one
  int64_t other_by_ = 0;
  std::array<uint16_t, kChunk> next_;
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
                        absl::Span<uint16_t> out, SeeElements see) {
  Parts parts;
  RETURN_IF_ERROR(ReadParts(bytes, parts));
  GridDecoder decoder(parts);
  RETURN_IF_ERROR(decoder.Start(parts));
  for (size_t begin = 0; begin < base.size(); begin += kChunk) {
    RETURN_IF_ERROR(decoder.Add(Chunk(base, begin), out.data() + begin, see));
  }
  return decoder.Finish();
}
}  // namespace stretto::engine
