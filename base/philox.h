// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3" (SC'11). A value is a pure function of (key, counter): nobody keeps random state.
#pragma once

#include <array>
#include <cstdint>

namespace stretto {
// One block of four 32-bit words.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// The identity of one random draw: a completion token's place in the run. `stream` separates uses
// (0: sampling) so that two uses never share numbers.
struct TokenDraw {
  uint64_t run_seed = 0;
  uint64_t prompt_id = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;  // index of the token in the completion
  uint32_t stream = 0;
};

// Uniform in [0, 1) with 24 random bits: exactly representable in fp32.
float UniformFloat(const TokenDraw& draw);
// Uniform in [0, 1) with 53 random bits.
double UniformDouble(const TokenDraw& draw);

// A small sequential generator over Philox for shuffles and tests; copyable value.
class PhiloxStream {
 public:
  explicit PhiloxStream(uint64_t seed, uint64_t stream = 0) : seed_(seed), stream_(stream) {}
  uint32_t NextU32();
  uint64_t NextU64() { return (uint64_t{NextU32()} << 32) | NextU32(); }
  // Uniform in [0, bound); bound > 0.
  uint64_t Below(uint64_t bound);
  double NextDouble() { return static_cast<double>(NextU64() >> 11) * 0x1.0p-53; }
  // Standard normal (Box-Muller).
  double NextGaussian();

 private:
  uint64_t seed_, stream_;
  uint64_t block_ = 0;
  std::array<uint32_t, 4> words_{};
  int used_ = 4;
};
}  // namespace stretto
