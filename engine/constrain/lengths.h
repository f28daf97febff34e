// Texts of an automaton whose number of characters is limited: from which of its states, behind how
// many characters, one of these texts can still be reached.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/constrain/automaton.h"

namespace stretto::engine {
struct LengthLimits {
  int32_t min = 0, max = -1;  // max < 0: none
  // Counts are told apart up to this one; where there is no most, it stands for more, too.
  int32_t last() const { return max < 0 ? min : max; }

  using Intervals = std::vector<std::pair<int32_t, int32_t>>;
  // Of each state: the counts, in order and apart, behind which a match is possible from there. Of
  // one within a character: of the characters before that.
  std::vector<Intervals> possible_S;
  std::vector<bool> is_within_char_S;

  // Of an automaton over UTF-8, without counters. null: that takes too much work, or
  // more than is left.
  static std::shared_ptr<const LengthLimits> Of(const Automaton& automaton, int32_t min,
                                                int32_t max, Work* work);
  bool IsPossible(int64_t state, int32_t count) const;
};
}  // namespace stretto::engine
