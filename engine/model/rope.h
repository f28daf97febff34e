// Cosines and sines of rotary positions (Su et al. 2021), plain and with every scaling that the
// configurations know. Formulas follow transformers' modeling_rope_utils; frequencies are rounded
// to f32 before they meet a position, as there.
#pragma once

#include <vector>

#include "engine/formats/model_config.h"

namespace stretto::engine {
struct RopeFrequencies {
  std::vector<float> inverse;     // radians a position, head_dim / 2 of them
  double attention_factor = 1.0;  // multiplies cosines and sines (yarn)
};
// `max_sequence_length` matters to `dynamic` alone, which is computed as for a sequence of exactly
// that length.
RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config, int64_t max_sequence_length);

// Row-major [num_positions, head_dim / 2].
struct RopeTables {
  std::vector<float> cos, sin;
};
RopeTables ComputeRopeTables(const ModelConfig& config, int64_t num_positions);
}  // namespace stretto::engine
