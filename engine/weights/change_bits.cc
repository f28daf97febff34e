#include "engine/weights/change_bits.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
constexpr size_t kWord = 64;              // elements whose bits are looked at together
constexpr uint32_t kDown = 1, kMore = 2;  // bits of a code

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("delta: ", what));
}

// Bit i: whether element i < count <= kWord differs. Branchless, so that compilers vectorise it.
uint64_t Differences(const uint16_t* base, const uint16_t* next, size_t count) {
  uint8_t differs[kWord] = {};
  for (size_t i = 0; i < count; ++i) differs[i] = base[i] != next[i] ? 1 : 0;
  uint64_t bits = 0;
  for (size_t i = 0; i < kWord / 8; ++i) {
    uint64_t eight;
    std::memcpy(&eight, differs + 8 * i, sizeof(eight));
    // Gathers the lowest bits of eight bytes; the first byte's is the lowest of the result.
    bits |= (eight * 0x0102040810204080u >> 56) << (8 * i);
  }
  return bits;
}

uint64_t LoadBits(const uint8_t* bytes, size_t count) {
  uint64_t bits = 0;
  for (size_t i = 0; i < count; ++i) bits |= uint64_t{bytes[i]} << (8 * i);
  return bits;
}
}  // namespace

void EncodeChangeBits(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next,
                      Bytes& out) {
  Bytes codes, more;
  codes.reserve(base.size() / 16 + 1);
  uint32_t pending = 0, num_pending = 0;
  for (size_t begin = 0; begin < base.size(); begin += kWord) {
    const size_t count = std::min(kWord, base.size() - begin);
    const uint64_t changed = Differences(base.data() + begin, next.data() + begin, count);
    for (size_t i = 0; i < (count + 7) / 8; ++i) {
      out.push_back(static_cast<uint8_t>(changed >> (8 * i)));
    }
    for (uint64_t left = changed; left != 0; left &= left - 1) {
      const size_t i = begin + static_cast<size_t>(__builtin_ctzll(left));
      const int64_t step = ToGrid(next[i]) - ToGrid(base[i]);
      const int64_t size = step < 0 ? -step : step;
      const uint32_t code = (step < 0 ? kDown : 0u) | (size > 1 ? kMore : 0u);
      if (size > 1) PutVarint(more, static_cast<uint64_t>(size - 2));
      pending |= code << num_pending;
      num_pending += 2;
      if (num_pending < 8) continue;
      codes.push_back(static_cast<uint8_t>(pending));
      pending = num_pending = 0;
    }
  }
  if (num_pending > 0) codes.push_back(static_cast<uint8_t>(pending));
  out.insert(out.end(), codes.begin(), codes.end());
  out.insert(out.end(), more.begin(), more.end());
}

namespace {
uint64_t CountChanges(absl::Span<const uint8_t> bits) {
  uint64_t count = 0;
  for (size_t begin = 0; begin < bits.size(); begin += 8) {
    const size_t size = std::min<size_t>(8, bits.size() - begin);
    count += static_cast<uint64_t>(__builtin_popcountll(LoadBits(bits.data() + begin, size)));
  }
  return count;
}

// What follows the elements' bits.
class StepReader {
 public:
  StepReader(absl::Span<const uint8_t> codes, absl::Span<const uint8_t> more)
      : codes_(codes), more_(more) {}

  int64_t Next() {
    const uint32_t code = codes_[next_ / 4] >> (2 * (next_ % 4)) & 3u;
    ++next_;
    uint64_t size = 0;
    if ((code & kMore) != 0) {
      is_corrupt_ |= !GetVarint(more_, size) || size > UINT16_MAX;
      ++size;
    }
    ++size;
    return (code & kDown) != 0 ? -static_cast<int64_t>(size) : static_cast<int64_t>(size);
  }
  // All has been read, and was what an encoder writes.
  bool IsWhole() const {
    const bool has_rest = next_ % 4 != 0 && codes_.back() >> (2 * (next_ % 4)) != 0;
    return !is_corrupt_ && more_.empty() && !has_rest;
  }

 private:
  absl::Span<const uint8_t> codes_, more_;
  size_t next_ = 0;
  bool is_corrupt_ = false;
};
}  // namespace

absl::Status DecodeChangeBits(absl::Span<const uint16_t> base, absl::Span<const uint8_t> bytes,
                              absl::Span<uint16_t> out) {
  const size_t num_bits = (base.size() + 7) / 8;
  if (bytes.size() < num_bits) return Corrupt("its bits are cut off");
  const absl::Span<const uint8_t> bits = bytes.subspan(0, num_bits);
  if (base.size() % 8 != 0 && bits.back() >> (base.size() % 8) != 0) {
    return Corrupt("changes of elements that there are not");
  }
  const uint64_t num_codes = (CountChanges(bits) + 3) / 4;
  if (num_codes == 0) return Corrupt("nothing has changed");
  if (bytes.size() - num_bits < num_codes) return Corrupt("its steps are cut off");
  StepReader steps(bytes.subspan(num_bits, num_codes), bytes.subspan(num_bits + num_codes));
  bool off_grid = false;
  for (size_t begin = 0; begin < base.size(); begin += kWord) {
    const size_t count = std::min(kWord, base.size() - begin);
    std::memcpy(out.data() + begin, base.data() + begin, count * sizeof(uint16_t));
    uint64_t left = LoadBits(bits.data() + begin / 8, (count + 7) / 8);
    for (; left != 0; left &= left - 1) {
      const size_t i = begin + static_cast<size_t>(__builtin_ctzll(left));
      const int64_t place = ToGrid(base[i]) + steps.Next();
      off_grid |= place < 0 || place > UINT16_MAX;
      out[i] = FromGrid(static_cast<uint16_t>(place));
    }
  }
  if (off_grid) return Corrupt("a step leads off the grid");
  return steps.IsWhole() ? absl::OkStatus() : Corrupt("other steps than it has changes");
}
}  // namespace stretto::engine
