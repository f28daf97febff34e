#include "engine/constrain/nfa.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/constrain/automaton.h"
#include "engine/constrain/lengths.h"

namespace stretto::engine {
namespace {
// What is smaller is written out: a state costs less than a counter.
constexpr int64_t kMinCountedStates = 64;
constexpr int64_t kHuge = int64_t{1} << 40;
constexpr size_t kMaxIntervals = 4;  // of counts that a state is possible behind
constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();

bool NeedsEscape(uint8_t byte) { return byte < 0x80 && !JsonEscape(byte).empty(); }

int BitsOf(int32_t value) {
  int bits = 1;
  while (value >> bits != 0) ++bits;
  return bits;
}
}  // namespace

void Nfa::Build(const Pattern& pattern) {
  const int32_t start = Add();
  accept_ = Add(pattern, start);
}

int32_t Nfa::Add() {
  NfaState& state = states_.emplace_back();
  state.counter = counter_;
  state.origin = origin_;
  return static_cast<int32_t>(states_.size()) - 1;
}

int32_t Nfa::AddByte(int32_t from, uint8_t first, uint8_t last) {
  const int32_t to = Add();
  states_[static_cast<size_t>(from)].bytes.push_back({first, last, to});
  return to;
}

int32_t Nfa::Add(const Pattern& p, int32_t from) {
  if (full()) return from;
  if (p.where.empty()) return AddKind(p, from);
  const int32_t around = origin_;
  origin_ = static_cast<int32_t>(origins_.size());
  origins_.push_back({p.where, around});
  const int32_t end = AddKind(p, from);
  origin_ = around;
  return end;
}

int32_t Nfa::AddKind(const Pattern& p, int32_t from) {
  switch (p.kind) {
    case Pattern::Kind::kBytes:
      return AddByte(from, p.first, p.last);
    case Pattern::Kind::kChars:
      return AddChars(p, from);
    case Pattern::Kind::kConcat:
      for (const PatternPtr& part : p.parts) from = Add(*part, from);
      return from;
    case Pattern::Kind::kAlternate:
      return AddAlternate(p, from);
    case Pattern::Kind::kRepeat:
      return AddRepeat(p, from);
    case Pattern::Kind::kList:
      return AddList(p, from);
    case Pattern::Kind::kAutomaton:
      return AddAutomaton(p, from);
  }
  return from;
}

int32_t Nfa::AddChars(const Pattern& p, int32_t from) {
  const int32_t end = Add();
  for (const auto& [first, last] : p.chars.ranges) {
    for (const std::vector<ByteRange>& sequence : Utf8Ranges(first, last)) {
      int32_t state = from;
      for (size_t i = 0; i + 1 < sequence.size(); ++i) {
        state = AddByte(state, sequence[i].first, sequence[i].second);
      }
      states_[static_cast<size_t>(state)].bytes.push_back(
          {sequence.back().first, sequence.back().second, end});
    }
    if (full()) break;
  }
  return end;
}

int32_t Nfa::AddAlternate(const Pattern& p, int32_t from) {
  const int32_t end = Add();
  for (const PatternPtr& part : p.parts) {
    const int32_t begin = Add();
    Join(from, begin);
    Join(Add(*part, begin), end);
  }
  return end;
}

// How much the pattern takes when it is written out, and whether it matches the empty text.
Nfa::Size Nfa::SizeOf(const Pattern& p) {
  const auto known = sizes_.find(&p);
  if (known != sizes_.end()) return known->second;
  Size size{1, p.kind == Pattern::Kind::kConcat};
  for (size_t i = 0; i < p.parts.size(); ++i) {
    const Size part = SizeOf(*p.parts[i]);
    size.states += part.states;
    if (p.kind == Pattern::Kind::kConcat) size.nullable &= part.nullable;
    if (p.kind == Pattern::Kind::kAlternate) size.nullable |= part.nullable;
    if (p.kind == Pattern::Kind::kRepeat && i == 0) size.nullable = part.nullable || p.min == 0;
  }
  if (p.kind == Pattern::Kind::kChars) {
    for (const auto& [first, last] : p.chars.ranges) {
      size.states += static_cast<int64_t>(last > 0x7F ? Utf8Ranges(first, last).size() : 0);
    }
  }
  if (p.kind == Pattern::Kind::kAutomaton) {
    const bool empty = p.automaton->Accepts(p.automaton->start());
    const int64_t copies = p.lengths == nullptr ? 1 : p.lengths->last() + 1;
    size = {p.automaton->num_states() * copies, empty && (copies == 1 || p.lengths->min == 0)};
  }
  if (p.kind == Pattern::Kind::kRepeat) {
    size.states *= std::max({p.min, p.max, 1});
  }
  if (p.kind == Pattern::Kind::kList) {
    size.nullable = std::find(p.required.begin(), p.required.end(), true) == p.required.end();
  }
  size.states = std::min(size.states, kHuge);
  return sizes_[&p] = size;
}

bool Nfa::TakeSlot(int slot, int32_t largest) {
  if (slot >= kMaxSlots) return false;
  const int bits = BitsOf(largest);
  int total = 0;
  for (int s = 0; s < kMaxSlots; ++s) {
    total += s == slot ? std::max(slot_bits(s), bits) : slot_bits(s);
  }
  if (total > kMaxCounterBits) return false;
  slot_bits_[static_cast<size_t>(slot)] = std::max(slot_bits(slot), bits);
  return true;
}

int32_t Nfa::AddRepeat(const Pattern& p, int32_t from) {
  const int32_t copies = std::max(p.min, p.max);
  const bool pays = copies > 1 && SizeOf(p).states > kMinCountedStates;
  if (!counts_ || !pays || SizeOf(*p.parts[0]).nullable || uncounted_.contains(&p)) {
    return AddCopies(p, from);
  }
  return TakeSlot(NextSlot(), copies) ? AddCounted(p, from) : AddCopies(p, from);
}

int32_t Nfa::AddCopies(const Pattern& p, int32_t from) {
  const bool has_separator = p.parts.size() > 1;
  const auto next = [&](int32_t at, bool is_first) {
    return has_separator && !is_first ? Add(*p.parts[1], at) : at;
  };
  const int32_t num_before_loop = p.max < 0 ? std::max(p.min - 1, 0) : p.min;
  for (int32_t i = 0; i < num_before_loop && !full(); ++i) {
    from = Add(*p.parts[0], next(from, i == 0));
  }
  const int32_t end = Add();
  if (p.max < 0) {
    // One copy, to be left behind it, or also before it where none is needed.
    const int32_t loop = Add();
    if (p.min == 0) Join(from, end);
    Join(next(from, num_before_loop == 0), loop);
    const int32_t tail = Add(*p.parts[0], loop);
    Join(tail, end);
    Join(next(tail, /*is_first=*/false), loop);
    return end;
  }
  for (int32_t i = p.min; i < p.max && !full(); ++i) {
    const int32_t begin = Add();
    Join(next(from, i == 0), begin);
    Join(from, end);
    from = Add(*p.parts[0], begin);
  }
  Join(from, end);
  return end;
}

// One copy between `head` and `tail`. The counter says how many are behind; of any number above the
// least only that it is above.
int32_t Nfa::AddCounted(const Pattern& p, int32_t from) {
  using Effect = EmptyEdge::Effect;
  const int32_t end = Add();
  if (p.min == 0) Join(from, end);
  const int32_t around = counter_;
  Counter counter{&p, around, static_cast<int8_t>(NextSlot()), {}};
  if (p.min > 1) counter.cuts.push_back(p.min - 1);
  if (p.max > 1 && p.max != p.min) counter.cuts.push_back(p.max - 1);
  const int8_t slot = counter.slot;
  counter_ = static_cast<int32_t>(counters_.size());
  counters_.push_back(std::move(counter));
  const int32_t head = Add();
  states_[static_cast<size_t>(from)].empty.push_back(
      {.to = head, .slot = slot, .effect = Effect::kZero});
  const int32_t tail = Add(*p.parts[0], head);
  const int32_t again = Add();
  const int32_t next = p.parts.size() > 1 ? Add(*p.parts[1], again) : again;
  Join(next, head);
  counter_ = around;
  auto& edges = states_[static_cast<size_t>(tail)].empty;
  // Behind the tail one more is there than the counter says.
  const int32_t last_plus = p.max < 0 ? p.min - 2 : p.max - 2;
  edges.push_back({again, slot, Effect::kPlus, 0, last_plus});
  if (p.max < 0) {
    edges.push_back({.to = again, .slot = slot, .low = std::max(p.min - 1, 0)});
  }
  edges.push_back({.to = end, .slot = slot, .low = std::max(p.min - 1, 0)});
  return end;
}

// Two tracks: nothing has been written yet, and something has. Both lead into the same copy of an
// item, the second over the separator.
int32_t Nfa::AddList(const Pattern& p, int32_t from) {
  int32_t none = from, some = Add();
  for (size_t i = 1; i < p.parts.size() && !full(); ++i) {
    const int32_t item = Add(), next_none = Add(), next_some = Add();
    Join(none, item);
    Join(Add(*p.parts[0], some), item);
    Join(Add(*p.parts[i], item), next_some);
    if (!p.required[i - 1]) {
      Join(none, next_none);
      Join(some, next_some);
    }
    none = next_none;
    some = next_some;
  }
  const int32_t end = Add();
  Join(none, end);
  Join(some, end);
  return end;
}

// Within a JSON string, bytes that can't stand there are written as escapes.
void Nfa::AddEdges(const Pattern& p, int32_t s, int32_t from,
                   const std::function<int32_t(int32_t)>& to_of,
                   const std::function<int32_t(int32_t, int32_t)>& in_escape) {
  const Automaton& automaton = *p.automaton;
  for (int32_t first = 0, last = 0; first < 256; first = last + 1) {
    const auto next = static_cast<int32_t>(automaton.Next(s, static_cast<uint8_t>(first)));
    for (last = first; last < 255; ++last) {
      const auto byte = static_cast<uint8_t>(last + 1);
      if (automaton.Next(s, byte) != next || (p.json && NeedsEscape(byte)) ||
          (p.json && NeedsEscape(static_cast<uint8_t>(last)))) {
        break;
      }
    }
    const int32_t to = next == Automaton::kDead ? -1 : to_of(next);
    if (to < 0) continue;
    const auto byte = static_cast<uint8_t>(first);
    if (p.json && NeedsEscape(byte)) {
      int32_t at = from;
      const std::string escape = JsonEscape(static_cast<char32_t>(byte));
      for (const char& c : escape) {
        at = AddByte(at, static_cast<uint8_t>(c), static_cast<uint8_t>(c));
        if (&c == escape.data() && in_escape != nullptr) at = in_escape(at, next);
      }
      Join(at, to);
    } else {
      states_[static_cast<size_t>(from)].bytes.push_back({byte, static_cast<uint8_t>(last), to});
    }
  }
}

// A copy of each state.
int32_t Nfa::AddAutomaton(const Pattern& p, int32_t from) {
  if (p.lengths != nullptr) return AddWithLengths(p, from);
  const Automaton& automaton = *p.automaton;
  const int32_t end = Add(), base = static_cast<int32_t>(states_.size());
  for (int32_t s = 0; s < automaton.num_states() && !full(); ++s) Add();
  if (full()) return end;
  Join(from, base);
  for (int32_t s = 0; s < automaton.num_states() && !full(); ++s) {
    if (automaton.Accepts(s)) Join(base + s, end);
    AddEdges(p, s, base + s, [base](int32_t to) { return base + to; });
  }
  return end;
}

int32_t Nfa::AddWithLengths(const Pattern& p, int32_t from) {
  const LengthLimits& lengths = *p.lengths;
  size_t num_intervals = 0;
  for (const auto& intervals : lengths.possible_S) {
    num_intervals = std::max(num_intervals, intervals.size());
  }
  const bool pays = SizeOf(p).states > kMinCountedStates && num_intervals <= kMaxIntervals;
  const bool counts = counts_ && pays && !uncounted_.contains(&p) && lengths.last() > 0;
  return counts && TakeSlot(NextSlot(), lengths.last()) ? AddCountedAutomaton(p, from)
                                                        : AddLengthsWrittenOut(p, from);
}

// A copy of each state, and one more that is entered first: it only reads the counter, and leads to
// the copy where a match is possible from there, behind a match also to the end.
int32_t Nfa::AddCountedAutomaton(const Pattern& p, int32_t from) {
  using Effect = EmptyEdge::Effect;
  const Automaton& automaton = *p.automaton;
  const LengthLimits& lengths = *p.lengths;
  const int32_t end = Add(), num_states = automaton.num_states(), last = lengths.last();
  if (lengths.min == 0 && automaton.Accepts(automaton.start())) Join(from, end);
  const auto slot = static_cast<int8_t>(NextSlot());
  const int32_t around = counter_, counter = static_cast<int32_t>(counters_.size());
  counters_.push_back({&p, around, slot, {}});
  counter_ = counter;
  const auto base = static_cast<int32_t>(states_.size());
  for (int32_t i = 0; i < 2 * num_states; ++i) Add();
  if (lengths.IsPossible(0, 0)) {
    states_[static_cast<size_t>(from)].empty.push_back(
        {.to = base, .slot = slot, .effect = Effect::kZero});
  }
  const auto add = [&](int32_t at, int32_t to, Effect effect, int32_t low, int32_t high) {
    low = std::max(low, 0);
    if (low > high) return;
    states_[static_cast<size_t>(at)].empty.push_back({to, slot, effect, low, high});
    std::vector<int32_t>& cuts = counters_[static_cast<size_t>(counter)].cuts;
    if (low > 0) cuts.push_back(low);
    if (high < kNoLimit) cuts.push_back(high + 1);
  };
  // Guards speak of the counter's value before the character: without a most, `last` is any more.
  const auto add_where_possible = [&](int32_t at, int32_t to, int32_t s, bool ends_char,
                                      bool counts) {
    for (const auto& [low, high] : lengths.possible_S[static_cast<size_t>(s)]) {
      const bool stays = lengths.max < 0 && high == last;
      const int32_t shift = ends_char ? 1 : 0;
      add(at, to, counts ? Effect::kPlus : Effect::kNone, low - shift, high - shift);
      if (stays && ends_char) add(at, to, Effect::kNone, last, kNoLimit);
    }
  };
  for (int32_t s = 0; s < num_states && !full(); ++s) {
    const int32_t behind = base + num_states + s;
    AddEdges(
        p, s, base + s, [&](int32_t to) { return base + num_states + to; },
        [&](int32_t at, int32_t to) {
          const int32_t open = Add();
          add_where_possible(at, open, to, /*ends_char=*/true, /*counts=*/false);
          return open;
        });
    const bool ends_char = !lengths.is_within_char_S[static_cast<size_t>(s)];
    add_where_possible(behind, base + s, s, ends_char, ends_char);
    if (!ends_char || !automaton.Accepts(s)) continue;
    add(behind, end, Effect::kNone, lengths.min - 1, lengths.max < 0 ? kNoLimit : lengths.max - 1);
  }
  counter_ = around;
  return end;
}

// A copy of each state for each count behind which it is possible.
int32_t Nfa::AddLengthsWrittenOut(const Pattern& p, int32_t from) {
  const Automaton& automaton = *p.automaton;
  const LengthLimits& lengths = *p.lengths;
  const int32_t end = Add(), last = lengths.last();
  std::vector<int32_t> now(static_cast<size_t>(automaton.num_states()), -1), next;
  now[0] = lengths.IsPossible(0, 0) ? Add() : -1;
  if (now[0] >= 0) Join(from, now[0]);
  for (int32_t count = 0; count <= last && !full(); ++count) {
    const bool stays = count == last && lengths.max < 0;  // any number more
    next.assign(now.size(), -1);
    const auto to_of = [&](int32_t to) -> int32_t {
      const auto s = static_cast<size_t>(to);
      if (!lengths.is_within_char_S[s]) {
        if (!lengths.IsPossible(to, std::min(count + 1, last)) || (count == last && !stays)) {
          return -1;
        }
        int32_t& copy = stays ? now[s] : next[s];
        return copy >= 0 ? copy : copy = Add();
      }
      return now[s] >= 0 ? now[s] : now[s] = Add();
    };
    // Copies come while their edges are added: of states within characters, and of those that stay.
    std::vector<bool> done(now.size());
    for (bool more = true; more && !full();) {
      more = false;
      for (size_t s = 0; s < now.size() && !full(); ++s) {
        if (now[s] < 0 || done[s]) continue;
        done[s] = more = true;
        const auto state = static_cast<int32_t>(s);
        if (automaton.Accepts(state) && count >= lengths.min) Join(now[s], end);
        AddEdges(p, state, now[s], to_of);
      }
    }
    now.swap(next);
  }
  return end;
}

std::string Nfa::LargestPart() const {
  std::vector<int64_t> num_of_origin(origins_.size());
  for (const NfaState& state : states_) {
    if (state.origin >= 0) ++num_of_origin[static_cast<size_t>(state.origin)];
  }
  return LargestPart(num_of_origin);
}

// From the whole inwards as long as one part has more than half of it.
std::string Nfa::LargestPart(const std::vector<int64_t>& num_of_origin) const {
  if (origins_.size() < 2) return "";
  std::vector<int64_t> with_parts = num_of_origin;
  for (size_t i = origins_.size(); i-- > 1;) {
    if (origins_[i].parent >= 0) {
      with_parts[static_cast<size_t>(origins_[i].parent)] += with_parts[i];
    }
  }
  size_t at = 0;
  while (true) {
    size_t largest = 0;
    for (size_t i = at + 1; i < origins_.size(); ++i) {
      if (origins_[i].parent == static_cast<int32_t>(at) &&
          (largest == 0 || with_parts[i] > with_parts[largest])) {
        largest = i;
      }
    }
    if (largest == 0 || (at != 0 && 2 * with_parts[largest] < with_parts[at])) break;
    const bool is_most = 2 * with_parts[largest] >= with_parts[at];
    at = largest;
    if (!is_most) break;
  }
  const int64_t percent = 100 * with_parts[at] / std::max<int64_t>(with_parts[0], 1);
  if (percent == 0 || origins_[at].where == "#")
    return "";  // many small ones: to know one of them helps nobody
  return absl::StrCat("; the largest part of it is ", origins_[at].where, " (", percent, " %)");
}
}  // namespace stretto::engine
