#include "engine/weights/grid_codec.h"

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/weights/dense_code.h"
#include "engine/weights/grid_lines.h"
#include "engine/weights/grid_plan.h"
#include "engine/weights/grid_transpose.h"
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
  std::vector<uint16_t> seen;
  REQUIRE_OK(DecodeGrid(before, coded, absl::MakeSpan(out), [&](absl::Span<const uint16_t> piece) {
    seen.insert(seen.end(), piece.begin(), piece.end());
  }));
  CHECK(seen == out);
  REQUIRE(out == after);
}

// Runs the rest of the test once for each instruction set that this processor has.
void ForEachInstructionSet(const std::function<void()>& test) {
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const int64_t target = left & -left;
    INFO(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    for (const bool forbid : {false, true}) {
      ForbidTransposeForTest(forbid);
      if (!forbid && (target > HWY_AVX3 || !CanTranspose())) continue;
      test();
    }
    ForbidTransposeForTest(false);
    hwy::SetSupportedTargetsForTest(0);
  }
}

// Chunks of one group, of which one in `one_in` elements changed, and the next ones likewise.
void RequireGaps(PhiloxStream& random, int bits, const std::vector<uint64_t>& one_in) {
  ClassGroups groups{.first_exponent = 100, .bits = {}, .num_sparse = 1, .group_of = {}};
  groups.bits.fill(1);
  groups.bits[3] = 0;
  groups.SetGroups();
  std::vector<std::unique_ptr<ChunkGroups>> chunks;
  std::vector<ChangedLines> changes;
  std::vector<size_t> num_changes;
  GapWriter writer(bits);
  for (const uint64_t one : one_in) {
    Weights weights(kLine * (1 + random.Below(kChunkLines)));
    for (uint16_t& w : weights) w = static_cast<uint16_t>(random.NextU32());
    ChunkGroups& chunk = *chunks.emplace_back(std::make_unique<ChunkGroups>());
    GroupLines(groups, {weights.data(), weights.size() / kLine}, chunk);
    ChangedLines& changed = changes.emplace_back();
    changed = {};
    std::vector<uint16_t> ranks;
    uint16_t rank = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (groups.ClassOf(weights[i]) == 3) continue;
      if (random.Below(one) == 0) {
        ranks.push_back(rank);
        changed[i / kLine] |= uint64_t{1} << i % kLine;
      }
      ++rank;
    }
    REQUIRE(chunk.sizes[0] == rank);
    writer.Write(ranks.data(), static_cast<uint32_t>(ranks.size()), rank);
    num_changes.push_back(writer.num_changes());
  }
  Bytes bytes = writer.Finish();
  const size_t size = bytes.size();
  bytes.resize(size + kReadAhead);
  GapReader reader(bits, num_changes.back(), absl::MakeConstSpan(bytes).first(size));
  for (size_t i = 0; i < chunks.size(); ++i) {
    REQUIRE(reader.AtEnd() == ((i == 0 ? 0 : num_changes[i - 1]) == num_changes.back()));
    ChangedLines changed = {};
    REQUIRE(reader.Read(*chunks[i], 0, changed));
    REQUIRE(changed == changes[i]);
  }
  REQUIRE(reader.AtEnd());
  if (size == 0) return;
  GapReader cut_off(bits, num_changes.back(), absl::MakeConstSpan(bytes).first(size - 1));
  bool is_whole = true;
  for (const auto& chunk : chunks) {
    ChangedLines changed = {};
    is_whole = is_whole && cut_off.Read(*chunk, 0, changed);
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
    SymbolEncoder encoder(symbols.size());
    const std::vector<SymbolStep> steps = StepsOf(of);
    for (const size_t s : symbols) encoder.Add(steps[s]);
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
  const auto chunk = std::make_unique<ChunkGroups>();
  const auto ranks = std::make_unique<ChangedRanks>();
  ForEachInstructionSet([&] {
    for (int round = 0; round < 40; ++round) {
      ClassGroups groups{.first_exponent = static_cast<uint8_t>(random.Below(241)),
                         .bits = {},
                         .num_sparse = static_cast<int>(random.Below(kMaxSparseGroups + 1)),
                         .group_of = {}};
      for (uint8_t& bit : groups.bits) {
        const auto group = static_cast<int>(random.Below(9));
        if (group < groups.num_sparse || group == kDenseGroup) {
          bit = static_cast<uint8_t>(1 << group);
        }
      }
      groups.SetGroups();
      const size_t num_lines = 1 + random.Below(kChunkLines), size = num_lines * kLine;
      Weights base(size), next;
      for (uint16_t& w : base) {
        w = static_cast<uint16_t>(random.NextU32());
        const uint64_t kind = random.Below(8);
        next.push_back(static_cast<uint16_t>(kind == 0   ? w + 1
                                             : kind == 1 ? w - 1
                                             : kind == 2 ? random.NextU32()
                                                         : w));
      }
      const size_t end = size - random.Below(kLine);
      Lines lines{base.data(), num_lines};
      if (end < size) lines.last_line = (uint64_t{1} << end % kLine) - 1;
      std::array<uint64_t, kChunkLines> others;
      BitWriter writer;
      GatherRanks(groups, lines, next.data(), *chunk, *ranks, writer, others.data());
      ClassCounts counts, expected;
      CountClasses(groups.first_exponent, base.data(), next.data(), num_lines, counts);

      std::array<std::vector<uint16_t>, kMaxSparseGroups> expected_ranks;
      std::array<uint16_t, kMaxSparseGroups> sizes = {};
      ChangedLines changed = {};
      for (size_t i = 0; i < size; ++i) {
        const auto c = static_cast<size_t>(groups.ClassOf(base[i]));
        const auto by = static_cast<uint16_t>(next[i] - base[i]);
        const bool by_one = by == 1 || by == 0xffff, there = i < end;
        ++expected.all[c];
        expected.changed[c] += by != 0;
        expected.by_one[c] += by_one;
        const bool dense = groups.bits[c] == 1 << kDenseGroup, none = groups.bits[c] == 0;
        const uint64_t dense_mask = chunk->masks[i / kLine * ChunkGroups::kSlots + kDenseGroup];
        REQUIRE((dense_mask >> i % kLine & 1) == (dense && there));
        REQUIRE((others[i / kLine] >> i % kLine & 1) ==
                (!dense && by != 0 && (none || !by_one) && there));
        if (dense || none || !there) continue;
        const auto g = static_cast<size_t>(__builtin_ctz(groups.bits[c]));
        if (by_one) {
          expected_ranks[g].push_back(sizes[g]);
          changed[i / kLine] |= uint64_t{1} << i % kLine;
        }
        ++sizes[g];
      }
      CHECK(counts.all == expected.all);
      CHECK(counts.changed == expected.changed);
      CHECK(counts.by_one == expected.by_one);
      for (size_t g = 0; g < static_cast<size_t>(groups.num_sparse); ++g) {
        CHECK(chunk->sizes[g] == sizes[g]);
        const std::vector<uint16_t> got(ranks->of[g].begin(), ranks->of[g].begin() + ranks->num[g]);
        CHECK(got == expected_ranks[g]);
      }
      Bytes signs = writer.Finish();
      const size_t sign_bytes = signs.size();
      signs.resize(sign_bytes + kReadAhead);
      Weights out(size), streamed(size + 1);
      size_t at = 0;
      StepLines(lines, changed, signs.data(), at, out.data());
      CHECK((at + 7) / 8 == sign_bytes);
      for (size_t i = 0; i < size; ++i) {
        REQUIRE(out[i] == ((changed[i / kLine] >> i % kLine & 1) != 0 ? next[i] : base[i]));
      }
      StreamElements(out.data(), end, streamed.data() + 1);
      FinishStream();
      CHECK(
          std::equal(out.begin(), out.begin() + static_cast<ptrdiff_t>(end), streamed.begin() + 1));
      CHECK((end == size || streamed[end + 1] == 0));
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
    REQUIRE_OK(DecodeGrid(step.before, expected, absl::MakeSpan(out), [](auto) {}));
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
