#include "engine/weights/grid_codec.h"

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <map>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/weights/dense_code.h"
#include "engine/weights/grid_lines.h"
#include "engine/weights/grid_plan.h"
#include "engine/weights/symbol_code.h"
#include "engine/weights/varint.h"
#include "hwy/highway.h"

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

Bytes Encode(const Weights& before, const Weights& after) {
  return EncodeGrid(PlanGroups(SampleChanges(before, after)), before, after);
}

void RequireRoundTrip(const Weights& before, const Weights& after) {
  const Bytes coded = Encode(before, after);
  REQUIRE(!coded.empty());
  Weights out(before.size());
  REQUIRE_OK(DecodeGrid(before, coded, absl::MakeSpan(out)));
  REQUIRE(out == after);
}

// Runs the rest of the test once for each instruction set that this processor has.
void ForEachInstructionSet(const std::function<void()>& test) {
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const int64_t target = left & -left;
    INFO(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    test();
    hwy::SetSupportedTargetsForTest(0);
  }
}

// A group's elements of which one in `one_in` changed, and the next ones likewise.
void RequireGaps(PhiloxStream& random, int bits, std::vector<uint64_t> one_in) {
  std::vector<RankBits> blocks;
  std::vector<uint32_t> counts;
  GapWriter writer(bits);
  for (const uint64_t one : one_in) {
    RankBits& block = blocks.emplace_back();
    block = {};
    const uint32_t count = counts.emplace_back(static_cast<uint32_t>(random.Below(kChunk + 1)));
    for (uint32_t i = 0; i < count; ++i) {
      if (random.Below(one) == 0) block[i / 64] |= uint64_t{1} << (i % 64);
    }
    writer.Write(block, count);
  }
  Bytes bytes = writer.Finish();
  const size_t size = bytes.size();
  bytes.resize(size + kReadAhead);
  GapReader reader(bits, bytes.data(), 0, size * 8);
  for (size_t i = 0; i < blocks.size(); ++i) {
    REQUIRE_FALSE(reader.AtEnd());
    RankBits block;
    REQUIRE(reader.Read(counts[i], block));
    for (uint32_t w = 0; w < (counts[i] + 63) / 64; ++w) REQUIRE(block[w] == blocks[i][w]);
  }
  REQUIRE(reader.AtEnd());
  GapReader cut_off(bits, bytes.data(), 0, (size - 1) * 8);
  bool is_whole = true;
  for (const uint32_t count : counts) {
    RankBits block;
    is_whole = is_whole && cut_off.Read(count, block);
  }
  REQUIRE_FALSE((is_whole && cut_off.AtEnd()));
}
}  // namespace

TEST_CASE("gaps come back, however often and however seldom ranks change") {
  PhiloxStream random(testing::Seed());
  INFO("seed " << testing::Seed());
  ForEachInstructionSet([&] {
    for (int round = 0; round < 40; ++round) {
      std::vector<uint64_t> one_in;
      for (uint64_t n = 1 + random.Below(9); n > 0; --n) {
        one_in.push_back(uint64_t{1} << random.Below(20));
      }
      RequireGaps(random, static_cast<int>(random.Below(GapMean::kMostBits + 1)), one_in);
    }
  });
}

TEST_CASE("symbols come back, in about the bits of their entropy") {
  PhiloxStream random(testing::Seed(), 5);
  INFO("seed " << testing::Seed());
  for (int round = 0; round < 200; ++round) {
    std::vector<uint32_t> counts(1 + random.Below(round % 10 == 0 ? kMostSymbols : 90));
    uint32_t most = 1;
    for (uint32_t& count : counts) {
      // From all alike to each about twice the last; some never come.
      if (random.Below(3) == 0) continue;
      count = static_cast<uint32_t>(1 + random.Below(most));
      most = round % 2 == 0 ? 1 : std::min(most * 2, 1u << 12);
    }
    counts[random.Below(counts.size())] += 1;
    const std::vector<uint8_t> levels = LevelsOf(counts);
    Bytes bytes;
    PutLevels(levels, bytes);
    absl::Span<const uint8_t> in(bytes);
    std::vector<uint8_t> back;
    REQUIRE(GetLevels(in, levels.size(), back));
    CHECK(in.empty());
    CHECK(back == levels);
    in = absl::MakeConstSpan(bytes).first(bytes.size() - 1);
    CHECK_FALSE(GetLevels(in, levels.size(), back));

    const Frequencies of = FrequenciesOf(levels);
    REQUIRE(of.begins.back() == 1u << of.bits);
    std::vector<size_t> symbols;
    double entropy = 0, total = 0;
    for (const uint32_t count : counts) total += count;
    for (size_t s = 0; s < counts.size(); ++s) {
      REQUIRE((counts[s] > 0) == (of.begins[s + 1] > of.begins[s]));
      if (counts[s] > 0) entropy -= counts[s] * std::log2(counts[s] / total);
      symbols.insert(symbols.end(), counts[s], s);
    }
    for (size_t i = symbols.size(); i > 1; --i) std::swap(symbols[i - 1], symbols[random.Below(i)]);
    SymbolEncoder encoder;
    for (const size_t s : symbols) encoder.Add(of, s);
    Bytes coded = encoder.Finish();
    const size_t size = coded.size();
    CHECK(static_cast<double>(size) * 8 < entropy + 0.1 * total + 64);
    coded.resize(size + kReadAhead);
    SymbolDecoder decoder(absl::MakeConstSpan(coded).first(size));
    for (const size_t s : symbols) {
      const uint32_t at = decoder.Peek((1u << of.bits) - 1);
      REQUIRE(at >= of.begins[s]);
      REQUIRE(at < of.begins[s + 1]);
      decoder.Take(of.begins[s + 1] - of.begins[s], at - of.begins[s], of.bits);
      REQUIRE_FALSE(decoder.IsCutOff());
    }
    CHECK(decoder.AtEnd());
  }
}

TEST_CASE("elements that are told one by one come back, wherever they go") {
  PhiloxStream random(testing::Seed(), 6);
  INFO("seed " << testing::Seed());
  for (int round = 0; round < 60; ++round) {
    Weights before(random.Below(6000)), after;
    for (uint16_t& w : before) {
      w = static_cast<uint16_t>(random.Below(round % 3 == 0 ? 65536 : 1024) + 0x3400);
      const uint64_t kind = random.Below(4);
      uint16_t to = w;
      if (kind == 1) to = static_cast<uint16_t>(w + random.Below(15) - 7);
      if (kind == 2) to = static_cast<uint16_t>(0x3586 + random.Below(2) * 0x8000);
      if (kind == 3) to = static_cast<uint16_t>(random.NextU32());
      after.push_back(to);
    }
    DenseEncoder encoder;
    for (size_t i = 0; i < before.size(); ++i) encoder.Add(before[i], after[i]);
    Bytes bytes = encoder.Finish();
    const size_t size = bytes.size();
    bytes.resize(size + kReadAhead);
    DenseDecoder decoder;
    REQUIRE_OK(decoder.Start(absl::MakeConstSpan(bytes).first(size)));
    for (size_t i = 0; i < before.size(); ++i) {
      REQUIRE(decoder.Next(before[i]) == after[i]);
      REQUIRE_FALSE(decoder.IsCutOff());
    }
    REQUIRE(decoder.AtEnd());
    if (before.size() > 50) continue;
  }
}

TEST_CASE("lines agree with one element after another, on every instruction set") {
  PhiloxStream random(testing::Seed(), 1);
  INFO("seed " << testing::Seed());
  ForEachInstructionSet([&] {
    for (int round = 0; round < 40; ++round) {
      const size_t num_lines = 1 + random.Below(kChunkLines), size = num_lines * kLine;
      ClassGroups groups{.first_exponent = static_cast<uint8_t>(random.Below(241)),
                         .num_sparse = static_cast<int>(1 + random.Below(kMaxSparseGroups))};
      for (uint8_t& bit : groups.bits) {
        const auto group = static_cast<int>(random.Below(kMaskSlots + 1));
        if (group < groups.num_sparse || group == kDenseGroup)
          bit = static_cast<uint8_t>(1 << group);
      }
      Weights base(size), next;
      for (uint16_t& w : base) {
        w = static_cast<uint16_t>(random.NextU32());
        const uint64_t kind = random.Below(8);
        next.push_back(static_cast<uint16_t>(kind == 0   ? w + 1
                                             : kind == 1 ? w - 1
                                             : kind == 2 ? random.NextU32()
                                                         : w));
      }
      LineMasks masks = {};
      std::array<LineChanges, kChunkLines> changes = {};
      GroupLines(groups, base.data(), num_lines, masks);
      CompareLines(base.data(), next.data(), num_lines, changes.data());
      ClassCounts counts, expected;
      CountClasses(groups.first_exponent, base.data(), next.data(), num_lines, counts);
      for (size_t i = 0; i < size; ++i) {
        const auto c = static_cast<size_t>(groups.ClassOf(base[i]));
        const auto by = static_cast<uint16_t>(next[i] - base[i]);
        const LineChanges& line = changes[i / kLine];
        REQUIRE((line.up >> i % kLine & 1) == (by == 1));
        REQUIRE((line.down >> i % kLine & 1) == (by == 0xffff));
        REQUIRE((line.changed >> i % kLine & 1) == (by != 0));
        for (int g = 0; g < kMaskSlots; ++g) {
          if (g >= groups.num_sparse && g != kDenseGroup) continue;
          REQUIRE((masks[i / kLine * kMaskSlots + g] >> i % kLine & 1) ==
                  (groups.bits[c] >> g & 1));
        }
        ++expected.all[c];
        expected.changed[c] += by != 0;
        expected.by_one[c] += by == 1 || by == 0xffff;
      }
      CHECK(counts.all == expected.all);
      CHECK(counts.changed == expected.changed);
      CHECK(counts.by_one == expected.by_one);

      // Only what changed by one in a sparse group is told by rank.
      static GroupBits bits;
      GroupCounts sizes, again;
      BitWriter writer;
      const auto before = changes;
      GatherRanks(groups.num_sparse, masks, num_lines, changes.data(), bits, sizes, writer);
      CountGroups(groups.num_sparse, masks, num_lines, again);
      for (int g = 0; g < groups.num_sparse; ++g) CHECK(sizes[g] == again[g]);
      Bytes signs = writer.Finish();
      const size_t sign_bytes = signs.size();
      signs.resize(sign_bytes + kReadAhead);
      std::array<LineChanges, kChunkLines> back;
      size_t at = 0;
      ScatterRanks(groups.num_sparse, masks, num_lines, bits, signs.data(), at, back.data());
      CHECK((at + 7) / 8 == sign_bytes);
      Weights out(size);
      StepLines(base.data(), back.data(), num_lines, out.data());
      for (size_t i = 0; i < size; ++i) {
        const uint64_t was = before[i / kLine].changed >> i % kLine & 1;
        const uint64_t is = changes[i / kLine].changed >> i % kLine & 1;
        const auto by = static_cast<uint16_t>(next[i] - base[i]);
        const uint8_t group = groups.bits[static_cast<size_t>(groups.ClassOf(base[i]))];
        const bool told = (by == 1 || by == 0xffff) && group != 0 && group != 1 << kDenseGroup;
        REQUIRE(is == (told ? 0 : was));
        REQUIRE(out[i] == (told ? next[i] : base[i]));
      }
    }
  });
}

TEST_CASE("every instruction set writes the same bytes and reads them") {
  PhiloxStream random(testing::Seed(), 7);
  INFO("seed " << testing::Seed());
  const Step step = RandomStep(random, 150001, 0.02, 3e-6);
  const Bytes expected = Encode(step.before, step.after);
  ForEachInstructionSet([&] {
    CHECK(Encode(step.before, step.after) == expected);
    Weights out(step.before.size());
    REQUIRE_OK(DecodeGrid(step.before, expected, absl::MakeSpan(out)));
    CHECK(out == step.after);
  });
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
  const Bytes coded = Encode(step.before, step.after);
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
      const Bytes coded = Encode(step.before, step.after);
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
