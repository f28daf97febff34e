// Finds blocks of keys and values that were computed before. A full block's key is the XXH3-128
// hash of its 16 token ids, the key of the block before it, and, at the root, the identity of the
// weights: equal keys mean equal contents, since keys and values are a pure function of exactly
// those. The ids are compared as well, so a collision of hashes within a chain cannot pass for a
// hit.
//
// Entries hold no references: an unreferenced block stays findable until the pool hands it out
// again, least recently used first. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/device/device.h"
#include "engine/inference/block_pool.h"

namespace stretto::engine {
struct ChainKey {
  uint64_t low = 0, high = 0;
  friend bool operator==(const ChainKey&, const ChainKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const ChainKey& key) {
    return H::combine(std::move(h), key.low, key.high);
  }
};

// The root of all chains under these weights (and, later, this adapter).
ChainKey RootKey(absl::string_view weights_hash, int64_t version);
// The key of a block of kBlockTokens ids that follows `parent`.
ChainKey BlockKey(const ChainKey& parent, absl::Span<const int32_t> ids);

class PrefixCache {
 public:
  // `enabled` false: never finds anything; allocation and release work all the same.
  PrefixCache(BlockPool* pool, bool enabled);

  bool enabled() const { return enabled_; }
  int64_t num_entries() const { return static_cast<int64_t>(blocks_.size()); }

  // A free block with one reference, forgotten by the cache; kNone when all are used.
  int32_t Allocate();
  // The block with these contents, without a reference; kNone if there is none.
  int32_t Find(const ChainKey& key, absl::Span<const int32_t> ids) const;
  // Makes a computed block findable. Does nothing if another block has the key already.
  void Insert(const ChainKey& key, absl::Span<const int32_t> ids, int32_t block);
  // One reference less; a findable block then waits for reuse as the youngest.
  void Release(int32_t block);
  // Forgets everything at once.
  void Clear();

 private:
  struct Entry {
    ChainKey key;
    std::array<int32_t, kBlockTokens> ids;
    bool valid = false;
  };
  void Forget(int32_t block);

  BlockPool* pool_;
  bool enabled_;
  absl::flat_hash_map<ChainKey, int32_t> blocks_;
  std::vector<Entry> entries_;  // by block
};
}  // namespace stretto::engine
