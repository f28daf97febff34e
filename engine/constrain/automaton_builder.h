// From a nondeterministic automaton to a deterministic one: the subset construction (Rabin & Scott
// 1959), where the states of a set share the values of their counters. Where they couldn't, because
// a text can be counted in several ways, what is counted there is written out instead.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/constrain/automaton.h"
#include "engine/constrain/nfa.h"

namespace stretto::engine {
class AutomatonBuilder {
 public:
  AutomatonBuilder(const AutomatonLimits& limits, const Automaton::Bytes& allowed)
      : limits_(limits), allowed_(allowed) {}

  absl::StatusOr<Automaton> Build(const Pattern& pattern);

 private:
  enum class Value : uint8_t { kUnset, kSame, kPlus, kZero };  // of a slot, by that before the byte
  using Values = std::array<Value, kMaxSlots>;
  // An interval of each slot's values before the byte, and one value of it.
  struct Region {
    std::array<int32_t, kMaxSlots> low{}, high{};
  };

  // Aborted: it has to be tried again, with more in uncounted_.
  absl::Status TryBuild(const Pattern& pattern);
  void FindAlive();
  void FindClasses();
  absl::Status Expand(size_t s);
  absl::StatusOr<int32_t> NextCode(size_t s, std::vector<int32_t> targets);
  absl::StatusOr<int32_t> Branches(size_t s, const std::vector<int32_t>& targets);
  absl::Status AddBranch(size_t s, const std::vector<int32_t>& targets, const Region& region);
  // Follows the empty edges that are open in the region; values_ of all that is reached.
  absl::Status Close(std::vector<int32_t>& set, const Region& region);
  // Follows all empty edges. Whether counters were met on the way; `cuts` of each slot.
  bool CloseOpen(std::vector<int32_t>& set, std::vector<int32_t>* cuts);
  void KeepTelling(std::vector<int32_t>& set) const;
  absl::Status Reach(int32_t state, const Values& values, std::vector<int32_t>& set);
  absl::StatusOr<Values> CommonValues(const std::vector<int32_t>& set);
  absl::Status WriteOut(int32_t a, int32_t b, int slot);
  int32_t IdOf(std::vector<int32_t> set);
  int NumSlots(const std::vector<int32_t>& set) const;
  Automaton::State SlotMask(int slot) const {
    return ((Automaton::State{1} << nfa_->slot_bits(slot)) - 1)
           << shift_[static_cast<size_t>(slot)];
  }
  absl::Status Finish();
  std::vector<Automaton::Cuts> CutsOf(const std::vector<int32_t>& set) const;
  absl::Status CheckSteps();
  absl::Status TooComplex() const;

  const AutomatonLimits limits_;
  const Automaton::Bytes allowed_;
  Nfa::PatternSet uncounted_;
  int64_t num_steps_ = 0, num_spent_ = 0;  // of limits_.work
  // Of one try:
  std::unique_ptr<Nfa> nfa_;
  Automaton automaton_;
  std::array<int, kMaxSlots> shift_{};
  std::vector<bool> alive_;
  std::vector<uint8_t> first_byte_;  // of each class
  std::map<std::vector<int32_t>, int32_t> ids_;
  std::vector<const std::vector<int32_t>*> sets_;  // by id
  std::vector<int64_t> marks_;
  std::vector<Values> values_;  // of the states with the last mark
  int64_t mark_ = 0;
};
}  // namespace stretto::engine
