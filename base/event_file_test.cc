#include "base/event_file.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "base/testing.h"

namespace stretto {
namespace {
// RFC 3720, B.4: test vectors of CRC-32C.
TEST_CASE("CRC-32C matches its published vectors") {
  const std::vector<uint8_t> zeros(32, 0), ones(32, 0xff);
  CHECK(Crc32c(zeros) == 0x8A9136AAu);
  CHECK(Crc32c(ones) == 0x62A8AB43u);
  CHECK(Crc32c(AsBytes("123456789")) == 0xE3069283u);
}

TEST_CASE("an event file is a chain of checked records") {
  testing::TempDir dir;
  auto file = EventFile::Create(Files::Real(), Clock::Real(), dir.path(), "test");
  REQUIRE_OK(file);
  REQUIRE_OK((*file)->AddScalars(7, {{"train/loss", 0.5}, {"train/kl", 0.25}}));
  const std::string content = Files::Real().ReadAll((*file)->path()).value();
  size_t offset = 0;
  std::vector<std::string> events;
  while (offset < content.size()) {
    REQUIRE(offset + 12 <= content.size());
    uint64_t length = 0;
    std::memcpy(&length, content.data() + offset, 8);
    const std::string head = content.substr(offset, 8);
    uint32_t crc = 0;
    std::memcpy(&crc, content.data() + offset + 8, 4);
    const uint32_t plain = Crc32c(AsBytes(head));
    CHECK(crc == ((plain >> 15) | (plain << 17)) + 0xA282EAD8u);
    REQUIRE(offset + 12 + length + 4 <= content.size());
    events.push_back(content.substr(offset + 12, length));
    offset += 12 + length + 4;
  }
  REQUIRE(events.size() == 2);
  CHECK(events[0].find("brain.Event:2") != std::string::npos);
  CHECK(events[1].find("train/loss") != std::string::npos);
  CHECK(events[1].find(std::string("\x15\x00\x00\x00\x3f", 5)) != std::string::npos);  // 0.5f
}
}  // namespace
}  // namespace stretto
