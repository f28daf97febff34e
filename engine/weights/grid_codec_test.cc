#include "engine/weights/grid_codec.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <map>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/weights/grid_scan.h"
#include "engine/weights/range_coder.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
using Weights = std::vector<uint16_t>;

// Gaussian weights, and what an optimizer step that adds ±lr to f32 masters makes of them.
struct Step {
  Weights before, after;
};
Step RandomStep(PhiloxStream& random, size_t size, double scale, double lr) {
  Step step;
  for (size_t i = 0; i < size; ++i) {
    const double master = random.NextGaussian() * scale;
    const double moved = master + (random.Below(2) != 0 ? lr : -lr);
    step.before.push_back(F32ToBf16(static_cast<float>(master)));
    step.after.push_back(F32ToBf16(static_cast<float>(moved)));
  }
  return step;
}

// Bits of (changed or not, by how many grid steps) given the exponent.
double EntropyBits(const Step& step) {
  std::map<int, std::map<int64_t, double>> counts;
  for (size_t i = 0; i < step.before.size(); ++i) {
    const int64_t by = ToGrid(step.after[i]) - ToGrid(step.before[i]);
    ++counts[step.before[i] >> 7 & 0xff][by];
  }
  double bits = 0;
  for (const auto& [exponent, steps] : counts) {
    double total = 0;
    for (const auto& [by, count] : steps) total += count;
    for (const auto& [by, count] : steps) bits -= count * std::log2(count / total);
  }
  return bits;
}

void RequireRoundTrip(const Weights& before, const Weights& after) {
  const Bytes coded = EncodeGrid(before, after);
  REQUIRE(!coded.empty());
  Weights out(before.size());
  REQUIRE_OK(DecodeGrid(before, coded, absl::MakeSpan(out)));
  REQUIRE(out == after);
}
}  // namespace

TEST_CASE("a range coder gives back its symbols") {
  PhiloxStream random(testing::Seed());
  INFO("seed " << testing::Seed());
  for (int round = 0; round < 50; ++round) {
    struct Symbol {
      uint32_t kind, a, b;
    };
    std::vector<Symbol> symbols;
    for (uint64_t n = random.Below(3000); n > 0; --n) {
      const auto kind = static_cast<uint32_t>(random.Below(3));
      uint32_t begin = static_cast<uint32_t>(random.Below(1u << kFrequencyBits));
      uint32_t size = 1 + static_cast<uint32_t>(random.Below((1u << kFrequencyBits) - begin));
      if (random.Below(4) == 0) size = 1;
      // Long runs of carries: the last symbol of all.
      if (random.Below(3) == 0) begin = (1u << kFrequencyBits) - size;
      if (kind == 0) symbols.push_back({0, begin, size});
      if (kind == 1) symbols.push_back({1, random.Below(50) == 0 ? 1u : 0u, 0});
      if (kind == 2) symbols.push_back({2, static_cast<uint32_t>(random.Below(1u << 20)), 20});
    }
    Bytes bytes;
    RangeEncoder encoder(&bytes);
    AdaptiveBit model;
    for (const Symbol& s : symbols) {
      if (s.kind == 0) encoder.Encode(s.a, s.b);
      if (s.kind == 1) encoder.EncodeBit(model, s.a != 0);
      if (s.kind == 2) encoder.EncodeEven(s.a, static_cast<int>(s.b));
    }
    encoder.Finish();
    RangeDecoder decoder(bytes);
    model = AdaptiveBit();
    for (const Symbol& s : symbols) {
      if (s.kind == 0) {
        const uint32_t at = decoder.Peek();
        REQUIRE(at >= s.a);
        REQUIRE(at - s.a < s.b);
        decoder.Take(s.a, s.b);
      }
      if (s.kind == 1) REQUIRE(decoder.DecodeBit(model) == (s.a != 0));
      if (s.kind == 2) REQUIRE(decoder.DecodeEven(static_cast<int>(s.b)) == s.a);
    }
    CHECK(decoder.AtEnd());
  }
}

TEST_CASE("sums and walks of hazards agree with one element after another") {
  PhiloxStream random(testing::Seed(), 1);
  INFO("seed " << testing::Seed());
  for (int round = 0; round < 300; ++round) {
    Hazards hazards;
    hazards.first_exponent = static_cast<uint8_t>(random.Below(250));
    for (int c = 0; c < kNumClasses; ++c) {
      hazards.SetClass(c, random.Below(4) == 0 ? 0 : static_cast<uint32_t>(random.Below(65536)));
    }
    Weights weights(random.Below(200));
    for (uint16_t& w : weights) w = static_cast<uint16_t>(random.NextU32());
    uint64_t sum = 0;
    for (uint16_t w : weights) sum += hazards.Of(w);
    CHECK(SumHazards(hazards, weights) == sum);
    const uint64_t target = random.Below(sum + 2);
    uint64_t rest = target, expected_rest = target;
    size_t expected = 0;
    while (expected < weights.size() && hazards.Of(weights[expected]) <= expected_rest) {
      expected_rest -= hazards.Of(weights[expected++]);
    }
    CHECK(WalkHazards(hazards, weights, rest) == expected);
    CHECK(rest == expected_rest);
    Weights other = weights;
    std::vector<uint32_t> changed, found;
    for (size_t i = 0; i < other.size(); ++i) {
      if (random.Below(9) != 0) continue;
      other[i] ^= 1;
      changed.push_back(static_cast<uint32_t>(i + 7));
    }
    FindChanges(weights, other, 7, found);
    CHECK(found == changed);
  }
}

TEST_CASE("what is coded comes back, from one change to many") {
  PhiloxStream random(testing::Seed(), 2);
  INFO("seed " << testing::Seed());
  for (int round = 0; round < 60; ++round) {
    const size_t size = 1 + random.Below(70000);
    Weights before(size);
    const bool gaussian = random.Below(2) == 0;
    for (uint16_t& w : before) {
      w = gaussian ? F32ToBf16(static_cast<float>(random.NextGaussian() * 0.05))
                   : static_cast<uint16_t>(random.NextU32());
    }
    Weights after = before;
    const uint64_t one_in = uint64_t{1} << random.Below(15);
    for (uint16_t& w : after) {
      if (random.Below(one_in) != 0) continue;
      w = random.Below(3) == 0 ? static_cast<uint16_t>(random.NextU32()) : w ^ 1;
    }
    after[random.Below(size)] ^= 0x8000;
    if (after == before) continue;
    RequireRoundTrip(before, after);
    RequireRoundTrip(after, before);
  }
}

TEST_CASE("the code comes close to the entropy given the exponent") {
  PhiloxStream random(testing::Seed(), 3);
  INFO("seed " << testing::Seed());
  // From one change in two hundred elements to one in ten.
  for (const double lr : {1e-6, 5e-6, 1e-5}) {
    for (const double scale : {0.02, 0.2}) {
      const Step step = RandomStep(random, 1 << 19, scale, lr);
      const Bytes coded = EncodeGrid(step.before, step.after);
      REQUIRE(!coded.empty());
      const double entropy = EntropyBits(step) / 8;
      INFO("lr " << lr << ", weights of size " << scale << ": " << coded.size()
                 << " bytes, entropy " << entropy);
      CHECK(static_cast<double>(coded.size()) < entropy * 1.05 + 100);
      RequireRoundTrip(step.before, step.after);
    }
  }
}
}  // namespace stretto::engine
