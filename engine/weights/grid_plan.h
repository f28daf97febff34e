// What is decided about a bf16 delta from a part of the elements before it is coded: how many
// changed and by how much, and which classes of exponents (grid_lines.h) are told together.
#pragma once

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "engine/weights/grid_lines.h"

namespace stretto::engine {
struct GridSample {
  uint8_t first_exponent = 0;
  double scale = 1;  // all elements to those looked at
  ClassCounts counts;
  uint64_t seen = 0, changed = 0, by_one = 0;  // of counts
};
// Of two tensors of the same size.
GridSample SampleChanges(absl::Span<const uint16_t> base, absl::Span<const uint16_t> next);

struct GridPlan {
  ClassGroups groups;
  std::array<int, kMaxSparseGroups> gap_bits = {};  // to begin with: GapMean
};
GridPlan PlanGroups(const GridSample& sample);
}  // namespace stretto::engine
