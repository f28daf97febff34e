#include "engine/inference/ngram_drafter.h"

#include <algorithm>

#include "base/check.h"

namespace stretto::engine {
// Of the min_match_ tokens before `position`; places are compared token by token, so that a
// collision costs a look and nothing else.
uint64_t NgramIndex::HashBefore(absl::Span<const int32_t> tokens, size_t position) const {
  uint64_t hash = 0;
  for (size_t i = position - static_cast<size_t>(min_match_); i < position; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

// Positions with a token behind them: the end of the text is no place to copy from.
void NgramIndex::Extend(absl::Span<const int32_t> tokens) {
  for (size_t p = before_.size(); p < tokens.size(); ++p) {
    if (p < static_cast<size_t>(min_match_)) {
      before_.push_back(-1);
      continue;
    }
    const auto [it, is_new] = latest_.try_emplace(HashBefore(tokens, p), static_cast<int32_t>(p));
    before_.push_back(is_new ? -1 : it->second);
    it->second = static_cast<int32_t>(p);
  }
}

Draft NgramIndex::Propose(absl::Span<const int32_t> tokens, int32_t max_tokens) {
  STRETTO_CHECK(tokens.size() >= before_.size());
  Extend(tokens);
  Draft draft;
  const size_t size = tokens.size();
  if (size < static_cast<size_t>(min_match_)) return draft;
  const auto found = latest_.find(HashBefore(tokens, size));
  if (found == latest_.end()) return draft;
  int32_t best = -1, best_match = min_match_ - 1, place = found->second;
  for (int32_t i = 0; i < kMaxCandidates && place >= 0; ++i, place = before_[place]) {
    int32_t match = 0;
    const int32_t limit = std::min(place, kLongestMatch);
    while (match < limit && tokens[place - 1 - match] == tokens[size - 1 - match]) ++match;
    if (match <= best_match) continue;
    best = place;
    best_match = match;
    if (match == kLongestMatch) break;
  }
  if (best < 0) return draft;
  draft.confidence = best_match < kGoodMatch ? 0 : best_match < kVeryGoodMatch ? 1 : 2;
  for (int32_t i = 0; i < max_tokens; ++i) {
    const size_t from = static_cast<size_t>(best) + static_cast<size_t>(i);
    draft.tokens.push_back(from < size ? tokens[from] : draft.tokens[from - size]);
  }
  return draft;
}

void NgramDrafter::Propose(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts) {
  for (size_t i = 0; i < requests.size(); ++i) {
    std::unique_ptr<NgramIndex>& index = indices_[requests[i].id];
    if (index == nullptr) index = std::make_unique<NgramIndex>(min_match_);
    drafts[i] = index->Propose(requests[i].tokens, requests[i].max_tokens);
  }
}
}  // namespace stretto::engine
