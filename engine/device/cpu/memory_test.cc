#include "engine/device/cpu/memory.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace stretto::engine::cpu {
namespace {
struct Block {
  char* data = nullptr;
  size_t bytes = 0;
  char fill = 0;
};

bool Holds(const Block& b) {
  for (size_t i = 0; i < b.bytes; i += 997) {
    if (b.data[i] != b.fill) return false;
  }
  return b.data[b.bytes - 1] == b.fill;
}

TEST_CASE("blocks of every size are apart, aligned, and come back") {
  const uint32_t seed = std::random_device()();
  CAPTURE(seed);
  std::mt19937 random(seed);
  BlockAllocator allocator;
  std::vector<Block> blocks;
  for (int i = 0; i < 3000; ++i) {
    if (!blocks.empty() && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      REQUIRE(Holds(blocks.back()));
      allocator.Free(blocks.back().data, blocks.back().bytes);
      blocks.pop_back();
      continue;
    }
    Block b;
    b.bytes = 1 + random() % (size_t{1} << (4 + random() % 19));  // up to 4 MiB
    b.fill = static_cast<char>(random());
    b.data = static_cast<char*>(allocator.Allocate(b.bytes));
    REQUIRE(b.data != nullptr);
    REQUIRE(reinterpret_cast<uintptr_t>(b.data) % 64 == 0);
    std::memset(b.data, b.fill, b.bytes);
    blocks.push_back(b);
  }
  for (const Block& b : blocks) {
    REQUIRE(Holds(b));
    allocator.Free(b.data, b.bytes);
  }
  CHECK(allocator.num_slabs() <= 1);
  CHECK(allocator.num_spare_slabs() <= 1);
}

TEST_CASE("a set of blocks that replaces another leaves no slabs behind but for the next set") {
  BlockAllocator allocator;
  constexpr size_t kBytes = size_t{1} << 20;
  std::vector<void*> old;
  size_t most = 0;
  for (int version = 0; version < 5; ++version) {
    std::vector<void*> blocks;
    for (int i = 0; i < 100; ++i) {
      blocks.push_back(allocator.Allocate(kBytes));
      allocator.Free(allocator.Allocate(kBytes / 4), kBytes / 4);  // what came and went meanwhile
    }
    for (void* p : old) allocator.Free(p, kBytes);
    old = blocks;
    most = std::max(most, allocator.num_slabs());
    REQUIRE(allocator.num_spare_slabs() <= allocator.num_slabs());
  }
  CHECK(most <= 5);
  // The next set is written where the one before the last was.
  const size_t num_spare = allocator.num_spare_slabs();
  CHECK(num_spare > 0);
  std::vector<void*> next;
  for (int i = 0; i < 100; ++i) next.push_back(allocator.Allocate(kBytes));
  CHECK(allocator.num_spare_slabs() < num_spare);
  for (void* p : next) allocator.Free(p, kBytes);
  for (void* p : old) allocator.Free(p, kBytes);
  CHECK(allocator.num_slabs() <= 1);
}
}  // namespace
}  // namespace stretto::engine::cpu
