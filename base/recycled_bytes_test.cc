#include "base/recycled_bytes.h"

#include <catch2/catch.hpp>

namespace stretto {
TEST_CASE("what a version leaves is the next one's memory, and no more is kept than is in use") {
  constexpr size_t kSize = 3 << 20;
  std::shared_ptr<uint8_t> first = TakeBytes(kSize), second = TakeBytes(kSize);
  const uint8_t* const place = first.get();
  first = nullptr;
  CHECK(NumSpareBytes() >= kSize);
  CHECK(TakeBytes(kSize).get() == place);
  CHECK(NumSpareBytes() >= kSize);
  second = nullptr;
  CHECK(NumSpareBytes() == 0);
}

TEST_CASE("what is reserved is there before anything was let go") {
  constexpr size_t kSize = 5 << 20;
  std::atomic<bool> stop{true};
  ReserveBytes({kSize}, stop);
  CHECK(NumSpareBytes() == 0);
  stop = false;
  ReserveBytes({kSize, kSize}, stop);
  CHECK(NumSpareBytes() == 2 * kSize);
  std::shared_ptr<uint8_t> first = TakeBytes(kSize), second = TakeBytes(kSize);
  CHECK(NumSpareBytes() == 0);
  first = second = nullptr;
  CHECK(NumSpareBytes() == 2 * kSize);
}
}  // namespace stretto
