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
}  // namespace stretto
