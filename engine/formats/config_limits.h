// The largest sizes that a model configuration may ask for: far above any model of these
// architectures, and small enough that products of three of them fit in 64 bits.
#pragma once

#include <cstdint>

namespace stretto::engine {
inline constexpr int64_t kMaxVocabSize = int64_t{1} << 24;
inline constexpr int64_t kMaxHiddenSize = int64_t{1} << 17;
inline constexpr int64_t kMaxIntermediateSize = int64_t{1} << 20;
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 1024;
inline constexpr int64_t kMaxHeadDim = 1024;
inline constexpr int64_t kMaxPositions = int64_t{1} << 30;
}  // namespace stretto::engine
