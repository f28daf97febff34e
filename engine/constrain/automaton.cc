#include "engine/constrain/automaton.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/constrain/automaton_builder.h"

namespace stretto::engine {
absl::StatusOr<Automaton> Automaton::Compile(const Pattern& pattern, const AutomatonLimits& limits,
                                             const Bytes& allowed) {
  return AutomatonBuilder(limits, allowed).Build(pattern);
}

bool Automaton::Trim() {
  const size_t num_states = accepts_.size();
  std::vector<std::vector<int32_t>> sources(num_states);
  for (size_t i = 0; i < next_SC_.size(); ++i) {
    if (next_SC_[i] >= 0) sources[next_SC_[i]].push_back(static_cast<int32_t>(i / num_classes_));
  }
  std::vector<bool> alive = accepts_;
  std::vector<int32_t> stack;
  for (size_t s = 0; s < num_states; ++s) {
    if (alive[s]) stack.push_back(static_cast<int32_t>(s));
  }
  while (!stack.empty()) {
    const int32_t s = stack.back();
    stack.pop_back();
    for (const int32_t from : sources[s]) {
      if (alive[from]) continue;
      alive[from] = true;
      stack.push_back(from);
    }
  }
  if (num_states == 0 || !alive[0]) return false;
  std::vector<int32_t> new_id(num_states, kDead), next_SC;
  std::vector<bool> accepts;
  for (size_t s = 0; s < num_states; ++s) {
    if (!alive[s]) continue;
    new_id[s] = static_cast<int32_t>(accepts.size());
    accepts.push_back(accepts_[s]);
  }
  for (size_t i = 0; i < next_SC_.size(); ++i) {
    if (!alive[i / num_classes_]) continue;
    next_SC.push_back(next_SC_[i] < 0 ? kDead : new_id[next_SC_[i]]);
  }
  next_SC_ = std::move(next_SC);
  accepts_ = std::move(accepts);
  FindEnds();
  return true;
}

void Automaton::FindEnds() {
  is_end_.resize(accepts_.size());
  for (size_t s = 0; s < is_end_.size(); ++s) {
    const auto row = next_SC_.begin() + static_cast<int64_t>(s * num_classes_);
    is_end_[s] = std::all_of(row, row + static_cast<int64_t>(num_classes_),
                             [](int32_t to) { return to == kDead; });
  }
}

Automaton::State Automaton::Follow(State state, int32_t next) const {
  const auto holds = [this, state](const Branch& branch) {
    for (uint32_t i = branch.guards_begin; i < branch.guards_end; ++i) {
      const Guard& guard = guards_[i];
      const int64_t value = state >> guard.shift & guard.mask;
      if (value < guard.low || value > guard.high) return false;
    }
    return true;
  };
  const Branch* branch = &branches_[static_cast<size_t>(-2 - next)];
  while (!holds(*branch)) ++branch;
  return ((state & branch->keep) + branch->add) | branch->to;
}

// A counter grows by at most one with each byte: as long as no cut is that near, any of the values
// since the last cut does.
Automaton::State Automaton::Representative(State state, int32_t num_bytes) const {
  if (cuts_S_.empty()) return state;
  for (const Cuts& cuts : cuts_S_[PlaceOf(state)]) {
    const int64_t value = state >> cuts.shift & cuts.mask;
    const auto above = std::upper_bound(cuts.values.begin(), cuts.values.end(), value);
    if (above != cuts.values.end() && *above - value < num_bytes) continue;
    const int64_t since = above == cuts.values.begin() ? 0 : *(above - 1);
    state += (since - value) * (State{1} << cuts.shift);
  }
  return state;
}

bool Automaton::Matches(absl::string_view text) const {
  State state = start();
  for (const char byte : text) {
    state = Next(state, static_cast<uint8_t>(byte));
    if (state == kDead) return false;
  }
  return Accepts(state);
}

// Finding a pair's number costs about so many times what following an edge does.
constexpr int64_t kPairSteps = 4;

// The product construction. States are pairs; that of `b` may be dead when `b` must not match.
absl::StatusOr<Automaton> Automaton::Combine(const Automaton& a, const Automaton& b, bool b_matches,
                                             const AutomatonLimits& limits) {
  STRETTO_CHECK(!a.has_counters() && !b.has_counters());
  Automaton result;
  std::map<std::pair<int, int>, int> class_ids;
  std::vector<uint8_t> first_byte;
  for (size_t byte = 0; byte < 256; ++byte) {
    const std::pair<int, int> key(a.class_of_byte_[byte], b.class_of_byte_[byte]);
    const auto [it, is_new] = class_ids.emplace(key, static_cast<int>(class_ids.size()));
    if (is_new) first_byte.push_back(static_cast<uint8_t>(byte));
    result.class_of_byte_[byte] = static_cast<uint8_t>(it->second);
  }
  result.num_classes_ = first_byte.size();
  std::map<std::pair<int32_t, int32_t>, int32_t> ids{{{0, 0}, 0}};
  std::vector<std::pair<int32_t, int32_t>> states{{0, 0}};
  int64_t num_steps = 0;
  for (size_t s = 0; s < states.size(); ++s) {
    const auto [in_a, in_b] = states[s];
    const bool b_accepts = in_b != kDead && b.Accepts(in_b);
    result.accepts_.push_back(a.Accepts(in_a) && b_accepts == b_matches);
    for (const uint8_t byte : first_byte) {
      const auto to_a = static_cast<int32_t>(a.Next(in_a, byte));
      const auto to_b = static_cast<int32_t>(in_b == kDead ? kDead : b.Next(in_b, byte));
      if (to_a == kDead || (to_b == kDead && b_matches)) {
        result.next_SC_.push_back(kDead);
        continue;
      }
      const auto next_id = static_cast<int32_t>(states.size());
      const auto [it, is_new] = ids.emplace(std::pair(to_a, to_b), next_id);
      if (is_new) states.push_back(it->first);
      result.next_SC_.push_back(it->second);
    }
    const int64_t new_steps = kPairSteps * static_cast<int64_t>(first_byte.size());
    num_steps += new_steps;
    if (limits.work != nullptr && !limits.work->Spend(new_steps)) return limits.work->Status();
    if (static_cast<int64_t>(states.size()) > limits.max_states || num_steps > limits.max_steps) {
      return absl::InvalidArgumentError(absl::StrCat(
          "it is too complex: more than ", limits.max_states, " states, or too long to build"));
    }
  }
  if (!result.Trim()) return absl::NotFoundError("no text is left");
  return result;
}

absl::StatusOr<Automaton> Automaton::Intersect(const Automaton& a, const Automaton& b,
                                               const AutomatonLimits& limits) {
  return Combine(a, b, /*b_matches=*/true, limits);
}
absl::StatusOr<Automaton> Automaton::Subtract(const Automaton& a, const Automaton& b,
                                              const AutomatonLimits& limits) {
  return Combine(a, b, /*b_matches=*/false, limits);
}

// States: the beginning, behind a minus, behind a zero that nothing follows, and one a remainder.
Automaton Automaton::MultiplesOf(int32_t divisor, bool with_point) {
  constexpr int32_t kBegin = 0, kMinus = 1, kZero = 2, kFirst = 3;
  Automaton result;
  result.num_classes_ = 13;  // ten digits, minus, point, anything else
  for (size_t byte = 0; byte < 256; ++byte) {
    result.class_of_byte_[byte] = byte >= '0' && byte <= '9' ? static_cast<uint8_t>(byte - '0')
                                  : byte == '-'              ? 10
                                  : byte == '.'              ? 11
                                                             : 12;
  }
  for (int32_t state = 0; state < kFirst + divisor; ++state) {
    for (int32_t c = 0; c < 13; ++c) {
      int32_t to = kDead;
      if (c == 10 && state == kBegin) to = kMinus;
      if (c < 10 && state < kZero) to = c == 0 ? kZero : kFirst + c % divisor;
      if (c == 0 && state == kMinus) to = kDead;
      if (c < 10 && state >= kFirst) {
        to = kFirst + static_cast<int32_t>((int64_t{10} * (state - kFirst) + c) % divisor);
      }
      if (with_point && c == 0 && state == kMinus) to = kZero;
      if (with_point && c == 11 && state >= kZero) to = std::max(state, kFirst);
      result.next_SC_.push_back(to);
    }
    result.accepts_.push_back(state == kZero || state == kFirst);
  }
  result.Trim();
  return result;
}
}  // namespace stretto::engine
