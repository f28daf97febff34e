#include "base/philox.h"

#include <cmath>
#include <numbers>

namespace stretto {
namespace {
constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

std::array<uint32_t, 4> DrawWords(const TokenDraw& d) {
  // 64 + 64 + 32 + 32 + 32 bits of identity: the first block's output keys the second, so that the
  // whole identity enters although one block takes 192 bits.
  const auto inner =
      Philox4x32({static_cast<uint32_t>(d.prompt_id), static_cast<uint32_t>(d.prompt_id >> 32),
                  d.sample_index, d.stream},
                 {static_cast<uint32_t>(d.run_seed), static_cast<uint32_t>(d.run_seed >> 32)});
  return Philox4x32({d.position, 0u, inner[2], inner[3]}, {inner[0], inner[1]});
}
}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kMul0} * c[0];
    const uint64_t p1 = uint64_t{kMul1} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k = {k[0] + kWeyl0, k[1] + kWeyl1};
  }
  return c;
}

float UniformFloat(const TokenDraw& draw) {
  return static_cast<float>(DrawWords(draw)[0] >> 8) * 0x1.0p-24f;
}

double UniformDouble(const TokenDraw& draw) {
  const auto w = DrawWords(draw);
  return static_cast<double>(((uint64_t{w[0]} << 32) | w[1]) >> 11) * 0x1.0p-53;
}

uint32_t PhiloxStream::NextU32() {
  if (used_ == 4) {
    words_ = Philox4x32({static_cast<uint32_t>(block_), static_cast<uint32_t>(block_ >> 32),
                         static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                        {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    ++block_;
    used_ = 0;
  }
  return words_[used_++];
}

uint64_t PhiloxStream::Below(uint64_t bound) {
  const uint64_t limit = UINT64_MAX - UINT64_MAX % bound;
  uint64_t v = NextU64();
  while (v >= limit) v = NextU64();
  return v % bound;
}

double PhiloxStream::NextGaussian() {
  const double u = 1.0 - NextDouble();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * NextDouble());
}
}  // namespace stretto
