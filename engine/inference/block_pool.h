// Bookkeeping of the KV cache's blocks: who is free, who is used by how many. Copy on write is the
// user's: a block with more than one reference must not be written. Knows nothing of contents,
// except that a free block may be worth keeping: such blocks are handed out last, least recently
// freed first.
//
// Not thread-safe. Every operation takes constant time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stretto::engine {
class BlockPool {
 public:
  static constexpr int32_t kNone = -1;

  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return num_free_; }
  int32_t num_used() const { return num_blocks_ - num_free_; }
  int32_t ref_count(int32_t block) const;

  // A free block, now with one reference; kNone when all are used. Its old contents are lost.
  int32_t Allocate();
  // One more reference. A free block comes back to life with its contents.
  void Ref(int32_t block);
  // One reference less. The last one frees the block: to the end of the queue if `keep`, to its
  // front if the contents are worthless.
  void Unref(int32_t block, bool keep);
  // Moves a free block to the front of the queue: its contents became worthless.
  void Discard(int32_t block);

  // Checks that the free queue and the counts agree and that the references add up to `expected`.
  // Linear time; for tests.
  void CheckBalance(int64_t expected_references) const;

 private:
  // The free queue is a ring of links through the blocks; its head is the extra node num_blocks_.
  struct Node {
    int32_t prev, next, references;
  };
  void Unlink(int32_t block);
  void InsertAfter(int32_t position, int32_t block);

  int32_t num_blocks_;
  int32_t num_free_ = 0;
  std::vector<Node> nodes_;
};
}  // namespace stretto::engine
