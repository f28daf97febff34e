// For tests of the scheduler: plays the forward pass on a KV cache that remembers, for every slot,
// which prefix of which weights was written there. So it sees stale, overwritten, uncopied or
// wrongly shared blocks, which a scheduler's own bookkeeping cannot.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/inference/scheduler.h"

namespace stretto::engine {
class KvOracle {
 public:
  explicit KvOracle(int32_t num_blocks) : slots_(static_cast<size_t>(num_blocks) * kBlockTokens) {}

  // Applies a plan: copies, then every row writes its slot, after which each row reads its whole
  // context. Returns whether all contexts held what they should. `copy` false leaves out the
  // copies: a fault that must be seen.
  bool Apply(const StepPlan& plan, bool copy = true) {
    if (copy) {
      for (size_t i = 0; i < plan.copy_from.size(); ++i) Copy(plan.copy_from[i], plan.copy_to[i]);
    }
    for (const PlannedRows& rows : plan.rows) Write(rows);
    bool good = true;
    for (const PlannedRows& rows : plan.rows) good = Read(rows) && good;
    return good;
  }

 private:
  struct Slot {
    uint64_t prefix = 0;
    int32_t epoch = -1;
  };
  static uint64_t Extend(uint64_t prefix, int32_t token) {
    uint64_t x = (prefix ^ static_cast<uint64_t>(token + 1)) * 0x9E3779B97F4A7C15u;
    return x ^ (x >> 29);
  }
  void Copy(int32_t from, int32_t to) {
    for (int32_t i = 0; i < kBlockTokens; ++i) At(to, i) = At(from, i);
  }
  Slot& At(int32_t block, int32_t offset) {
    return slots_[static_cast<size_t>(block) * kBlockTokens + offset];
  }
  Slot& At(const Sequence& s, int32_t position) {
    return At(s.blocks[position / kBlockTokens], position % kBlockTokens);
  }
  static int32_t Token(const Sequence& s, int32_t position) {
    return position < s.size() ? s.tokens[position] : s.draft[position - s.size()];
  }
  void Write(const PlannedRows& rows) {
    const Sequence& s = *rows.sequence;
    uint64_t prefix = 0;
    for (int32_t p = 0; p < rows.begin + rows.count + rows.drafted; ++p) {
      prefix = Extend(prefix, Token(s, p));
      if (p >= rows.begin) At(s, p) = {prefix, s.epoch};
    }
  }
  bool Read(const PlannedRows& rows) {
    const Sequence& s = *rows.sequence;
    uint64_t prefix = 0;
    for (int32_t p = 0; p < rows.begin + rows.count + rows.drafted; ++p) {
      prefix = Extend(prefix, Token(s, p));
      const Slot& slot = At(s, p);
      if (slot.prefix != prefix || (!s.mixed && slot.epoch != s.epoch)) return false;
    }
    return true;
  }

  std::vector<Slot> slots_;
};
}  // namespace stretto::engine
