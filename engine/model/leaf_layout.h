// How a model is divided into leaves for tensor parallelism (Shoeybi et al. 2019). A leaf has some
// query heads with the key/value heads they attend to, a run of the MLP's columns and a run of the
// vocabulary:
//   q, k, v, gate, up by rows of W (outputs) · o, down by columns (inputs) · embedding, head by
//   rows.
// Sums over what is divided (outputs of o and down, gradients of the inputs of the others, the
// softmax over the vocabulary) are made inside a leaf in order, and over leaves by the tree of
// collectives/sum_tree.h. Ranks own whole leaves, so the bits depend on the number of leaves alone.
//
// A value head, one row, belongs to what all leaves share, as norms do. Where the key/value heads
// don't divide by the leaves, k and v belong to it as well: every rank has them all, and a leaf
// uses the rows of the heads it attends to.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "engine/model/parameters.h"

namespace stretto::engine {
struct LeafSlice {
  int64_t head_begin = 0, num_heads = 0;  // of the query
  int64_t kv_begin = 0, num_kv_heads = 0;
  int64_t mlp_begin = 0, mlp_cols = 0;
  int64_t vocab_begin = 0, vocab_rows = 0;
};
// Of `total` things that are cut, leaf i has those from here up to where leaf i + 1 begins.
inline int64_t LeafBegin(int64_t total, int64_t num_leaves, int64_t leaf) {
  return total * leaf / num_leaves;
}
// num_leaves divides the query heads.
LeafSlice SliceOf(const ModelConfig& config, int64_t num_leaves, int64_t leaf);
bool LeavesShareKv(const ModelConfig& config, int64_t num_leaves);

// InvalidArgument, beginning with `who`, where the model can't be divided into so many leaves.
absl::Status CheckLeaves(const std::string& who, const ModelConfig& config, int64_t num_leaves);
}  // namespace stretto::engine
