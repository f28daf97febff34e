#include "engine/weights/symbol_code.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace stretto::engine {
namespace {
constexpr uint8_t kZeros = 0, kManyZeros = 13;
constexpr size_t kMostZeros = 16;
// By level; the first is never.
constexpr std::array<uint32_t, 13> kWeights = {0,   1024, 724, 512, 362, 256, 181,
                                               128, 64,   32,  16,  8,   4};

int TableBits(size_t num_symbols) {
  return num_symbols <= 64 ? 10 : (num_symbols <= 256 ? 11 : (num_symbols <= 1024 ? 12 : 13));
}
}  // namespace

std::vector<uint8_t> LevelsOf(absl::Span<const uint32_t> counts) {
  const uint64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<uint8_t> levels;
  for (const uint64_t count : counts) {
    uint8_t level = count == 0 ? 0 : 1;
    // Weights are compared at their geometric mean: (count · 1024 / most)² with their product.
    const uint64_t square = most == 0 ? 0 : (count << 10) / most * ((count << 10) / most);
    while (level > 0 && level + 1u < kWeights.size() &&
           square < uint64_t{kWeights[level]} * kWeights[level + 1u]) {
      ++level;
    }
    levels.push_back(level);
  }
  return levels;
}

void PutLevels(absl::Span<const uint8_t> levels, Bytes& out) {
  std::vector<uint8_t> nibbles;
  for (size_t i = 0; i < levels.size();) {
    if (levels[i] != 0) {
      nibbles.push_back(levels[i++]);
      continue;
    }
    size_t zeros = 0;
    while (i + zeros < levels.size() && levels[i + zeros] == 0 && zeros <= kMostZeros + 255) {
      ++zeros;
    }
    i += zeros;
    if (zeros <= kMostZeros) {
      nibbles.insert(nibbles.end(), {kZeros, static_cast<uint8_t>(zeros - 1)});
    } else {
      const size_t more = zeros - kMostZeros - 1;
      nibbles.insert(nibbles.end(), {kManyZeros, static_cast<uint8_t>(more & 15),
                                     static_cast<uint8_t>(more >> 4)});
    }
  }
  if (nibbles.size() % 2 != 0) nibbles.push_back(0);
  for (size_t i = 0; i < nibbles.size(); i += 2) {
    out.push_back(static_cast<uint8_t>(nibbles[i] | nibbles[i + 1] << 4));
  }
}

bool GetLevels(absl::Span<const uint8_t>& in, size_t num_symbols, std::vector<uint8_t>& levels) {
  size_t at = 0;
  const auto next = [&]() -> size_t {
    const size_t i = at++;
    return i / 2 < in.size() ? in[i / 2] >> (4 * (i % 2)) & 15 : 15;
  };
  bool any = false;
  levels.clear();
  while (levels.size() < num_symbols) {
    const size_t nibble = next();
    if (nibble > kManyZeros) return false;
    if (nibble != kZeros && nibble != kManyZeros) {
      levels.push_back(static_cast<uint8_t>(nibble));
      any = true;
      continue;
    }
    size_t zeros = next() + 1;
    if (nibble == kManyZeros) zeros += kMostZeros + 16 * next();
    if (zeros > num_symbols - levels.size()) return false;
    levels.resize(levels.size() + zeros);
  }
  if (!any || (at + 1) / 2 > in.size()) return false;
  in.remove_prefix((at + 1) / 2);
  return true;
}

Frequencies FrequenciesOf(absl::Span<const uint8_t> levels) {
  uint32_t sum = 0;
  size_t num = 0;
  for (const uint8_t level : levels) {
    num += level > 0 ? 1 : 0;
    sum += kWeights[level];
  }
  Frequencies of{.bits = TableBits(num), .begins = {}};
  std::vector<uint32_t> sizes;
  int64_t left = int64_t{1} << of.bits;
  for (const uint8_t level : levels) {
    const uint32_t size =
        level == 0 ? 0 : std::max<uint32_t>(1, (kWeights[level] << of.bits) / sum);
    sizes.push_back(size);
    left -= size;
  }
  for (size_t s = 0; left != 0; s = (s + 1) % sizes.size()) {
    if (left > 0 && sizes[s] > 0) {
      ++sizes[s];
      --left;
    } else if (left < 0 && sizes[s] > 1) {
      --sizes[s];
      ++left;
    }
  }
  uint32_t begin = 0;
  of.begins.reserve(sizes.size() + 1);
  for (const uint32_t size : sizes) {
    of.begins.push_back(begin);
    begin += size;
  }
  of.begins.push_back(begin);
  return of;
}

std::vector<SymbolStep> StepsOf(const Frequencies& of) {
  std::vector<SymbolStep> steps;
  steps.reserve(of.begins.size());
  const uint32_t all = 1u << of.bits;
  for (size_t s = 0; s + 1 < of.begins.size(); ++s) {
    const uint32_t begin = of.begins[s], size = of.begins[s + 1] - begin;
    const uint64_t limit = uint64_t{size} << (32 - of.bits);
    if (size > 1) {
      steps.push_back({UINT64_MAX / size + 1, limit, begin, all - size});
    } else {
      // The quotient comes out one too small.
      steps.push_back({UINT64_MAX, limit, begin + all - 1, all - 1});
    }
  }
  return steps;
}

Bytes SymbolEncoder::Finish() const {
  STRETTO_CHECK(num_ == size_);
  uint32_t state = SymbolDecoder::kLow;
  // From the end on, which is where the decoder's first ones go.
  Bytes out(2 * size_ + 4);
  uint8_t* at = out.data() + out.size();
  for (size_t i = size_; i-- > 0;) {
    const SymbolStep& s = *symbols_[i];
    const bool give = state >= s.limit;
    at[-2] = static_cast<uint8_t>(state);
    at[-1] = static_cast<uint8_t>(state >> 8);
    at -= give ? 2 : 0;
    state = s.Next(give ? state >> 16 : state);
  }
  at -= 4;
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(state >> (8 * i));
  out.erase(out.begin(), out.begin() + (at - out.data()));
  return out;
}
}  // namespace stretto::engine
