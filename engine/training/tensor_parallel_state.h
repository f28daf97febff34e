// Memory of a TensorParallelPass and the batch it is at; shared by its forward and backward files.
#pragma once

#include "engine/model/memory.h"
#include "engine/training/tensor_parallel_pass.h"

namespace stretto::engine {
// Of one leaf of a layer, all rows.
struct TensorParallelPass::LeafTensors {
  Tensor qkv_TE;  // [q | k | v] as projected
  Tensor qk_TE;   // q and k after their norms; absent without qk_norm
  Tensor attention_TE;
  Tensor gate_up_T2F;
};

struct TensorParallelPass::Layer {
  Tensor x_in_tD, x_mid_tD, x_out_tD;
  std::vector<LeafTensors> leaves;  // of this rank
};

struct TensorParallelPass::State {
  DeviceMemory memory;
  std::vector<Layer> layers;
  int64_t max_mine = 0;                // t at most
  Tensor x_last_tD, norm_tD, norm_TD;  // norm_TD absent where the rank is alone
  Tensor activated_TF;                 // of one leaf
  std::vector<Tensor> sums_TD;         // f32: partial sums over leaves
  Tensor reduced_tD;                   // f32: this rank's rows of a sum
  Tensor positions_T, target_rows_N, my_target_rows_N, targets_N;  // i32
  // Rows of the embedding on their way: looked up here, and what arrives.
  Tensor lookups_T, arrivals_t, departures_t;  // i32
  // The head, R rows at a time; V tokens of this rank's leaves.
  int64_t chunk_rows = 0, vocab_begin = 0, vocab_rows = 0;
  Tensor rows_RD, logits_RV, logprobs_R, entropy_R;
  Tensor max_N, sums_N3;  // f32, of all targets
  std::vector<Tensor> leaf_sums_R3;

  // --- gradients, all f32
  Tensor d_x_tD, d_x_TD;  // d_x_TD absent where the rank is alone
  Tensor d_norm_tD;
  Tensor d_qkv_TE, d_qk_TE, d_attention_TE, d_gate_up_T2F, d_activated_TF;  // of one leaf
  Tensor d_logprobs_N, d_entropy_N;
  std::vector<Tensor> partials;  // of what leaves share in a unit

  // --- the batch of the last Forward
  const PackedBatch* batch = nullptr;
  int64_t num_rows = 0, first_row = 0, my_rows = 0;
  std::vector<int64_t> rows_of_rank;
  std::vector<int32_t> order_N;             // targets by rising row
  std::vector<int32_t> sorted_target_rows;  // in that order
  struct Lookup {
    int64_t leaf, begin, count;  // of the rows that are looked up here
  };
  std::vector<Lookup> lookups;
  std::vector<int64_t> rows_sent, rows_received;  // by rank
};

struct TensorParallelPass::Gradients {
  const ModelWeights& weights;
  const ParameterLayout& layout;
  ParameterUnits::Tensors unit, head;  // of the unit at hand; of the LM head
  int64_t unit_begin = 0, common_size = 0;

  // A leaf's partial gradient of what leaves share.
  Tensor Partial(const State& s, const ParameterView& view, int64_t index) const {
    Tensor t = s.partials[index].Cols(view.offset - unit_begin, view.size());
    t.rows = view.rows;
    t.cols = t.row_stride = view.cols;
    return t;
  }
};
}  // namespace stretto::engine
