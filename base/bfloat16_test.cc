// All 2^16 values of both 16-bit floats, and rounding against a definition that shares no code with
// the conversions: of the two neighbours the nearer one, on a tie the even one.
#include "base/bfloat16.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/dtype.h"
#include "base/testing.h"

namespace stretto {
namespace {
struct Format {
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
  uint16_t infinity;
  float max;  // largest finite
};
const Format kBf16 = {Bf16ToF32, F32ToBf16, 0x7f80, 0x1.fep127f};
const Format kF16 = {F16ToF32, F32ToF16, 0x7c00, 65504.0f};

// Rounds |value| by bisection over the sorted positive patterns, comparing distances in double.
uint16_t NarrowBySearch(const Format& format, float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double x = std::fabs(static_cast<double>(value));
  uint16_t low = 0, high = static_cast<uint16_t>(format.infinity - 1);
  if (x > format.widen(high)) {
    const double step = double{format.widen(high)} - format.widen(static_cast<uint16_t>(high - 1));
    return static_cast<uint16_t>(sign | (x < format.max + step / 2 ? high : format.infinity));
  }
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (format.widen(middle) <= x ? low : high) = middle;
  }
  if (format.widen(high) <= x) low = high;
  const double below = x - format.widen(low), above = format.widen(high) - x;
  const bool take_low = below < above || (below == above && low % 2 == 0) || low == high;
  return static_cast<uint16_t>(sign | (take_low ? low : high));
}

void CheckFormat(const Format& format) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float wide = format.widen(static_cast<uint16_t>(bits));
    const uint16_t back = format.narrow(wide);
    if ((bits & 0x7fff) > format.infinity) {
      if (!std::isnan(wide) || (back & 0x7fff) <= format.infinity) FAIL("NaN lost: " << bits);
      if ((back ^ bits) & 0x8000) FAIL("sign of NaN lost: " << bits);
    } else if (back != bits) {
      FAIL("round trip of " << bits << " gives " << back);
    }
  }
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(random.NextU32());
    if (!std::isfinite(value)) continue;
    if (format.narrow(value) != NarrowBySearch(format, value)) FAIL("rounding of " << value);
  }
  for (uint32_t bits = 0; bits + 1 < format.infinity; ++bits) {  // every tie and its neighbours
    const float tie = static_cast<float>((double{format.widen(static_cast<uint16_t>(bits))} +
                                          format.widen(static_cast<uint16_t>(bits + 1))) /
                                         2);
    for (const float value : {tie, std::nextafterf(tie, 0), std::nextafterf(tie, INFINITY)}) {
      if (format.narrow(value) != NarrowBySearch(format, value)) FAIL("tie at " << value);
      if (format.narrow(-value) != NarrowBySearch(format, -value)) FAIL("tie at " << -value);
    }
  }
  REQUIRE(format.narrow(std::numeric_limits<float>::infinity()) == format.infinity);
  REQUIRE(format.narrow(-std::numeric_limits<float>::infinity()) == (format.infinity | 0x8000));
  REQUIRE(format.narrow(std::numeric_limits<float>::max()) == format.infinity);
  // A NaN whose payload lies only in the bits that are cut off stays a NaN.
  REQUIRE((format.narrow(std::bit_cast<float>(0x7f800001u)) & 0x7fff) > format.infinity);
}

TEST_CASE("bfloat16 round trips and rounds to nearest even") { CheckFormat(kBf16); }
TEST_CASE("binary16 round trips and rounds to nearest even") { CheckFormat(kF16); }

TEST_CASE("known values") {
  REQUIRE(F32ToF16(1.0f) == 0x3c00);
  REQUIRE(F32ToF16(-2.0f) == 0xc000);
  REQUIRE(F32ToF16(0x1.0p-24f) == 0x0001);
  REQUIRE(F16ToF32(0x7bff) == 65504.0f);
  REQUIRE(F32ToBf16(1.0f) == 0x3f80);
  REQUIRE(Bf16ToF32(0x4049) == 3.140625f);
}

TEST_CASE("sizes and names of element types") {
  REQUIRE(SizeOf(DType::kF32) == 4);
  REQUIRE(SizeOf(DType::kBF16) == 2);
  REQUIRE(SizeOf(DType::kI64) == 8);
  REQUIRE(Name(DType::kBF16) == "bf16");
}
}  // namespace
}  // namespace stretto
