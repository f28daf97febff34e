#include "engine/weights/delta.h"

#include <zstd.h>

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/weights/grid_codec.h"
#include "engine/weights/recycled_bytes.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
enum Mode : uint8_t { kUnchanged = 0, kSparse = 1, kWhole = 2, kGrid = 3 };
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

Bytes EncodeBf16(absl::Span<const uint8_t> base, absl::Span<const uint8_t> next) {
  const Elements before(base), after(next);
  Bytes coded = EncodeGrid(before.span(), after.span());
  if (!coded.empty()) coded.insert(coded.begin(), kGrid);
  return coded;
}

absl::Status ApplyBf16(absl::Span<const uint8_t> base, absl::Span<const uint8_t> in,
                       absl::Span<uint8_t> out) {
  const Elements before(base);
  if (reinterpret_cast<uintptr_t>(out.data()) % alignof(uint16_t) == 0) {
    return DecodeGrid(before.span(), in,
                      {reinterpret_cast<uint16_t*>(out.data()), before.span().size()});
  }
  std::vector<uint16_t> after(before.span().size());
  RETURN_IF_ERROR(DecodeGrid(before.span(), in, absl::MakeSpan(after)));
  std::memcpy(out.data(), after.data(), out.size());
  return absl::OkStatus();
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

absl::Status ApplyDelta(DType dtype, absl::Span<const uint8_t> base,
                        absl::Span<const uint8_t> delta, absl::Span<uint8_t> out) {
  STRETTO_CHECK(base.size() == out.size() && base.size() % SizeOf(dtype) == 0);
  if (delta.empty()) return Corrupt("it is empty");
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
      if (dtype == DType::kBF16) return ApplyBf16(base, in, out);
      return Corrupt("bf16 steps for another dtype");
    case kWhole:
      return Decompress(in, out);
    default:
      return Corrupt(absl::StrCat("unknown mode ", delta[0]));
  }
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

absl::StatusOr<std::shared_ptr<const WeightsVersion>> ApplyVersionDelta(
    const WeightsVersion& base, int64_t number, const std::string& hash, const Manifest& manifest,
    absl::Span<const SharedBytes> deltas) {
  if (!SameTensors(base.manifest, manifest) || deltas.size() != manifest.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("delta to version ", number, ": not the tensors of version ", base.number));
  }
  std::vector<SharedBytes> tensors;
  for (size_t i = 0; i < deltas.size(); ++i) {
    if (!deltas[i].IsSet()) return Corrupt(absl::StrCat(manifest[i].name, ": missing"));
    if (IsUnchanged(deltas[i].span())) {
      tensors.push_back(base.tensors[i]);
      continue;
    }
    const size_t size = base.tensors[i].size();
    std::shared_ptr<uint8_t> next = TakeBytes(size);
    const absl::Span<uint8_t> out(next.get(), size);
    const absl::Status applied =
        ApplyDelta(manifest[i].dtype, base.tensors[i].span(), deltas[i].span(), out);
    if (!applied.ok()) return Annotate(applied, manifest[i].name);
    tensors.push_back(SharedBytes(std::move(next), out));
  }
  return VerifyVersion(number, hash, manifest, std::move(tensors));
}
}  // namespace stretto::engine
