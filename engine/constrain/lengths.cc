#include "engine/constrain/lengths.h"

#include <algorithm>

namespace stretto::engine {
namespace {
constexpr int64_t kMaxSteps = 50'000'000;
constexpr int64_t kReadSteps = 64;   // of reading all the bytes of a state
constexpr int64_t kEdgesOfStep = 4;  // looking at an edge is less than following one

class Analysis {
 public:
  Analysis(const Automaton& automaton, int32_t min, int32_t max, Work* work)
      : automaton_(automaton), work_(*work) {
    limits_->min = min;
    limits_->max = max;
    num_states_ = static_cast<size_t>(automaton.num_states());
  }

  std::shared_ptr<const LengthLimits> Run() {
    if (!work_.Spend(kReadSteps * automaton_.num_states())) return nullptr;
    FindNext();
    limits_->possible_S.resize(num_states_);
    const bool ok = limits_->max < 0 ? RunWithoutMost() : RunWithMost();
    if (!ok) return nullptr;
    for (size_t s = 0; s < num_states_; ++s) {
      if (limits_->is_within_char_S[s]) FindWithinChar(s);
    }
    return limits_;
  }

 private:
  int32_t Next(size_t s, int byte) const {
    return static_cast<int32_t>(
        automaton_.Next(static_cast<int64_t>(s), static_cast<uint8_t>(byte)));
  }

  // States within a character take bytes that no character begins with.
  void FindNext() {
    std::vector<bool>& within = limits_->is_within_char_S;
    within.resize(num_states_);
    for (size_t s = 0; s < num_states_; ++s) {
      for (int byte = 0x80; byte < 0xC0 && !within[s]; ++byte) within[s] = Next(s, byte) >= 0;
    }
    next_S_.resize(num_states_);
    for (size_t s = 0; s < num_states_; ++s) {
      std::vector<int32_t> stack{static_cast<int32_t>(s)}, &next = next_S_[s];
      while (!stack.empty()) {
        const auto at = static_cast<size_t>(stack.back());
        stack.pop_back();
        int32_t last = -1;
        for (int byte = 0; byte < 256; ++byte) {
          const int32_t to = Next(at, byte);
          if (to < 0 || to == last) continue;
          last = to;
          (within[static_cast<size_t>(to)] ? stack : next).push_back(to);
        }
      }
      // (A character has at most four bytes: no way comes back to where it was.)
      std::sort(next.begin(), next.end());
      next.erase(std::unique(next.begin(), next.end()), next.end());
      num_edges_ += static_cast<int64_t>(next.size());
    }
  }

  // Where the character ends, it counts.
  void FindWithinChar(size_t s) {
    LengthLimits::Intervals all, &merged = limits_->possible_S[s];
    for (const int32_t to : next_S_[s]) {
      for (auto [low, high] : limits_->possible_S[static_cast<size_t>(to)]) {
        const bool stays = limits_->max < 0 && high == limits_->last();
        if (!stays) --high;
        low = std::max(low - 1, 0);
        if (low <= high) all.emplace_back(low, high);
      }
    }
    std::sort(all.begin(), all.end());
    for (const auto& [low, high] : all) {
      if (!merged.empty() && low <= merged.back().second + 1) {
        merged.back().second = std::max(merged.back().second, high);
      } else {
        merged.emplace_back(low, high);
      }
    }
  }

  bool SpendRound() {
    steps_ += num_edges_;
    return work_.Spend((num_edges_ + static_cast<int64_t>(num_states_)) / kEdgesOfStep + 1) &&
           steps_ <= kMaxSteps;
  }

  // The states from which one of `from` is a character away.
  std::vector<bool> Before(const std::vector<bool>& from) const {
    std::vector<bool> result(num_states_);
    for (size_t s = 0; s < num_states_; ++s) {
      result[s] = !limits_->is_within_char_S[s] &&
                  std::any_of(next_S_[s].begin(), next_S_[s].end(),
                              [&](int32_t to) { return from[static_cast<size_t>(to)]; });
    }
    return result;
  }

  // Behind `count` characters at least min - count must follow.
  bool RunWithoutMost() {
    std::vector<bool> can(num_states_, true);  // be followed by so many
    for (size_t s = 0; s < num_states_; ++s) can[s] = !limits_->is_within_char_S[s];
    for (int32_t count = limits_->min; count >= 0; --count) {
      for (size_t s = 0; s < num_states_; ++s) {
        if (can[s]) AddBelow(s, count);
      }
      if (!SpendRound()) return false;
      std::vector<bool> before = Before(can);
      if (before == can) {
        for (size_t s = 0; s < num_states_; ++s) {
          if (can[s]) limits_->possible_S[s].front().first = 0;
        }
        break;
      }
      can = std::move(before);
    }
    return true;
  }
  // Counts come from the largest one down.
  void AddBelow(size_t s, int32_t count) {
    LengthLimits::Intervals& intervals = limits_->possible_S[s];
    if (!intervals.empty() && intervals.front().first == count + 1) {
      intervals.front().first = count;
    } else {
      intervals.insert(intervals.begin(), {count, count});
    }
  }

  // A state from which exactly k characters lead to a match is possible behind min - k to max - k.
  bool RunWithMost() {
    std::vector<bool> ends(num_states_);
    for (size_t s = 0; s < num_states_; ++s) {
      ends[s] = !limits_->is_within_char_S[s] && automaton_.Accepts(static_cast<int64_t>(s));
    }
    for (int32_t k = 0; k <= limits_->max; ++k) {
      for (size_t s = 0; s < num_states_; ++s) {
        if (ends[s]) AddEnding(s, std::max(limits_->min - k, 0), limits_->max - k);
      }
      if (!SpendRound()) return false;
      std::vector<bool> before = Before(ends);
      if (before == ends) {
        for (size_t s = 0; s < num_states_; ++s) {
          if (ends[s]) AddEnding(s, 0, limits_->max - k);
        }
        break;
      }
      ends = std::move(before);
    }
    return true;
  }
  // Neither bound is above that of the interval that was added before.
  void AddEnding(size_t s, int32_t low, int32_t high) {
    LengthLimits::Intervals& intervals = limits_->possible_S[s];
    if (!intervals.empty() && high + 1 >= intervals.front().first) {
      intervals.front().first = std::min(intervals.front().first, low);
    } else {
      intervals.insert(intervals.begin(), {low, high});
    }
  }

  const Automaton& automaton_;
  Work& work_;
  const std::shared_ptr<LengthLimits> limits_ = std::make_shared<LengthLimits>();
  size_t num_states_ = 0;
  std::vector<std::vector<int32_t>> next_S_;  // a character away
  int64_t num_edges_ = 0, steps_ = 0;
};
}  // namespace

std::shared_ptr<const LengthLimits> LengthLimits::Of(const Automaton& automaton, int32_t min,
                                                     int32_t max, Work* work) {
  return Analysis(automaton, min, max, work).Run();
}

bool LengthLimits::IsPossible(int64_t state, int32_t count) const {
  const Intervals& intervals = possible_S[static_cast<size_t>(state)];
  return std::any_of(intervals.begin(), intervals.end(), [count](const auto& interval) {
    return count >= interval.first && count <= interval.second;
  });
}
}  // namespace stretto::engine
