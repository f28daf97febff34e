#include "engine/constrain/automaton_builder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr int kMaxTries = 8;  // then nothing is counted any more
constexpr int64_t kStateSteps = 16;
constexpr size_t kMaxRegions = 64;
constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();

void Normalize(std::vector<int32_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}
}  // namespace

absl::StatusOr<Automaton> AutomatonBuilder::Build(const Pattern& pattern) {
  for (int i = 0;; ++i) {
    nfa_ = std::make_unique<Nfa>(limits_.max_nfa_states, limits_.counters && i < kMaxTries,
                                 uncounted_);
    const absl::Status status = TryBuild(pattern);
    if (status.ok()) return std::move(automaton_);
    if (!absl::IsAborted(status)) return status;
  }
}

absl::Status AutomatonBuilder::TryBuild(const Pattern& pattern) {
  automaton_ = Automaton();
  first_byte_.clear();
  ids_.clear();
  sets_.clear();
  nfa_->Build(pattern);
  if (nfa_->full()) {
    return absl::InvalidArgumentError(
        absl::StrCat("it is too large: more than ", limits_.max_nfa_states,
                     " states before determinization", nfa_->LargestPart()));
  }
  for (int slot = 0, shift = Automaton::kPlaceBits; slot < kMaxSlots; ++slot) {
    shift_[static_cast<size_t>(slot)] = shift;
    shift += nfa_->slot_bits(slot);
  }
  // Going through a state takes about as long as following so many edges.
  num_steps_ += kStateSteps * static_cast<int64_t>(nfa_->states().size());
  RETURN_IF_ERROR(CheckSteps());
  FindAlive();
  FindClasses();
  marks_.assign(nfa_->states().size(), 0);
  values_.resize(nfa_->states().size());
  mark_ = 0;
  std::vector<int32_t> set{nfa_->start()};
  Region all;
  all.high.fill(kNoLimit);
  RETURN_IF_ERROR(Close(set, all));
  RETURN_IF_ERROR(CommonValues(set).status());
  if (IdOf(std::move(set)) < 0) return absl::InvalidArgumentError("no possible text matches it");
  for (size_t s = 0; s < sets_.size(); ++s) RETURN_IF_ERROR(Expand(s));
  return Finish();
}

// The states from which a match can be reached, whatever the counters say: a part that can be gone
// through once can be gone through until its least number is there, and then be left.
void AutomatonBuilder::FindAlive() {
  const std::vector<NfaState>& states = nfa_->states();
  std::vector<std::vector<int32_t>> sources(states.size());
  for (size_t s = 0; s < states.size(); ++s) {
    const auto from = static_cast<int32_t>(s);
    for (const EmptyEdge& edge : states[s].empty) {
      sources[static_cast<size_t>(edge.to)].push_back(from);
    }
    for (const ByteEdge& edge : states[s].bytes) {
      int byte = edge.first;
      while (byte <= edge.last && !allowed_[static_cast<size_t>(byte)]) ++byte;
      if (byte <= edge.last) sources[static_cast<size_t>(edge.to)].push_back(from);
    }
  }
  alive_.assign(states.size(), false);
  std::vector<int32_t> stack{nfa_->accept()};
  alive_[static_cast<size_t>(nfa_->accept())] = true;
  while (!stack.empty()) {
    const auto s = static_cast<size_t>(stack.back());
    stack.pop_back();
    for (const int32_t from : sources[s]) {
      if (alive_[static_cast<size_t>(from)]) continue;
      alive_[static_cast<size_t>(from)] = true;
      stack.push_back(from);
    }
  }
}

// Two bytes are of one class when both are allowed or neither, and every edge takes both or
// neither.
void AutomatonBuilder::FindClasses() {
  std::bitset<257> begins;
  begins[0] = true;
  for (size_t byte = 1; byte < 256; ++byte) begins[byte] = allowed_[byte] != allowed_[byte - 1];
  for (const NfaState& state : nfa_->states()) {
    for (const ByteEdge& edge : state.bytes) begins[edge.first] = begins[edge.last + 1U] = true;
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

bool AutomatonBuilder::CloseOpen(std::vector<int32_t>& set, std::vector<int32_t>* cuts) {
  ++mark_;
  size_t kept = 0;
  for (size_t i = 0; i < set.size(); ++i) {
    const auto s = static_cast<size_t>(set[i]);
    if (marks_[s] == mark_ || !alive_[s]) continue;
    marks_[s] = mark_;
    set[kept++] = set[i];
  }
  set.resize(kept);
  bool counted = false;
  for (size_t i = 0; i < set.size(); ++i) {
    for (const EmptyEdge& edge : nfa_->states()[static_cast<size_t>(set[i])].empty) {
      ++num_steps_;
      const auto to = static_cast<size_t>(edge.to);
      if (!alive_[to]) continue;
      if (edge.slot >= 0) {
        counted = true;
        std::vector<int32_t>& of_slot = cuts[edge.slot];
        if (edge.low > 0) of_slot.push_back(edge.low);
        if (edge.high < kNoLimit) of_slot.push_back(edge.high + 1);
      }
      if (marks_[to] == mark_) continue;
      marks_[to] = mark_;
      set.push_back(edge.to);
    }
  }
  KeepTelling(set);
  return counted;
}

// Only states with an edge of their own tell sets apart.
void AutomatonBuilder::KeepTelling(std::vector<int32_t>& set) const {
  set.erase(std::remove_if(set.begin(), set.end(),
                           [this](int32_t s) {
                             return nfa_->states()[static_cast<size_t>(s)].bytes.empty() &&
                                    s != nfa_->accept();
                           }),
            set.end());
  std::sort(set.begin(), set.end());
}

absl::Status AutomatonBuilder::Reach(int32_t state, const Values& values,
                                     std::vector<int32_t>& set) {
  const auto s = static_cast<size_t>(state);
  if (!alive_[s]) return absl::OkStatus();
  Values kept{};
  std::copy_n(values.begin(), nfa_->NumSlots(state), kept.begin());
  if (marks_[s] != mark_) {
    marks_[s] = mark_;
    values_[s] = kept;
    set.push_back(state);
    return absl::OkStatus();
  }
  for (int slot = 0; slot < kMaxSlots; ++slot) {
    const auto i = static_cast<size_t>(slot);
    if (values_[s][i] != kept[i]) return WriteOut(state, state, slot);
  }
  return absl::OkStatus();
}

absl::Status AutomatonBuilder::Close(std::vector<int32_t>& targets, const Region& region) {
  ++mark_;
  std::vector<int32_t> set;
  Values same;
  same.fill(Value::kSame);
  for (const int32_t target : targets) RETURN_IF_ERROR(Reach(target, same, set));
  for (size_t i = 0; i < set.size(); ++i) {
    const auto s = static_cast<size_t>(set[i]);
    for (const EmptyEdge& edge : nfa_->states()[s].empty) {
      ++num_steps_;
      Values values = values_[s];
      if (edge.slot >= 0) {
        const auto slot = static_cast<size_t>(edge.slot);
        if (edge.effect == EmptyEdge::Effect::kZero) {
          values[slot] = Value::kZero;
        } else {
          // What is counted takes at least a byte, which has been counted up to here only.
          STRETTO_CHECK(values[slot] == Value::kSame);
          if (region.low[slot] < edge.low || region.high[slot] > edge.high) continue;
          if (edge.effect == EmptyEdge::Effect::kPlus) values[slot] = Value::kPlus;
        }
      }
      RETURN_IF_ERROR(Reach(edge.to, values, set));
    }
  }
  KeepTelling(set);
  targets = std::move(set);
  return absl::OkStatus();
}

int AutomatonBuilder::NumSlots(const std::vector<int32_t>& set) const {
  int num_slots = 0;
  for (const int32_t s : set) num_slots = std::max(num_slots, nfa_->NumSlots(s));
  return num_slots;
}

// The values that all states of the set have in common.
absl::StatusOr<AutomatonBuilder::Values> AutomatonBuilder::CommonValues(
    const std::vector<int32_t>& set) {
  Values common{};
  std::array<int32_t, kMaxSlots> from{};
  for (const int32_t s : set) {
    for (int slot = 0; slot < nfa_->NumSlots(s); ++slot) {
      const auto i = static_cast<size_t>(slot);
      const Value value = values_[static_cast<size_t>(s)][i];
      if (common[i] == Value::kUnset) {
        common[i] = value;
        from[i] = s;
      } else if (common[i] != value) {
        return WriteOut(from[i], s, slot);
      }
    }
  }
  return common;
}

// What both states count in the slot can't be counted.
absl::Status AutomatonBuilder::WriteOut(int32_t a, int32_t b, int slot) {
  for (const int32_t s : {a, b}) {
    int32_t counter = nfa_->states()[static_cast<size_t>(s)].counter;
    while (nfa_->counters()[static_cast<size_t>(counter)].slot > slot) {
      counter = nfa_->counters()[static_cast<size_t>(counter)].parent;
    }
    uncounted_.insert(nfa_->counters()[static_cast<size_t>(counter)].pattern);
  }
  return absl::AbortedError("");
}

int32_t AutomatonBuilder::IdOf(std::vector<int32_t> set) {
  if (set.empty()) return Automaton::kDead;
  const auto [it, is_new] = ids_.emplace(std::move(set), static_cast<int32_t>(sets_.size()));
  if (is_new) sets_.push_back(&it->first);
  return it->second;
}

absl::Status AutomatonBuilder::Expand(size_t s) {
  const size_t num_classes = automaton_.num_classes_;
  std::vector<std::vector<int32_t>> targets_C(num_classes);
  for (const int32_t from : *sets_[s]) {
    for (const ByteEdge& edge : nfa_->states()[static_cast<size_t>(from)].bytes) {
      const size_t last = automaton_.class_of_byte_[edge.last];
      for (size_t c = automaton_.class_of_byte_[edge.first]; c <= last; ++c) {
        ++num_steps_;
        if (allowed_[first_byte_[c]]) targets_C[c].push_back(edge.to);
      }
    }
    RETURN_IF_ERROR(CheckSteps());
  }
  for (std::vector<int32_t>& targets : targets_C) {
    int32_t code = Automaton::kDead;
    if (!targets.empty()) {
      ASSIGN_OR_RETURN(code, NextCode(s, std::move(targets)));
    }
    automaton_.next_SC_.push_back(code);
    RETURN_IF_ERROR(CheckSteps());
  }
  if (static_cast<int64_t>(sets_.size()) > limits_.max_states ||
      static_cast<int64_t>(sets_.size() * num_classes) > limits_.max_table_entries) {
    return TooComplex();
  }
  return absl::OkStatus();
}

absl::StatusOr<int32_t> AutomatonBuilder::NextCode(size_t s, std::vector<int32_t> targets) {
  std::vector<int32_t> cuts[kMaxSlots];
  std::vector<int32_t> set = targets;
  const bool counted = CloseOpen(set, cuts);
  num_steps_ += static_cast<int64_t>(set.size());
  if (!counted && NumSlots(set) == NumSlots(*sets_[s])) return IdOf(std::move(set));
  const auto first = static_cast<int32_t>(automaton_.branches_.size());
  std::vector<Region> regions(1);
  regions[0].high.fill(kNoLimit);
  for (size_t slot = 0; slot < kMaxSlots; ++slot) {
    Normalize(cuts[slot]);
    std::vector<Region> cut;
    for (Region region : regions) {
      for (const int32_t at : cuts[slot]) {
        cut.push_back(region);
        cut.back().high[slot] = at - 1;
        region.low[slot] = at;
      }
      cut.push_back(region);
    }
    regions = std::move(cut);
    if (regions.size() > kMaxRegions) {
      const int32_t state = *std::max_element(set.begin(), set.end(), [this](int32_t a, int32_t b) {
        return nfa_->NumSlots(a) < nfa_->NumSlots(b);
      });
      if (nfa_->NumSlots(state) == 0) return TooComplex();
      return WriteOut(state, state, nfa_->NumSlots(state) - 1);
    }
  }
  for (const Region& region : regions) RETURN_IF_ERROR(AddBranch(s, targets, region));
  return -2 - first;
}

absl::Status AutomatonBuilder::AddBranch(size_t s, const std::vector<int32_t>& targets,
                                         const Region& region) {
  std::vector<int32_t> set = targets;
  RETURN_IF_ERROR(Close(set, region));
  num_steps_ += static_cast<int64_t>(set.size());
  ASSIGN_OR_RETURN(const Values values, CommonValues(set));
  Automaton::Branch branch;
  branch.guards_begin = static_cast<uint32_t>(automaton_.guards_.size());
  for (int slot = 0; slot < kMaxSlots; ++slot) {
    const auto i = static_cast<size_t>(slot);
    if (values[i] == Value::kSame || values[i] == Value::kPlus) branch.keep |= SlotMask(slot);
    if (values[i] == Value::kPlus) branch.add += Automaton::State{1} << shift_[i];
    if (region.low[i] > 0 || region.high[i] < kNoLimit) {
      STRETTO_CHECK(slot < NumSlots(*sets_[s]));
      const Automaton::State mask = (Automaton::State{1} << nfa_->slot_bits(slot)) - 1;
      automaton_.guards_.push_back({mask, shift_[i], region.low[i], region.high[i]});
    }
  }
  branch.guards_end = static_cast<uint32_t>(automaton_.guards_.size());
  branch.to = IdOf(std::move(set));
  automaton_.branches_.push_back(branch);
  return absl::OkStatus();
}

absl::Status AutomatonBuilder::CheckSteps() {
  const int64_t unspent = num_steps_ - num_spent_;
  num_spent_ = num_steps_;
  if (limits_.work != nullptr && !limits_.work->Spend(unspent) && !limits_.work->is_used_up()) {
    return limits_.work->Status();
  }
  const bool is_used_up = limits_.work != nullptr && limits_.work->is_used_up();
  return is_used_up || num_steps_ > limits_.max_steps ? TooComplex() : absl::OkStatus();
}

absl::Status AutomatonBuilder::TooComplex() const {
  std::vector<int64_t> num_of_origin(nfa_->num_origins());
  for (const std::vector<int32_t>* set : sets_) {
    for (const int32_t s : *set) {
      const int32_t origin = nfa_->states()[static_cast<size_t>(s)].origin;
      if (origin >= 0) ++num_of_origin[static_cast<size_t>(origin)];
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("it is too complex: more than ", limits_.max_states,
                   " states, or too long to build", nfa_->LargestPart(num_of_origin)));
}

std::vector<Automaton::Cuts> AutomatonBuilder::CutsOf(const std::vector<int32_t>& set) const {
  std::vector<Automaton::Cuts> result;
  for (int slot = 0; slot < NumSlots(set); ++slot) {
    Automaton::Cuts cuts{
        shift_[static_cast<size_t>(slot)], (Automaton::State{1} << nfa_->slot_bits(slot)) - 1, {}};
    for (const int32_t s : set) {
      for (int32_t c = nfa_->states()[static_cast<size_t>(s)].counter; c >= 0;
           c = nfa_->counters()[static_cast<size_t>(c)].parent) {
        const Counter& counter = nfa_->counters()[static_cast<size_t>(c)];
        if (counter.slot != slot) continue;
        cuts.values.insert(cuts.values.end(), counter.cuts.begin(), counter.cuts.end());
      }
    }
    Normalize(cuts.values);
    result.push_back(std::move(cuts));
  }
  return result;
}

absl::Status AutomatonBuilder::Finish() {
  for (const std::vector<int32_t>* set : sets_) {
    automaton_.accepts_.push_back(std::binary_search(set->begin(), set->end(), nfa_->accept()));
    if (automaton_.has_counters()) automaton_.cuts_S_.push_back(CutsOf(*set));
  }
  automaton_.FindEnds();
  return absl::OkStatus();
}
}  // namespace stretto::engine
