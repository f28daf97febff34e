// What the benchmarks of whole models share: SmolLM2-135M's shape, and ending with a message where
// something can't be made.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/formats/model_config.h"

namespace stretto::bench {
template <class T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(value);
}

inline engine::ModelConfig SmolLm2Config() {
  engine::ModelConfig c;
  c.vocab_size = 49152;
  c.hidden_size = 576;
  c.intermediate_size = 1536;
  c.num_layers = 30;
  c.num_heads = 9;
  c.num_kv_heads = 3;
  c.head_dim = 64;
  c.max_position_embeddings = 8192;
  c.rms_norm_eps = 1e-5;
  c.rope_theta = 100000;
  c.tie_word_embeddings = true;
  return c;
}
}  // namespace stretto::bench
