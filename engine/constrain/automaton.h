// A deterministic automaton over bytes, made from a pattern by way of a nondeterministic one. It is
// built whole, within limits of size and work, so that what is too large is refused before
// anything depends on it; states from which no match can be reached are cut off, so that as long as
// a state is not kDead a match is still possible.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/constrain/pattern.h"

namespace stretto::engine {
struct AutomatonLimits {
  int32_t max_nfa_states = 100'000;
  int32_t max_states = 20'000;
  int64_t max_table_entries = int64_t{2} << 20;  // states times classes of bytes, 4 bytes each
  int64_t max_steps = int64_t{20} << 20;         // edges followed while it is built
};

class Automaton {
 public:
  static constexpr int32_t kDead = -1;

  using Bytes = std::bitset<256>;

  // Of the texts that have none but the bytes `allowed`. InvalidArgument: too large, or nothing
  // matches.
  static absl::StatusOr<Automaton> Compile(const Pattern& pattern,
                                           const AutomatonLimits& limits = {},
                                           const Bytes& allowed = Bytes().set());
  // Of the texts that match both, or `a` but not `b`. NotFound: there are none; InvalidArgument:
  // too large.
  static absl::StatusOr<Automaton> Intersect(const Automaton& a, const Automaton& b,
                                             const AutomatonLimits& limits = {});
  static absl::StatusOr<Automaton> Subtract(const Automaton& a, const Automaton& b,
                                            const AutomatonLimits& limits = {});
  // Of the decimal integers without leading zeros, negative ones too, that `divisor` divides.
  static Automaton MultiplesOf(int32_t divisor);

  int32_t start() const { return 0; }
  int32_t num_states() const { return static_cast<int32_t>(accepts_.size()); }
  int32_t Next(int32_t state, uint8_t byte) const {
    return next_SC_[static_cast<size_t>(state) * num_classes_ + class_of_byte_[byte]];
  }
  // Whether what led to the state matches.
  bool Accepts(int32_t state) const { return accepts_[static_cast<size_t>(state)]; }
  // Whether nothing can follow it.
  bool IsEnd(int32_t state) const { return is_end_[static_cast<size_t>(state)]; }
  bool Matches(absl::string_view text) const;
  // What has been followed while it was built, of AutomatonLimits::max_steps.
  int64_t num_steps() const { return num_steps_; }

 private:
  friend class AutomatonBuilder;
  Automaton() = default;
  static absl::StatusOr<Automaton> Combine(const Automaton& a, const Automaton& b, bool b_matches,
                                           const AutomatonLimits& limits);
  // Cuts off the states from which no match can be reached, renumbers the rest and finds the ends.
  // False: nothing matches.
  bool Trim();

  int64_t num_steps_ = 0;
  size_t num_classes_ = 0;
  std::array<uint8_t, 256> class_of_byte_{};  // bytes that no edge tells apart
  std::vector<int32_t> next_SC_;              // states × classes
  std::vector<bool> accepts_, is_end_;
};
}  // namespace stretto::engine
