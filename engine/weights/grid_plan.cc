#include "engine/weights/grid_plan.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace stretto::engine {
namespace {
constexpr size_t kRunLines = 8, kMaxRuns = 64;

// So that the next run is there when the one before has been counted.
void FetchRun(const uint16_t* begin) {
  const char* const bytes = reinterpret_cast<const char*>(begin);
  for (size_t at = 0; at < kRunLines * kLine * sizeof(uint16_t); at += 64) {
    __builtin_prefetch(bytes + at);
  }
}

// The largest exponent of which there are more than a few is that of the last class.
uint8_t FirstExponent(absl::Span<const uint16_t> elements) {
  constexpr size_t kRun = 16, kRuns = 64;
  std::array<uint32_t, 256> counts = {};
  const size_t stride = std::max(kRun, elements.size() / kRuns);
  size_t seen = 0;
  for (size_t begin = 0; begin < elements.size(); begin += stride) {
    __builtin_prefetch(elements.data() + begin);  // all of them are under way at once
  }
  for (size_t begin = 0; begin < elements.size(); begin += stride) {
    const size_t end = std::min(begin + kRun, elements.size());
    for (size_t i = begin; i < end; ++i) ++counts[elements[i] >> 7 & 0xff];
    seen += end - begin;
  }
  int last = 255;
  for (uint64_t above = 0; last > kNumClasses - 1; --last) {
    above += counts[static_cast<size_t>(last)];
    if (above * 512 > seen) break;
  }
  return static_cast<uint8_t>(last - (kNumClasses - 1));
}

// Classes that are told together.
struct Group {
  double all = 0, changed = 0;
  uint32_t classes = 0;  // bits

  double Share() const { return changed / all; }
  // That it takes to say which changed.
  double Bits() const {
    const double same = all - changed;
    return changed * std::log2(all / changed) + (same > 0 ? same * std::log2(all / same) : 0);
  }
  Group With(const Group& other) const {
    return {all + other.all, changed + other.changed, classes | other.classes};
  }
};

// Joins the two of neighbouring shares that cost least together, until that were much.
void JoinGroups(std::vector<Group>& groups) {
  std::sort(groups.begin(), groups.end(),
            [](const Group& a, const Group& b) { return a.Share() < b.Share(); });
  std::vector<double> bits;
  double total = 0;
  for (const Group& group : groups) total += bits.emplace_back(group.Bits());
  const double much = std::max(64.0, total * 0.01);
  while (groups.size() > 1) {
    double least = 0;
    size_t best = 0;
    for (size_t i = 0; i + 1 < groups.size(); ++i) {
      const double more = groups[i].With(groups[i + 1]).Bits() - bits[i] - bits[i + 1];
      if (i == 0 || more < least) {
        least = more;
        best = i;
      }
    }
    if (least > much && groups.size() <= kMaxSparseGroups) return;
    groups[best] = groups[best].With(groups[best + 1]);
    bits[best] = groups[best].Bits();
    groups.erase(groups.begin() + static_cast<ptrdiff_t>(best) + 1);
    bits.erase(bits.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
}
}  // namespace

GridSample SampleChanges(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next) {
  GridSample sample;
  sample.first_exponent = FirstExponent(base);
  const size_t num_lines = base.size() / kLine;
  const size_t stride = std::max(kRunLines, num_lines / kMaxRuns);
  for (size_t line = 0; line < num_lines; line += stride) {
    if (line + stride + kRunLines <= num_lines) {
      FetchRun(base.data() + (line + stride) * kLine);
      FetchRun(next.data() + (line + stride) * kLine);
    }
    CountClasses(sample.first_exponent, base.data() + line * kLine, next.data() + line * kLine,
                 std::min(kRunLines, num_lines - line), sample.counts);
  }
  if (num_lines == 0) {
    std::array<uint16_t, kLine> before = {}, after = {};
    std::copy(base.begin(), base.end(), before.begin());
    std::copy(next.begin(), next.end(), after.begin());
    CountClasses(sample.first_exponent, before.data(), after.data(), 1, sample.counts);
  }
  for (size_t c = 0; c < kNumClasses; ++c) {
    sample.seen += sample.counts.all[c];
    sample.changed += sample.counts.changed[c];
    sample.by_one += sample.counts.by_one[c];
  }
  sample.scale = static_cast<double>(base.size()) / static_cast<double>(sample.seen);
  return sample;
}

GridPlan PlanGroups(const GridSample& sample) {
  GridPlan plan;
  plan.groups.first_exponent = sample.first_exponent;
  std::vector<Group> groups;
  for (size_t c = 0; c < kNumClasses; ++c) {
    const uint32_t all = sample.counts.all[c], changed = sample.counts.changed[c];
    const uint32_t far = changed - sample.counts.by_one[c];
    // Where most changes are of more than a step, each has to be told with its size.
    if (changed * 5 > all * 2 || (far * 8 > changed && changed * 16 > all)) {
      plan.groups.bits[c] = 1 << kDenseGroup;
      continue;
    }
    groups.push_back({(all + 1) * sample.scale, changed * sample.scale + 0.5, 1u << c});
  }
  JoinGroups(groups);
  plan.groups.num_sparse = static_cast<int>(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t c = 0; c < kNumClasses; ++c) {
      if ((groups[g].classes >> c & 1) != 0) plan.groups.bits[c] = static_cast<uint8_t>(1u << g);
    }
    const double gap = 1 / groups[g].Share();
    plan.gap_bits[g] = GapMean::BitsFor(static_cast<uint64_t>(gap * GapMean::kBlock));
  }
  plan.groups.SetGroups();
  return plan;
}
}  // namespace stretto::engine
