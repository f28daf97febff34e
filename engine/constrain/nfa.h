// A nondeterministic automaton with counters, made from a pattern: Thompson's construction (1968),
// but a part that is repeated often stands there once, with a counter of how many of it are behind.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "engine/constrain/pattern.h"

namespace stretto::engine {
// Counters within one another have different slots, from 0 on; a slot has the bits that the largest
// counter in it needs.
constexpr int kMaxSlots = 8;
constexpr int kMaxCounterBits = 42;  // of all slots together

struct ByteEdge {
  uint8_t first, last;
  int32_t to;
};

// An edge that reads nothing. Where it has a slot it can be followed only while the slot's value
// lies in [low, high].
struct EmptyEdge {
  enum class Effect : uint8_t { kNone, kZero, kPlus };  // on the slot
  int32_t to = 0;
  int8_t slot = -1;
  Effect effect = Effect::kNone;
  int32_t low = 0, high = std::numeric_limits<int32_t>::max();
};

struct NfaState {
  std::vector<ByteEdge> bytes;
  std::vector<EmptyEdge> empty;
  int32_t counter = -1;  // the innermost one around it, in Nfa::counters()
  int32_t origin = -1;   // in Nfa::origins()
};

// What is counted, and where a decision depends on it: at each cut some edge's guard changes.
struct Counter {
  const Pattern* pattern = nullptr;
  int32_t parent = -1;  // the counter around it
  int8_t slot = 0;
  std::vector<int32_t> cuts;
};

struct Origin {
  std::string where;
  int32_t parent = -1;
};

class Nfa {
 public:
  using PatternSet = absl::flat_hash_set<const Pattern*>;

  // `uncounted`: what is written out however often it is repeated. `counters` false: everything.
  Nfa(int32_t max_states, bool counters, PatternSet uncounted)
      : max_states_(max_states), counts_(counters), uncounted_(std::move(uncounted)) {}

  // To be called once. What follows is valid if it isn't full.
  void Build(const Pattern& pattern);
  bool full() const { return static_cast<int32_t>(states_.size()) > max_states_; }
  int32_t start() const { return 0; }
  int32_t accept() const { return accept_; }
  const std::vector<NfaState>& states() const { return states_; }
  const std::vector<Counter>& counters() const { return counters_; }
  size_t num_origins() const { return origins_.size(); }
  int slot_bits(int slot) const { return slot_bits_[static_cast<size_t>(slot)]; }
  // How many slots are in use in the state.
  int NumSlots(int32_t state) const {
    const int32_t counter = states_[static_cast<size_t>(state)].counter;
    return counter < 0 ? 0 : counters_[static_cast<size_t>(counter)].slot + 1;
  }
  // Where most of what is counted comes from, as a clause for a message: `num_of_origin` says how
  // many come from each origin itself.
  std::string LargestPart(const std::vector<int64_t>& num_of_origin) const;
  std::string LargestPart() const;

 private:
  struct Size {
    int64_t states = 0;  // about, when it is written out
    bool nullable = false;
  };

  int32_t Add();
  void Join(int32_t from, int32_t to) {
    states_[static_cast<size_t>(from)].empty.push_back({.to = to});
  }
  int32_t AddByte(int32_t from, uint8_t first, uint8_t last);
  // Adds the pattern behind `from`; the state behind it. Stops growing when full.
  int32_t Add(const Pattern& p, int32_t from);
  int32_t AddKind(const Pattern& p, int32_t from);
  int32_t AddChars(const Pattern& p, int32_t from);
  int32_t AddAlternate(const Pattern& p, int32_t from);
  int32_t AddRepeat(const Pattern& p, int32_t from);
  int32_t AddCopies(const Pattern& p, int32_t from);
  int32_t AddCounted(const Pattern& p, int32_t from);
  int32_t AddList(const Pattern& p, int32_t from);
  int32_t AddAutomaton(const Pattern& p, int32_t from);
  int32_t AddWithLengths(const Pattern& p, int32_t from);
  int32_t AddCountedAutomaton(const Pattern& p, int32_t from);
  int32_t AddLengthsWrittenOut(const Pattern& p, int32_t from);
  // Edges from `from`, which stands for the state `s` of p.automaton, to what `to_of` says of the
  // state behind. `in_escape` may go on, behind the first byte of an escape to the state behind,
  // from another state of this one's.
  void AddEdges(const Pattern& p, int32_t s, int32_t from,
                const std::function<int32_t(int32_t)>& to_of,
                const std::function<int32_t(int32_t, int32_t)>& in_escape = nullptr);
  int32_t NextSlot() const {
    return counter_ < 0 ? 0 : counters_[static_cast<size_t>(counter_)].slot + 1;
  }
  Size SizeOf(const Pattern& p);
  // Takes room for another counter's values in the slot; false: there isn't enough.
  bool TakeSlot(int slot, int32_t largest);

  const int32_t max_states_;
  const bool counts_;
  const PatternSet uncounted_;
  int32_t accept_ = 0;
  std::vector<NfaState> states_;
  std::vector<Counter> counters_;
  std::vector<Origin> origins_;
  int32_t counter_ = -1, origin_ = -1;  // of the states that are added now
  std::array<int, kMaxSlots> slot_bits_{};
  absl::flat_hash_map<const Pattern*, Size> sizes_;
};
}  // namespace stretto::engine
