// Arithmetic on sizes that come from files.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/types/span.h"

namespace stretto::engine {
// More dimensions than any tensor of a language model has.
inline constexpr size_t kMaxRank = 8;

// a · b for non-negative numbers, or nothing on overflow.
inline std::optional<int64_t> CheckedMul(int64_t a, int64_t b) {
  int64_t product;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// The product of non-negative dimensions, such that the product of any of them does not overflow
// either (a zero dimension does not excuse an absurd one).
inline std::optional<int64_t> CheckedProduct(absl::Span<const int64_t> dims) {
  int64_t product = 1;
  bool zero = false;
  for (const int64_t dim : dims) {
    zero = zero || dim == 0;
    const auto next = CheckedMul(product, dim == 0 ? 1 : dim);
    if (!next.has_value()) return std::nullopt;
    product = *next;
  }
  return zero ? 0 : product;
}
}  // namespace stretto::engine
