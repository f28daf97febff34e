// The burn-in finds a machine that computes wrong, and no other.
#include "engine/device/burn_in.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>

#include "absl/strings/match.h"
#include "base/testing.h"

namespace stretto::engine {
namespace {
TEST_CASE("every backend's products have the bits that the burn-in knows") {
  for (const char* backend : {"cpu", "reference"}) {
    for (const bool fma : {true, false}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        INFO(backend << (fma ? ", fma, " : ", no fma, ")
                     << (dtype == DType::kF32 ? "f32" : "bf16"));
        const auto result = BurnIn({.backend = backend, .num_threads = 2, .allow_fma = fma}, dtype,
                                   {.seconds = 0.001});
        REQUIRE_OK(result);
        CHECK(result->num_products >= 2);
        CHECK(result->flops > 0);
      }
    }
  }
}

TEST_CASE("one wrong bit of one product of one processor is found, and named") {
  std::atomic<int> num_products{0};
  BurnInOptions options{.seconds = 0.001};
  SECTION("of whole numbers") {
    options.tamper = [](int thread, absl::Span<float> product) {
      if (thread == 1) product[300] += 1;
    };
    const absl::Status status = BurnIn({.num_threads = 2}, DType::kF32, options).status();
    INFO(status);
    CHECK(absl::IsDataLoss(status));
    CHECK(absl::StrContains(status.message(), "element (1, 44) is"));
    CHECK(absl::StrContains(status.message(), "processor or memory errs"));
  }
  SECTION("of real numbers, once, in the last bit") {
    options.tamper = [&](int thread, absl::Span<float> product) {
      if (thread == 0 && num_products.fetch_add(1) == 1)
        product[9] = std::nextafter(product[9], 9.0f);
    };
    const absl::Status status = BurnIn({.num_threads = 2}, DType::kBF16, options).status();
    INFO(status);
    CHECK(absl::IsDataLoss(status));
    CHECK(
        absl::StrContains(status.message(), "came out with other bits than numeric profile cpu/"));
  }
}
}  // namespace
}  // namespace stretto::engine
