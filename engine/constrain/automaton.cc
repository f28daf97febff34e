#include "engine/constrain/automaton.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
struct ByteEdge {
  uint8_t first, last;
  int32_t to;
};
struct NfaState {
  std::vector<ByteEdge> bytes;
  std::vector<int32_t> empty;
};

// Thompson's construction (1968): one fragment a node of the pattern, joined by empty edges.
class Nfa {
 public:
  explicit Nfa(int32_t max_states) : max_states_(max_states) {}

  int32_t Add() {
    states_.emplace_back();
    return static_cast<int32_t>(states_.size()) - 1;
  }
  bool full() const { return static_cast<int32_t>(states_.size()) > max_states_; }
  const std::vector<NfaState>& states() const { return states_; }

  // Adds the pattern behind `from`; the state behind it. Stops growing when full.
  int32_t Build(const Pattern& p, int32_t from) {
    if (full()) return from;
    switch (p.kind) {
      case Pattern::Kind::kBytes:
        return AddByte(from, p.first, p.last);
      case Pattern::Kind::kChars:
        return BuildChars(p, from);
      case Pattern::Kind::kConcat:
        for (const PatternPtr& part : p.parts) from = Build(*part, from);
        return from;
      case Pattern::Kind::kAlternate:
        return BuildAlternate(p, from);
      case Pattern::Kind::kRepeat:
        return BuildRepeat(p, from);
      case Pattern::Kind::kList:
        return BuildList(p, from);
      case Pattern::Kind::kAutomaton:
        return BuildAutomaton(p, from);
    }
    return from;
  }

 private:
  void Join(int32_t from, int32_t to) { states_[from].empty.push_back(to); }
  int32_t AddByte(int32_t from, uint8_t first, uint8_t last) {
    const int32_t to = Add();
    states_[from].bytes.push_back({first, last, to});
    return to;
  }

  int32_t BuildChars(const Pattern& p, int32_t from) {
    const int32_t end = Add();
    for (const auto& [first, last] : p.chars.ranges) {
      for (const std::vector<ByteRange>& sequence : Utf8Ranges(first, last)) {
        int32_t state = from;
        for (size_t i = 0; i + 1 < sequence.size(); ++i) {
          state = AddByte(state, sequence[i].first, sequence[i].second);
        }
        states_[state].bytes.push_back({sequence.back().first, sequence.back().second, end});
      }
      if (full()) break;
    }
    return end;
  }

  int32_t BuildAlternate(const Pattern& p, int32_t from) {
    const int32_t end = Add();
    for (const PatternPtr& part : p.parts) {
      const int32_t begin = Add();
      Join(from, begin);
      Join(Build(*part, begin), end);
    }
    return end;
  }

  int32_t BuildRepeat(const Pattern& p, int32_t from) {
    for (int32_t i = 0; i < p.min && !full(); ++i) {
      from = Build(*p.parts[0], from);
    }
    const int32_t end = Add();
    if (p.max < 0) {
      const int32_t loop = Add();
      Join(from, loop);
      Join(Build(*p.parts[0], loop), loop);
      Join(loop, end);
      return end;
    }
    for (int32_t i = p.min; i < p.max && !full(); ++i) {
      const int32_t begin = Add();
      Join(from, begin);
      Join(from, end);
      from = Build(*p.parts[0], begin);
    }
    Join(from, end);
    return end;
  }

  // Two tracks: nothing has been written yet, and something has. Both lead into the same copy of an
  // item, the second over the separator.
  int32_t BuildList(const Pattern& p, int32_t from) {
    int32_t none = from, some = Add();
    for (size_t i = 1; i < p.parts.size() && !full(); ++i) {
      const int32_t item = Add(), next_none = Add(), next_some = Add();
      Join(none, item);
      Join(Build(*p.parts[0], some), item);
      Join(Build(*p.parts[i], item), next_some);
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

  // A copy of each state. Within a JSON string, bytes that can't stand there are written out.
  int32_t BuildAutomaton(const Pattern& p, int32_t from) {
    const Automaton& automaton = *p.automaton;
    const int32_t end = Add(), base = static_cast<int32_t>(states_.size());
    for (int32_t s = 0; s < automaton.num_states() && !full(); ++s) Add();
    if (full()) return end;
    Join(from, base);
    for (int32_t s = 0; s < automaton.num_states() && !full(); ++s) {
      if (automaton.Accepts(s)) Join(base + s, end);
      for (int32_t first = 0, last = 0; first < 256; first = last + 1) {
        const int32_t to = automaton.Next(s, static_cast<uint8_t>(first));
        for (last = first; last < 255; ++last) {
          const auto next = static_cast<uint8_t>(last + 1);
          if (automaton.Next(s, next) != to || (p.json && NeedsEscape(next)) ||
              (p.json && NeedsEscape(static_cast<uint8_t>(last)))) {
            break;
          }
        }
        if (to == Automaton::kDead) continue;
        const auto byte = static_cast<uint8_t>(first);
        if (p.json && NeedsEscape(byte)) {
          int32_t at = base + s;
          const std::string escape = JsonEscape(static_cast<char32_t>(byte));
          for (const char c : escape)
            at = AddByte(at, static_cast<uint8_t>(c), static_cast<uint8_t>(c));
          Join(at, base + to);
        } else {
          states_[base + s].bytes.push_back({byte, static_cast<uint8_t>(last), base + to});
        }
      }
    }
    return end;
  }
  static bool NeedsEscape(uint8_t byte) { return byte < 0x80 && !JsonEscape(byte).empty(); }

  const int32_t max_states_;
  std::vector<NfaState> states_;
};
}  // namespace

// The subset construction (Rabin & Scott 1959).
class AutomatonBuilder {
 public:
  AutomatonBuilder(const AutomatonLimits& limits, const Automaton::Bytes& allowed)
      : limits_(limits), allowed_(allowed), nfa_(limits.max_nfa_states) {}

  absl::StatusOr<Automaton> Build(const Pattern& pattern) {
    const int32_t start = nfa_.Add();
    accept_ = nfa_.Build(pattern, start);
    if (nfa_.full()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "it is too large: more than ", limits_.max_nfa_states, " states before determinization"));
    }
    FindClasses();
    marks_.resize(nfa_.states().size());
    std::vector<int32_t> set{start};
    Close(set);
    IdOf(std::move(set));
    for (size_t s = 0; s < sets_.size(); ++s) RETURN_IF_ERROR(Expand(s));
    return Finish();
  }

 private:
  // Two bytes are of one class when both are allowed or neither, and every edge takes both or
  // neither.
  void FindClasses() {
    std::bitset<257> begins;
    begins[0] = true;
    for (size_t byte = 1; byte < 256; ++byte) begins[byte] = allowed_[byte] != allowed_[byte - 1];
    for (const NfaState& state : nfa_.states()) {
      for (const ByteEdge& edge : state.bytes) begins[edge.first] = begins[edge.last + 1] = true;
    }
    int next_class = -1;
    for (size_t byte = 0; byte < 256; ++byte) {
      if (begins[byte]) {
        ++next_class;
        first_byte_.push_back(static_cast<uint8_t>(byte));
      }
      automaton_.class_of_byte_[byte] = static_cast<uint8_t>(next_class);
    }
    automaton_.num_classes_ = first_byte_.size();
  }

  // Adds what empty edges lead to; sorts.
  void Close(std::vector<int32_t>& set) {
    ++mark_;
    size_t kept = 0;
    for (size_t i = 0; i < set.size(); ++i) {
      if (marks_[set[i]] == mark_) continue;
      marks_[set[i]] = mark_;
      set[kept++] = set[i];
    }
    set.resize(kept);
    for (size_t i = 0; i < set.size(); ++i) {
      for (const int32_t to : nfa_.states()[set[i]].empty) {
        ++num_steps_;
        if (marks_[to] == mark_) continue;
        marks_[to] = mark_;
        set.push_back(to);
      }
    }
    // Only states with an edge of their own tell sets apart.
    set.erase(std::remove_if(
                  set.begin(), set.end(),
                  [this](int32_t s) { return nfa_.states()[s].bytes.empty() && s != accept_; }),
              set.end());
    std::sort(set.begin(), set.end());
  }

  int32_t IdOf(std::vector<int32_t> set) {
    if (set.empty()) return Automaton::kDead;
    const auto [it, is_new] = ids_.emplace(std::move(set), static_cast<int32_t>(sets_.size()));
    if (is_new) sets_.push_back(&it->first);
    return it->second;
  }

  absl::Status Expand(size_t s) {
    const size_t num_classes = automaton_.num_classes_;
    std::vector<std::vector<int32_t>> targets_C(num_classes);
    for (const int32_t from : *sets_[s]) {
      for (const ByteEdge& edge : nfa_.states()[from].bytes) {
        const size_t last = automaton_.class_of_byte_[edge.last];
        for (size_t c = automaton_.class_of_byte_[edge.first]; c <= last; ++c) {
          ++num_steps_;
          if (allowed_[first_byte_[c]]) targets_C[c].push_back(edge.to);
        }
      }
      if (num_steps_ > limits_.max_steps) return TooComplex();
    }
    for (std::vector<int32_t>& targets : targets_C) {
      if (!targets.empty()) Close(targets);
      num_steps_ += static_cast<int64_t>(targets.size());
      automaton_.next_SC_.push_back(IdOf(std::move(targets)));
      if (num_steps_ > limits_.max_steps) return TooComplex();
    }
    if (static_cast<int64_t>(sets_.size()) > limits_.max_states ||
        static_cast<int64_t>(sets_.size() * num_classes) > limits_.max_table_entries) {
      return TooComplex();
    }
    return absl::OkStatus();
  }

  absl::Status TooComplex() const {
    return absl::InvalidArgumentError(absl::StrCat(
        "it is too complex: more than ", limits_.max_states, " states, or too long to build"));
  }

  absl::StatusOr<Automaton> Finish() {
    for (const std::vector<int32_t>* set : sets_) {
      automaton_.accepts_.push_back(std::binary_search(set->begin(), set->end(), accept_));
    }
    automaton_.num_steps_ = num_steps_;
    if (!automaton_.Trim()) return absl::InvalidArgumentError("no possible text matches it");
    return std::move(automaton_);
  }

  const AutomatonLimits limits_;
  const Automaton::Bytes allowed_;
  Nfa nfa_;
  int32_t accept_ = 0;
  Automaton automaton_;
  std::vector<uint8_t> first_byte_;  // of each class
  std::map<std::vector<int32_t>, int32_t> ids_;
  std::vector<const std::vector<int32_t>*> sets_;  // by id
  std::vector<int64_t> marks_;
  int64_t mark_ = 0, num_steps_ = 0;
};

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
  is_end_.resize(accepts_.size());
  for (size_t s = 0; s < is_end_.size(); ++s) {
    const auto row = next_SC_.begin() + static_cast<int64_t>(s * num_classes_);
    is_end_[s] = std::all_of(row, row + static_cast<int64_t>(num_classes_),
                             [](int32_t to) { return to == kDead; });
  }
  return true;
}

bool Automaton::Matches(absl::string_view text) const {
  int32_t state = start();
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
  std::map<std::pair<int32_t, int32_t>, int32_t> ids{{{a.start(), b.start()}, 0}};
  std::vector<std::pair<int32_t, int32_t>> states{{a.start(), b.start()}};
  for (size_t s = 0; s < states.size(); ++s) {
    const auto [in_a, in_b] = states[s];
    const bool b_accepts = in_b != kDead && b.Accepts(in_b);
    result.accepts_.push_back(a.Accepts(in_a) && b_accepts == b_matches);
    for (const uint8_t byte : first_byte) {
      const int32_t to_a = a.Next(in_a, byte), to_b = in_b == kDead ? kDead : b.Next(in_b, byte);
      result.num_steps_ += kPairSteps;
      if (to_a == kDead || (to_b == kDead && b_matches)) {
        result.next_SC_.push_back(kDead);
        continue;
      }
      const auto next_id = static_cast<int32_t>(states.size());
      const auto [it, is_new] = ids.emplace(std::pair(to_a, to_b), next_id);
      if (is_new) states.push_back(it->first);
      result.next_SC_.push_back(it->second);
    }
    if (static_cast<int64_t>(states.size()) > limits.max_states ||
        result.num_steps_ > limits.max_steps) {
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
Automaton Automaton::MultiplesOf(int32_t divisor) {
  constexpr int32_t kBegin = 0, kMinus = 1, kZero = 2, kFirst = 3;
  Automaton result;
  result.num_classes_ = 12;  // ten digits, minus, anything else
  for (size_t byte = 0; byte < 256; ++byte) {
    result.class_of_byte_[byte] = byte >= '0' && byte <= '9' ? static_cast<uint8_t>(byte - '0')
                                  : byte == '-'              ? 10
                                                             : 11;
  }
  for (int32_t state = 0; state < kFirst + divisor; ++state) {
    for (int32_t c = 0; c < 12; ++c) {
      int32_t to = kDead;
      if (c == 10 && state == kBegin) to = kMinus;
      if (c < 10 && state < kZero) to = c == 0 ? kZero : kFirst + c % divisor;
      if (c == 0 && state == kMinus) to = kDead;
      if (c < 10 && state >= kFirst) {
        to = kFirst + static_cast<int32_t>((int64_t{10} * (state - kFirst) + c) % divisor);
      }
      result.next_SC_.push_back(to);
    }
    result.accepts_.push_back(state == kZero || state == kFirst);
  }
  result.Trim();
  return result;
}
}  // namespace stretto::engine
