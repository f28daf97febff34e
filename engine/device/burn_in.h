// A check of the machine before it takes part in a run: every processor computes a matrix product
// of which the right bits are known, again and again for a moment. A rank whose processor or memory
// errs would spoil the run's bits, or the model, without a word. The same products measure what the
// machine's matrix throughput is: the ceiling that training is compared with.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device/device.h"

namespace stretto::engine {
struct BurnInOptions {
  double seconds = 0.2;  // at least one product of each kind is computed
  // For tests: sees, and may change, what a thread has computed before it is compared.
  std::function<void(int thread, absl::Span<float> product)> tamper = {};
};

struct BurnInResult {
  // A second, of all threads, each in its fastest moment; a multiply-add counts two.
  double flops = 0;
  int64_t num_products = 0;  // that came out right
};

// One thread for each of the device's, each held on a processor of its own where there are enough.
// DataLoss: a product came out wrong; names processor, element, and both values. Blocks.
absl::StatusOr<BurnInResult> BurnIn(const DeviceOptions& device, DType dtype,
                                    const BurnInOptions& options = {});

// The product's expected bits, as a hash (FNV-1a over its elements): of real numbers, summed in the
// order and with the roundings of the numeric profile.
uint64_t KnownProductHash(bool fma, DType dtype);

// Its operands, as the profile rounds them, and sizes.
inline constexpr int64_t kBurnInRows = 64, kBurnInN = 256, kBurnInK = 512;
float BurnInValue(int64_t index, bool is_whole);  // is_whole: small integers, any order is exact
}  // namespace stretto::engine
