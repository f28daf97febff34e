// A deterministic automaton over bytes, made from a pattern by way of a nondeterministic one. It is
// built whole, within limits of size and work, so that what is too large is refused before
// anything depends on it; from every state but kDead a match can be reached.
//
// A part that is repeated often isn't written out: a state is a place in the table and the values
// of a few counters (how many characters of a string are behind, how many items of a list). States
// are plain numbers, so that they are the same whoever asks, and in which order.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/constrain/pattern.h"
#include "engine/constrain/work.h"

namespace stretto::engine {
struct AutomatonLimits {
  int32_t max_nfa_states = 100'000;
  int32_t max_states = 20'000;
  int64_t max_table_entries = int64_t{2} << 20;  // states times classes of bytes, 4 bytes each
  int64_t max_steps = Work::kMaxSteps;           // edges followed while it is built
  bool counters = true;                          // false: everything is written out
  Work* work = nullptr;  // what is left for this automaton and others; null: only max_steps counts
};

class Automaton {
 public:
  using State = int64_t;
  using Bytes = std::bitset<256>;
  static constexpr int32_t kDead = -1;

  // Of the texts that have none but the bytes `allowed`. InvalidArgument: too large, or nothing
  // matches. Cancelled, here and below: `limits.work` is.
  static absl::StatusOr<Automaton> Compile(const Pattern& pattern,
                                           const AutomatonLimits& limits = {},
                                           const Bytes& allowed = Bytes().set());
  // Of the texts that match both, or `a` but not `b`, both without counters. NotFound: there are
  // none; InvalidArgument: too large.
  static absl::StatusOr<Automaton> Intersect(const Automaton& a, const Automaton& b,
                                             const AutomatonLimits& limits = {});
  static absl::StatusOr<Automaton> Subtract(const Automaton& a, const Automaton& b,
                                            const AutomatonLimits& limits = {});
  // Of the decimal integers without leading zeros, negative ones too, that `divisor` divides.
  // `with_point`: points may stand between digits, and change nothing.
  static Automaton MultiplesOf(int32_t divisor, bool with_point = false);

  State start() const { return 0; }
  // Without counters they are the numbers below it.
  int32_t num_states() const { return static_cast<int32_t>(accepts_.size()); }
  bool has_counters() const { return !branches_.empty(); }
  State Next(State state, uint8_t byte) const {
    const int32_t next = next_SC_[PlaceOf(state) * num_classes_ + class_of_byte_[byte]];
    if (next >= 0) return (state & ~kPlaceMask) | next;
    return next == kDead ? kDead : Follow(state, next);
  }
  // Whether what led to the state matches.
  bool Accepts(State state) const { return accepts_[PlaceOf(state)]; }
  // Whether nothing can follow it.
  bool IsEnd(State state) const { return is_end_[PlaceOf(state)]; }
  bool Matches(absl::string_view text) const;
  // One of the states that take the same texts of up to `num_bytes` and match the same of them,
  // the same one for all.
  State Representative(State state, int32_t num_bytes) const;

 private:
  friend class AutomatonBuilder;
  static constexpr int kPlaceBits = 21;
  static constexpr State kPlaceMask = (State{1} << kPlaceBits) - 1;

  // Which way it goes depends on counters: the first one whose guards hold.
  struct Guard {
    int64_t mask = 0;
    int32_t shift = 0, low = 0, high = 0;
  };
  struct Branch {
    int32_t to = 0;
    State keep = 0, add = 0;  // of the counters' bits: which ones stay, and what is added to them
    uint32_t guards_begin = 0, guards_end = 0;  // in guards_
  };
  // A counter's values at which something changes, in order.
  struct Cuts {
    int shift = 0;
    int64_t mask = 0;
    std::vector<int32_t> values;
  };

  Automaton() = default;
  static size_t PlaceOf(State state) { return static_cast<size_t>(state & kPlaceMask); }
  State Follow(State state, int32_t branch) const;
  static absl::StatusOr<Automaton> Combine(const Automaton& a, const Automaton& b, bool b_matches,
                                           const AutomatonLimits& limits);
  // Cuts off the states from which no match can be reached, renumbers the rest and finds the ends.
  // False: nothing matches. Without counters.
  bool Trim();
  void FindEnds();

  size_t num_classes_ = 0;
  std::array<uint8_t, 256> class_of_byte_{};  // bytes that no edge tells apart
  std::vector<int32_t> next_SC_;  // states × classes; below kDead: -2 - the first of the branches
  std::vector<bool> accepts_, is_end_;
  std::vector<Branch> branches_;
  std::vector<Guard> guards_;
  std::vector<std::vector<Cuts>> cuts_S_;  // of states with counters
};
}  // namespace stretto::engine
