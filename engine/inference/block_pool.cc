#include "engine/inference/block_pool.h"

#include "base/check.h"

namespace stretto::engine {
BlockPool::BlockPool(int32_t num_blocks) : num_blocks_(num_blocks) {
  STRETTO_CHECK(num_blocks > 0);
  nodes_.resize(static_cast<size_t>(num_blocks) + 1);
  nodes_[num_blocks_] = {num_blocks_, num_blocks_, 0};
  for (int32_t b = 0; b < num_blocks_; ++b) {
    nodes_[b].references = 0;
    InsertAfter(nodes_[num_blocks_].prev, b);
  }
}

int32_t BlockPool::ref_count(int32_t block) const {
  STRETTO_CHECK(block >= 0 && block < num_blocks_);
  return nodes_[block].references;
}

int32_t BlockPool::Allocate() {
  const int32_t block = nodes_[num_blocks_].next;
  if (block == num_blocks_) return kNone;
  Ref(block);
  return block;
}

void BlockPool::Ref(int32_t block) {
  STRETTO_CHECK(block >= 0 && block < num_blocks_);
  if (nodes_[block].references++ == 0) Unlink(block);
}

void BlockPool::Unref(int32_t block, bool keep) {
  STRETTO_CHECK(ref_count(block) > 0);
  if (--nodes_[block].references > 0) return;
  InsertAfter(keep ? nodes_[num_blocks_].prev : num_blocks_, block);
}

void BlockPool::Discard(int32_t block) {
  STRETTO_CHECK(ref_count(block) == 0);
  Unlink(block);
  InsertAfter(num_blocks_, block);
}

void BlockPool::Unlink(int32_t block) {
  Node& node = nodes_[block];
  nodes_[node.prev].next = node.next;
  nodes_[node.next].prev = node.prev;
  --num_free_;
}

void BlockPool::InsertAfter(int32_t position, int32_t block) {
  const int32_t next = nodes_[position].next;
  nodes_[block].prev = position;
  nodes_[block].next = next;
  nodes_[position].next = nodes_[next].prev = block;
  ++num_free_;
}

void BlockPool::CheckBalance(int64_t expected_references) const {
  int64_t references = 0;
  int32_t used = 0;
  for (int32_t b = 0; b < num_blocks_; ++b) {
    references += nodes_[b].references;
    used += nodes_[b].references > 0 ? 1 : 0;
  }
  STRETTO_CHECK(references == expected_references);
  STRETTO_CHECK(used == num_used());
  int32_t queued = 0;
  for (int32_t b = nodes_[num_blocks_].next; b != num_blocks_; b = nodes_[b].next) {
    STRETTO_CHECK(nodes_[b].references == 0);
    STRETTO_CHECK(++queued <= num_blocks_);
  }
  STRETTO_CHECK(queued == num_free_);
}
}  // namespace stretto::engine
