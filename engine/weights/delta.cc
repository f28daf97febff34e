#include "engine/weights/delta.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/recycled_bytes.h"
#include "base/status.h"
#include "engine/weights/change_bits.h"
#include "engine/weights/grid_codec.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
enum Mode : uint8_t {
  kUnchanged = 0,
  kSparse = 1,
  kWhole = 2,
  kSteps = 4,
  kChangeBits = 5,
  kGrid = 6
};
constexpr int kZstdLevel = 1;  // the streams are small; the encoder runs beside the training

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("delta: ", what));
}

template <class Word>
Word LoadWord(absl::Span<const uint8_t> bytes, size_t index) {
  Word word;
  std::memcpy(&word, bytes.data() + index * sizeof(Word), sizeof(Word));
  return word;
}

Bytes Compress(absl::Span<const uint8_t> raw, Bytes head) {
  const size_t begin = head.size();
  head.resize(begin + ZSTD_compressBound(raw.size()));
  const size_t size =
      ZSTD_compress(head.data() + begin, head.size() - begin, raw.data(), raw.size(), kZstdLevel);
  STRETTO_CHECK(ZSTD_isError(size) == 0);
  head.resize(begin + size);
  return head;
}

// The frame must hold exactly as many bytes.
absl::Status Decompress(absl::Span<const uint8_t> frame, absl::Span<uint8_t> raw) {
  if (ZSTD_getFrameContentSize(frame.data(), frame.size()) != raw.size()) {
    return Corrupt("the compressed part has another size than its header says");
  }
  if (ZSTD_findFrameCompressedSize(frame.data(), frame.size()) != frame.size()) {
    return Corrupt("the compressed part is cut off or followed by something else");
  }
  const size_t got = ZSTD_decompress(raw.data(), raw.size(), frame.data(), frame.size());
  if (ZSTD_isError(got) != 0 || got != raw.size()) return Corrupt("the compressed part is damaged");
  return absl::OkStatus();
}

template <class Word>
Bytes EncodeSparse(absl::Span<const uint8_t> base, absl::Span<const uint8_t> next) {
  Bytes gaps, steps;
  uint64_t count = 0, expected = 0;
  const size_t num_elements = base.size() / sizeof(Word);
  constexpr size_t kBlock = 4096 / sizeof(Word);
  for (size_t begin = 0; begin < num_elements; begin += kBlock) {
    const size_t size = std::min(kBlock, num_elements - begin);
    if (std::memcmp(base.data() + begin * sizeof(Word), next.data() + begin * sizeof(Word),
                    size * sizeof(Word)) == 0) {
      continue;
    }
    for (size_t i = begin; i < begin + size; ++i) {
      const Word before = LoadWord<Word>(base, i), after = LoadWord<Word>(next, i);
      if (before == after) continue;
      PutVarint(gaps, i - expected);
      PutVarint(steps, ZigZag(ToGrid(after) - ToGrid(before)));
      expected = i + 1;
      ++count;
    }
  }
  Bytes head = {kSparse};
  PutVarint(head, count);
  PutVarint(head, gaps.size());
  PutVarint(head, steps.size());
  gaps.insert(gaps.end(), steps.begin(), steps.end());
  return Compress(gaps, std::move(head));
}

template <class Word>
absl::Status ApplySparse(absl::Span<const uint8_t> base, absl::Span<const uint8_t> in,
                         absl::Span<uint8_t> out) {
  const uint64_t num_elements = base.size() / sizeof(Word);
  uint64_t count = 0, gap_bytes = 0, step_bytes = 0;
  if (!GetVarint(in, count) || !GetVarint(in, gap_bytes) || !GetVarint(in, step_bytes)) {
    return Corrupt("its header is cut off");
  }
  if (count == 0 || count > num_elements) return Corrupt("an impossible number of changes");
  const uint64_t limit = count * kMaxVarintBytes;
  if (gap_bytes > limit || step_bytes > limit) return Corrupt("an impossible size");
  if (ZSTD_getFrameContentSize(in.data(), in.size()) != gap_bytes + step_bytes) {
    return Corrupt("the compressed part has another size than its header says");
  }
  Bytes raw(gap_bytes + step_bytes);
  RETURN_IF_ERROR(Decompress(in, absl::MakeSpan(raw)));
  absl::Span<const uint8_t> gaps(raw.data(), gap_bytes);
  absl::Span<const uint8_t> steps(raw.data() + gap_bytes, step_bytes);

  std::memcpy(out.data(), base.data(), base.size());
  uint64_t position = 0;
  constexpr int64_t kGridSize = int64_t{1} << (sizeof(Word) * 8);
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t gap = 0, zigzag = 0;
    if (!GetVarint(gaps, gap) || !GetVarint(steps, zigzag)) return Corrupt("a change is cut off");
    if (gap >= num_elements - position) return Corrupt("a change lies outside the tensor");
    position += gap;
    const int64_t step = UnZigZag(zigzag);
    if (step == 0 || step <= -kGridSize || step >= kGridSize) return Corrupt("an impossible step");
    const int64_t place = ToGrid(LoadWord<Word>(base, position)) + step;
    if (place < 0 || place >= kGridSize) return Corrupt("a step leads off the grid");
    const Word word = FromGrid(static_cast<Word>(place));
    std::memcpy(out.data() + position * sizeof(Word), &word, sizeof(Word));
    ++position;
  }
  if (!gaps.empty() || !steps.empty()) return Corrupt("more changes than it says");
  return absl::OkStatus();
}

// Copies where the bytes are not aligned; bf16 tensors of a version always are.
class Elements {
 public:
  explicit Elements(absl::Span<const uint8_t> bytes) {
    if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(uint16_t) == 0) {
      span_ = {reinterpret_cast<const uint16_t*>(bytes.data()), bytes.size() / 2};
      return;
    }
    copy_.resize(bytes.size() / 2);
    std::memcpy(copy_.data(), bytes.data(), bytes.size());
    span_ = copy_;
  }
  absl::Span<const uint16_t> span() const { return span_; }

 private:
  std::vector<uint16_t> copy_;
  absl::Span<const uint16_t> span_;
};

// Where many elements change, each tells its step, modulo 2^16 and with small ones of both signs
// first: the low bytes of all, then the high bytes, both in order of the weights' exponents, since
// small weights move by more steps than large ones. Not as small as what codes steps one by one,
// but many times as fast.
class StepPlanes {
 public:
  explicit StepPlanes(absl::Span<const uint16_t> base) : base_(base), bytes_(2 * base.size()) {
    std::array<uint32_t, 256> counts = {};
    for (const uint16_t weight : base) ++counts[ExponentOf(weight)];
    uint32_t begin = 0;
    for (size_t e = 0; e < counts.size(); ++e) begin += std::exchange(counts[e], begin);
    begin_ = counts;
  }
  absl::Span<uint8_t> bytes() { return absl::MakeSpan(bytes_); }

  void Set(absl::Span<const uint16_t> next) {
    std::array<uint32_t, 256> at = begin_;
    for (size_t i = 0; i < base_.size(); ++i) {
      const auto step = static_cast<uint16_t>(ToGrid(next[i]) - ToGrid(base_[i]));
      const auto coded = static_cast<uint16_t>(step << 1 ^ (step >> 15 != 0 ? 0xffff : 0));
      const uint32_t place = at[ExponentOf(base_[i])]++;
      bytes_[place] = static_cast<uint8_t>(coded);
      bytes_[base_.size() + place] = static_cast<uint8_t>(coded >> 8);
    }
  }
  void Get(absl::Span<uint16_t> next) const {
    std::array<uint32_t, 256> at = begin_;
    for (size_t i = 0; i < base_.size(); ++i) {
      const uint32_t place = at[ExponentOf(base_[i])]++;
      const auto coded = static_cast<uint16_t>(bytes_[place] | bytes_[base_.size() + place] << 8);
      const auto step = static_cast<uint16_t>(coded >> 1 ^ ((coded & 1) != 0 ? 0xffff : 0));
      next[i] = FromGrid(static_cast<uint16_t>(ToGrid(base_[i]) + step));
    }
  }

 private:
  static uint8_t ExponentOf(uint16_t weight) { return static_cast<uint8_t>(weight >> 7); }

  const absl::Span<const uint16_t> base_;
  Bytes bytes_;
  std::array<uint32_t, 256> begin_;  // by exponent: the first place
};

Bytes EncodeSteps(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next) {
  StepPlanes planes(base);
  planes.Set(next);
  return Compress(planes.bytes(), {kSteps});
}

absl::Status ApplySteps(absl::Span<const uint16_t> base, absl::Span<const uint8_t> in,
                        absl::Span<uint16_t> out) {
  if (base.size() > UINT32_MAX) return Corrupt("a tensor that is too large for it");
  StepPlanes planes(base);
  RETURN_IF_ERROR(Decompress(in, planes.bytes()));
  planes.Get(out);
  return absl::OkStatus();
}

absl::Status ApplyChangeBits(absl::Span<const uint16_t> base, absl::Span<const uint8_t> in,
                             absl::Span<uint16_t> out) {
  const uint64_t size = ZSTD_getFrameContentSize(in.data(), in.size());
  if (size > MostChangeBits(base.size())) return Corrupt("an impossible size");
  Bytes bits(size);
  RETURN_IF_ERROR(Decompress(in, absl::MakeSpan(bits)));
  return DecodeChangeBits(base, bits, out);
}

// The fastest way that is not much larger than the smallest.
Mode ChooseMode(const GridSample& sample, size_t size) {
  if (sample.changed * 8 >= sample.seen && sample.by_one * 2 >= sample.changed) return kChangeBits;
  return sample.changed * 4 >= sample.seen && size <= UINT32_MAX ? kSteps : kGrid;
}

Bytes EncodeBf16(absl::Span<const uint8_t> base, absl::Span<const uint8_t> next) {
  const Elements before(base), after(next);
  const GridSample sample = SampleChanges(before.span(), after.span());
  const Mode mode = ChooseMode(sample, before.span().size());
  if (mode == kSteps) return EncodeSteps(before.span(), after.span());
  if (mode == kChangeBits) {
    Bytes bits;
    EncodeChangeBits(before.span(), after.span(), bits);
    return Compress(bits, {kChangeBits});
  }
  Bytes coded = EncodeGrid(PlanGroups(sample), before.span(), after.span());
  if (!coded.empty()) coded.insert(coded.begin(), kGrid);
  return coded;
}

// `apply`: DecodeGrid's, ApplySteps or ApplyChangeBits.
template <class Apply>
absl::Status ApplyBf16(const Apply& apply, absl::Span<const uint8_t> base,
                       absl::Span<const uint8_t> in, absl::Span<uint8_t> out) {
  const Elements before(base);
  if (reinterpret_cast<uintptr_t>(out.data()) % alignof(uint16_t) == 0) {
    return apply(before.span(), in,
                 {reinterpret_cast<uint16_t*>(out.data()), before.span().size()});
  }
  std::vector<uint16_t> after(before.span().size());
  RETURN_IF_ERROR(apply(before.span(), in, absl::MakeSpan(after)));
  std::memcpy(out.data(), after.data(), out.size());
  return absl::OkStatus();
}

// Larger than what stays in the caches is looked at while it is written.
absl::Status ApplyGrid(absl::Span<const uint8_t> base, absl::Span<const uint8_t> in,
                       absl::Span<uint8_t> out, SeeBytes see) {
  const auto see_elements = [&](absl::Span<const uint16_t> piece) {
    see({reinterpret_cast<const uint8_t*>(piece.data()), piece.size() * sizeof(uint16_t)});
  };
  const auto apply = [&](absl::Span<const uint16_t> before, absl::Span<const uint8_t> bytes,
                         absl::Span<uint16_t> after) {
    return DecodeGrid(before, bytes, after, see_elements);
  };
  return ApplyBf16(apply, base, in, out);
}

bool IsUnchanged(absl::Span<const uint8_t> delta) {
  return delta.size() == 1 && delta[0] == kUnchanged;
}
}  // namespace

Bytes EncodeDelta(DType dtype, absl::Span<const uint8_t> base, absl::Span<const uint8_t> next) {
  STRETTO_CHECK(base.size() == next.size() && base.size() % SizeOf(dtype) == 0);
  if (base.empty() || std::memcmp(base.data(), next.data(), base.size()) == 0) return {kUnchanged};
  Bytes sparse;
  if (dtype == DType::kBF16) {
    sparse = EncodeBf16(base, next);
  } else if (SizeOf(dtype) == 2) {
    sparse = EncodeSparse<uint16_t>(base, next);
  }
  if (SizeOf(dtype) == 4) sparse = EncodeSparse<uint32_t>(base, next);
  if (!sparse.empty() && sparse.size() < base.size() / 2) return sparse;
  Bytes whole = Compress(next, {kWhole});
  return sparse.empty() || whole.size() < sparse.size() ? whole : sparse;
}

namespace {
// All modes but kGrid of bf16.
absl::Status Apply(DType dtype, absl::Span<const uint8_t> base, absl::Span<const uint8_t> delta,
                   absl::Span<uint8_t> out) {
  absl::Span<const uint8_t> in = delta.subspan(1);
  switch (delta[0]) {
    case kUnchanged:
      if (!in.empty()) return Corrupt("bytes after the end");
      if (!base.empty()) std::memcpy(out.data(), base.data(), base.size());
      return absl::OkStatus();
    case kSparse:
      if (SizeOf(dtype) == 2) return ApplySparse<uint16_t>(base, in, out);
      if (SizeOf(dtype) == 4) return ApplySparse<uint32_t>(base, in, out);
      return Corrupt("a sparse delta of a dtype that has none");
    case kGrid:
      return Corrupt("bf16 steps for another dtype");
    case kSteps:
      if (dtype == DType::kBF16) return ApplyBf16(ApplySteps, base, in, out);
      return Corrupt("bf16 steps for another dtype");
    case kChangeBits:
      if (dtype == DType::kBF16) return ApplyBf16(ApplyChangeBits, base, in, out);
      return Corrupt("bf16 steps for another dtype");
    case kWhole:
      return Decompress(in, out);
    default:
      return Corrupt(absl::StrCat("unknown mode ", delta[0],
                                  "; is its sender of another release? All run the same one"));
  }
}
}  // namespace

absl::Status ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                        absl::Span<const uint8_t> delta, absl::Span<uint8_t> out, SeeBytes see) {
  STRETTO_CHECK(base.size() == out.size() && base.size() % SizeOf(dtype) == 0);
  if (delta.empty()) return Corrupt("it is empty");
  if (delta[0] == kGrid && dtype == DType::kBF16) {
    return ApplyGrid(base, delta.subspan(1), out, see);
  }
  RETURN_IF_ERROR(Apply(dtype, base, delta, out));
  see(out);
  return absl::OkStatus();
}

absl::Status ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                        absl::Span<const uint8_t> delta, absl::Span<uint8_t> out) {
  return ApplyDelta(dtype, base, delta, out, [](absl::Span<const uint8_t>) {});
}

absl::StatusOr<Bytes> ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                                 absl::Span<const uint8_t> delta) {
  Bytes out(base.size());
  RETURN_IF_ERROR(ApplyDelta(dtype, base, delta, absl::MakeSpan(out)));
  return out;
}

int64_t VersionDelta::NumBytes() const {
  int64_t total = 0;
  for (const SharedBytes& bytes : tensors) total += static_cast<int64_t>(bytes.size());
  return total;
}

std::shared_ptr<const VersionDelta> EncodeVersionDelta(const WeightsVersion& base,
                                                       const WeightsVersion& next) {
  STRETTO_CHECK(SameTensors(base.manifest, next.manifest));
  auto delta = std::make_shared<VersionDelta>();
  delta->base_number = base.number;
  delta->base_hash = base.hash;
  delta->number = next.number;
  delta->hash = next.hash;
  for (size_t i = 0; i < base.tensors.size(); ++i) {
    delta->tensors.push_back(SharedBytes(
        EncodeDelta(base.manifest[i].dtype, base.tensors[i].span(), next.tensors[i].span())));
  }
  return delta;
}

VersionPatch::VersionPatch(const WeightsVersion& base, int64_t number, std::string hash,
                           Manifest manifest)
    : base_(base), number_(number), hash_(std::move(hash)), manifest_(std::move(manifest)) {
  if (SameTensors(base_.manifest, manifest_)) return;
  error_ = absl::FailedPreconditionError(
      absl::StrCat("delta to version ", number, ": not the tensors of version ", base.number));
}

absl::Status VersionPatch::Add(absl::Span<const uint8_t> delta) {
  RETURN_IF_ERROR(error_);
  const size_t i = tensors_.size();
  if (i == manifest_.size()) return error_ = Corrupt("more tensors than the manifest has");
  const TensorEntry& entry = manifest_[i];
  if (IsUnchanged(delta)) {
    if (entry.hash != base_.manifest[i].hash) {
      return error_ = Corrupt(absl::StrCat("tensor ", entry.name, " is said to be unchanged"));
    }
    tensors_.push_back(base_.tensors[i]);
    return absl::OkStatus();
  }
  const size_t size = base_.tensors[i].size();
  std::shared_ptr<uint8_t> next = TakeBytes(size);
  const absl::Span<uint8_t> out(next.get(), size);
  TensorHasher hasher;
  error_ = Annotate(ApplyDelta(entry.dtype, base_.tensors[i].span(), delta, out,
                               [&](absl::Span<const uint8_t> piece) { hasher.Add(piece); }),
                    entry.name);
  if (error_.ok() && hasher.Hash() != entry.hash) {
    error_ = Corrupt(
        absl::StrCat("the bytes of tensor ", entry.name, " do not have the manifest's hash"));
  }
  if (error_.ok()) tensors_.push_back(SharedBytes(std::move(next), out));
  return error_;
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> VersionPatch::Finish() {
  RETURN_IF_ERROR(error_);
  if (tensors_.size() != manifest_.size()) {
    return Corrupt(absl::StrCat(manifest_[tensors_.size()].name, ": missing"));
  }
  return VerifiedVersion(number_, hash_, std::move(manifest_), std::move(tensors_));
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> ApplyVersionDelta(
    const WeightsVersion& base, int64_t number, const std::string& hash, const Manifest& manifest,
    absl::Span<const SharedBytes> deltas) {
  if (deltas.size() != manifest.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("delta to version ", number, ": not the tensors of version ", base.number));
  }
  VersionPatch patch(base, number, hash, manifest);
  for (size_t i = 0; i < deltas.size(); ++i) {
    if (!deltas[i].IsSet()) return Corrupt(absl::StrCat(manifest[i].name, ": missing"));
    RETURN_IF_ERROR(patch.Add(deltas[i].span()));
  }
  return patch.Finish();
}
}  // namespace stretto::engine
