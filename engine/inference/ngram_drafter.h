// Prompt look-up: the draft is what followed the last tokens when they stood in prompt or
// completion before. Of the places where the last `min_match` tokens occurred, the one with the
// longest agreement before it is taken; of equals, the latest.
//
// Every position is hashed once, when it is new; a proposal looks at a bounded number of places.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/inference/drafter.h"

namespace stretto::engine {
// The places of one growing text.
class NgramIndex {
 public:
  static constexpr int32_t kMaxCandidates = 16;                  // places looked at in a proposal
  static constexpr int32_t kLongestMatch = 32;                   // tokens compared at a place
  static constexpr int32_t kGoodMatch = 4, kVeryGoodMatch = 12;  // bounds of the confidences

  explicit NgramIndex(int32_t min_match) : min_match_(min_match) {}

  // `tokens`: those of the last call and more behind them. A draft that reaches the end of the text
  // goes on with itself, so that a repetition is continued however short it is.
  Draft Propose(absl::Span<const int32_t> tokens, int32_t max_tokens);
  size_t num_indexed() const { return before_.size(); }

 private:
  uint64_t HashBefore(absl::Span<const int32_t> tokens, size_t position) const;
  void Extend(absl::Span<const int32_t> tokens);

  int32_t min_match_;
  absl::flat_hash_map<uint64_t, int32_t> latest_;  // hash of the tokens before a position
  std::vector<int32_t> before_;  // by position: the last one before with the same hash, or −1
};

class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(int32_t min_match) : min_match_(min_match) {}
  void Propose(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts) override;
  void Forget(uint64_t id) override { indices_.erase(id); }
  double cost() const override { return 0; }

 private:
  int32_t min_match_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<NgramIndex>> indices_;  // by request
};
}  // namespace stretto::engine
