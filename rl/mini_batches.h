// The order in which a batch is trained on more than once (PPO's epochs and mini-batches).
#pragma once

#include <cstdint>
#include <vector>

namespace stretto::rl {
struct MiniBatchOptions {
  int64_t num_epochs = 4;
  int64_t size = 16;  // sequences; the last of an epoch may have fewer
  uint64_t seed = 0, step = 0;
};
// Indices of sequences, mini-batch by mini-batch: each epoch has every sequence once, in an order
// that is a pure function of (seed, step, epoch). num_sequences ≥ 0, size and num_epochs ≥ 1.
std::vector<std::vector<int64_t>> PlanMiniBatches(int64_t num_sequences,
                                                  const MiniBatchOptions& options);
}  // namespace stretto::rl
