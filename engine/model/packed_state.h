// Memory of a PackedPass and the batch it is at; shared by forward.cc and backward.cc.
#pragma once

#include "engine/model/layer.h"
#include "engine/model/memory.h"
#include "engine/model/packed_pass.h"
#include "engine/model/vocabulary_leaves.h"

namespace stretto::engine {
struct PackedPass::State {
  DeviceMemory memory;
  // Full size; a pass works on the first rows of each.
  std::vector<LayerTensors> layers;
  Tensor x_last_TD;
  Tensor ids_T, positions_T, target_rows_N, targets_N;  // i32
  // One chunk of the head, R rows.
  int64_t chunk_rows = 0;
  Tensor last_RD, normed_RD, logits_RV, logprobs_R, entropy_R;
  // What LogProbs found of the logits that Backward finds there; for training.
  Tensor stats_R3;
  bool stats_have_entropy = false;
  // With several leaves, of a pass that isn't for training.
  std::vector<Tensor> leaf_sums_TD;
  std::unique_ptr<VocabularyLeaves> vocabulary;
  // Gradients, all f32.
  Tensor d_x_TD, d_normed_TD, d_qkv_TE, d_qk_TE, d_attention_TE, d_gate_up_T2F, d_activated_TF;
  Tensor d_last_RD, d_normed_RD, d_logprobs_R, d_entropy_R;
  Tensor d_rounded;  // bf16, one row: of a layer's widest d_y, where products read them so

  const PackedBatch* batch = nullptr;  // of the last Forward, until Backward
};

// `t` restricted to its first `rows` rows.
LayerTensors FirstRows(const LayerTensors& t, int64_t rows);
}  // namespace stretto::engine
