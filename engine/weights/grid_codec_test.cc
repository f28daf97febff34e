#include "engine/weights/grid_codec.h"

#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/weights/change_table.h"
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
      if (kind == 2) {
        const bool usual = random.Below(8) != 0;
        symbols.push_back({2, usual ? 3 : static_cast<uint32_t>(random.Below(16)), 0});
      }
    }
    Bytes bytes;
    RangeEncoder encoder(&bytes);
    AdaptiveBit model;
    AdaptiveNibble nibble;
    for (const Symbol& s : symbols) {
      if (s.kind == 0) encoder.Encode(s.a, s.b, kFrequencyBits);
      if (s.kind == 1) encoder.EncodeBit(model, s.a != 0);
      if (s.kind == 2) encoder.EncodeNibble(nibble, static_cast<int>(s.a));
    }
    encoder.Finish();
    RangeDecoder decoder(bytes);
    model = AdaptiveBit();
    nibble = AdaptiveNibble();
    for (const Symbol& s : symbols) {
      if (s.kind == 0) {
        const uint32_t at = decoder.Peek(kFrequencyBits);
        REQUIRE(at >= s.a);
        REQUIRE(at - s.a < s.b);
        decoder.Take(s.a, s.b);
      }
      if (s.kind == 1) REQUIRE(decoder.DecodeBit(model) == (s.a != 0));
      if (s.kind == 2) REQUIRE(decoder.DecodeNibble(nibble) == static_cast<int>(s.a));
    }
    CHECK(decoder.AtEnd());
  }
}

TEST_CASE("sums of hazards, dense elements and changes agree with one element after another") {
  PhiloxStream random(testing::Seed(), 1);
  INFO("seed " << testing::Seed());
  for (int round = 0; round < 300; ++round) {
    std::array<uint8_t, kNumClasses> codes;
    for (uint8_t& code : codes) {
      code = random.Below(4) == 0 ? kDenseCode
                                  : static_cast<uint8_t>(random.Below(kMostHazardCode + 1));
    }
    const Hazards hazards(static_cast<uint8_t>(random.Below(250)), codes);
    Weights weights(random.Below(9000));
    for (uint16_t& w : weights) w = static_cast<uint16_t>(random.NextU32());
    std::vector<uint32_t> sums((weights.size() + kGroup - 1) / kGroup), expected_sums(sums.size());
    std::vector<uint32_t> dense, expected_dense;
    std::vector<GridChange> changed, expected_changed;
    Weights other = weights;
    for (uint32_t i = 0; i < weights.size(); ++i) {
      const uint8_t code = codes[static_cast<size_t>(hazards.ClassOf(weights[i]))];
      const bool is_dense = code == kDenseCode;
      if (is_dense) expected_dense.push_back(i);
      const uint32_t hazard = is_dense || code == 0 ? 0 : HazardOfCode(code);
      REQUIRE(hazards.Of(weights[i]) == hazard);
      expected_sums[i / kGroup] += hazard;
      if (random.Below(9) != 0) continue;
      other[i] ^= 1;
      expected_changed.push_back({i, weights[i], other[i]});
    }
    dense.resize(weights.size());
    Weights copy(weights.size());
    const size_t num_dense = ScanGroups(hazards, weights, sums.data(), dense.data(), copy.data());
    CHECK(copy == weights);
    CHECK(sums == expected_sums);
    CHECK(ScanGroups(hazards, weights, sums.data(), dense.data()) == num_dense);
    dense.resize(num_dense);
    CHECK(sums == expected_sums);
    CHECK(dense == expected_dense);
    FindChanges(weights, other, changed);
    CHECK((changed == expected_changed));
  }
}

TEST_CASE("zeros that all move to numbers of one size cost little more than their signs") {
  PhiloxStream random(testing::Seed(), 4);
  INFO("seed " << testing::Seed());
  Step step = RandomStep(random, 1 << 18, 0.1, 1e-6);
  double zeros = 0;
  for (size_t i = 0; i < step.before.size(); ++i) {
    if (random.Below(20) != 0) continue;
    const double update = (random.Below(2) != 0 ? 1e-6 : -1e-6) * (1 + 0.01 * random.NextDouble());
    step.before[i] = 0;
    step.after[i] = F32ToBf16(static_cast<float>(update));
    ++zeros;
  }
  const Bytes coded = EncodeGrid(step.before, step.after);
  const double entropy = EntropyBits(step) / 8;
  INFO(coded.size() << " bytes, entropy " << entropy);
  CHECK(entropy > zeros / 8);
  CHECK(static_cast<double>(coded.size()) < entropy * 1.06 + 100);
  RequireRoundTrip(step.before, step.after);
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
