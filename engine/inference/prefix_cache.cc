#include "engine/inference/prefix_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace stretto::engine {
ChainKey RootKey(absl::string_view weights_hash, int64_t version) {
  const XXH128_hash_t h = XXH3_128bits_withSeed(weights_hash.data(), weights_hash.size(),
                                                static_cast<uint64_t>(version));
  return {h.low64, h.high64};
}

ChainKey BlockKey(const ChainKey& parent, absl::Span<const int32_t> ids) {
  STRETTO_CHECK(ids.size() == kBlockTokens);
  char bytes[16 + kBlockTokens * sizeof(int32_t)];
  std::memcpy(bytes, &parent.low, 8);
  std::memcpy(bytes + 8, &parent.high, 8);
  std::memcpy(bytes + 16, ids.data(), kBlockTokens * sizeof(int32_t));
  const XXH128_hash_t h = XXH3_128bits(bytes, sizeof(bytes));
  return {h.low64, h.high64};
}

PrefixCache::PrefixCache(BlockPool* pool, bool enabled) : pool_(pool), enabled_(enabled) {
  entries_.resize(static_cast<size_t>(pool->num_blocks()));
  if (enabled) blocks_.reserve(entries_.size());
}

int32_t PrefixCache::Allocate() {
  const int32_t block = pool_->Allocate();
  if (block != BlockPool::kNone) Forget(block);
  return block;
}

int32_t PrefixCache::Find(const ChainKey& key, absl::Span<const int32_t> ids) const {
  const auto it = blocks_.find(key);
  if (it == blocks_.end()) return BlockPool::kNone;
  const Entry& entry = entries_[it->second];
  return std::equal(ids.begin(), ids.end(), entry.ids.begin(), entry.ids.end()) ? it->second
                                                                                : BlockPool::kNone;
}

void PrefixCache::Insert(const ChainKey& key, absl::Span<const int32_t> ids, int32_t block) {
  STRETTO_CHECK(pool_->ref_count(block) > 0);
  if (!enabled_ || entries_[block].valid || !blocks_.try_emplace(key, block).second) return;
  Entry& entry = entries_[block];
  entry.key = key;
  std::copy(ids.begin(), ids.end(), entry.ids.begin());
  entry.valid = true;
}

void PrefixCache::Release(int32_t block) { pool_->Unref(block, entries_[block].valid); }

void PrefixCache::Forget(int32_t block) {
  if (!entries_[block].valid) return;
  blocks_.erase(entries_[block].key);
  entries_[block].valid = false;
}

void PrefixCache::Clear() {
  for (int32_t b = 0; b < pool_->num_blocks(); ++b) {
    if (!entries_[b].valid) continue;
    entries_[b].valid = false;
    if (pool_->ref_count(b) == 0) pool_->Discard(b);
  }
  blocks_.clear();
}
}  // namespace stretto::engine
