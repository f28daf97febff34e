// What grid_lines.cc does for each line on processors that turn bits over: eight masks at once, and
// what they add up to, in as many instructions as one takes elsewhere. The same results.
#pragma once

#include <cstdint>

#include "engine/weights/grid_lines.h"

namespace stretto::engine {
// A chunk's changes by one, in sparse groups: of `num` lines that have some.
struct OneSteps {
  uint64_t masks[kChunkLines];  // of the num first
  uint16_t lines[kChunkLines];  // not bytes, which could be anything to a compiler
  size_t num;
};

// Whether this processor does; only then may the others be called.
bool CanTranspose();
// So that tests see what processors do that can't. Not while deltas are made.
void ForbidTransposeForTest(bool forbid);

// Sets `line_begins` where CompareLines of grid_lines.cc sets `begins`.
void CompareTransposed(const ClassGroups& groups, const Lines& base, const uint16_t* next,
                       ChunkGroups& chunk, OneSteps& steps, uint64_t* others);
void GroupTransposed(const ClassGroups& groups, const Lines& base, ChunkGroups& chunk);
// CountClasses.
void CountTransposed(uint8_t first_exponent, const uint16_t* base, const uint16_t* next,
                     size_t num_lines, ClassCounts& counts);
}  // namespace stretto::engine
