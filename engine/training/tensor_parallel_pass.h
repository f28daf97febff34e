// The training pass over a model in leaves (model/leaf_layout.h), on one rank or on several that
// share them (Megatron's tensor parallelism with sequence parallelism: Korthikanti et al. 2022).
// The bits depend on the number of leaves, not on who owns them.
//
// A layer, on a rank with t of T rows and some leaves:
//   norm of t rows → AllGather → q, k, v, attention, o of its leaves → ReduceScatter → + residual
//   norm of t rows → AllGather → gate, up, down of its leaves        → ReduceScatter → + residual
// and on the way back the same with gradients: AllGather of what arrives, AllGather of the norm's
// output (it is not kept), ReduceScatter of what leaves. Rows of the embedding go from the ranks
// that own their tokens to those that own their rows (an AllToAll), their gradients back. The
// vocabulary's logits are a rank's own; maximum, sums and the target's logit are exchanged, never
// logits.
//
// Gradients of what all leaves share (norms; k and v where heads don't divide) are sums over leaves
// of partial ones: of a leaf's rows, or of its heads. One AllReduce a unit.
//
// Legend: as in packed_pass.h; t rows of this rank, E columns of a leaf's q, k and v.
#pragma once

#include <memory>
#include <vector>

#include "engine/model/leaf_layout.h"
#include "engine/model/packed_pass.h"
#include "engine/training/leaf_group.h"

namespace stretto::engine {
class TensorParallelPass final : public TrainingPass {
 public:
  // `group`: null for a rank that owns all leaves. All that is given outlives the pass. `stream` is
  // the one that passes are made on.
  static absl::StatusOr<std::unique_ptr<TensorParallelPass>> Create(
      const Transformer& transformer, const PackedPassOptions& options, Stream& stream,
      Communicator* group, int64_t num_leaves);
  ~TensorParallelPass() override;

  // As of TrainingPass, (collective) in the group; all ranks give the same batch and gradients and
  // get the same log-probs. Weights, layout and gradients are those of this rank's leaves.
  void Forward(Stream& stream, const ModelWeights& weights, const PackedBatch& batch,
               absl::Span<float> logprobs_N, absl::Span<float> entropy_N) override;
  void Backward(Stream& stream, const ModelWeights& weights, const ParameterLayout& layout,
                const Tensor& flat_weights, const Tensor& gradients,
                absl::Span<const float> d_logprobs_N, absl::Span<const float> d_entropy_N) override;
  size_t bytes() const override;
  absl::Status status() const override { return group_.status(); }

 private:
  struct State;
  struct LeafTensors;
  struct Layer;
  struct Gradients;  // what the backward pass reads of parameters and adds to

  TensorParallelPass(const Transformer& transformer, const PackedPassOptions& options,
                     Stream& stream, Communicator* group, int64_t num_leaves);
  absl::Status Allocate();
  absl::Status AllocateGradients();
  absl::Status MakeLayer(Layer& layer);

  // --- the batch at hand
  void Begin(const PackedBatch& batch);
  void PlanEmbedding(const PackedBatch& batch);
  int64_t LeafOfToken(int32_t id) const;
  Tensor Mine(const Tensor& rows) const;   // the first t rows
  Tensor Whole(const Tensor& rows) const;  // the first T rows
  const LeafSlice& Slice(int64_t leaf) const { return slices_[leaf]; }
  float epsilon() const { return static_cast<float>(config().rms_norm_eps); }
  const ModelConfig& config() const { return transformer_.config(); }

  // --- forward
  void ForwardEmbedding(const ModelWeights& weights);
  // The norm's output, of all rows.
  Tensor GatherNorm(const Tensor& x, const Tensor& weight);
  void ForwardAttention(const LayerWeights& w, Layer& layer);
  void ForwardGateUp(const LayerWeights& w, Layer& layer);
  void ForwardDown(const LayerWeights& w, Layer& layer);
  void ProjectLeaf(const LeafWeights& w, const LayerWeights& shared, int64_t leaf,
                   const Tensor& normed, const LeafTensors& t);
  void AttendLeaf(int64_t leaf, const LeafTensors& t);
  // One call of attention: query heads of a leaf and the key/value heads that they share evenly.
  struct HeadRun {
    int64_t q_head, num_heads, kv_head, num_kv_heads;  // within the leaf
  };
  std::vector<HeadRun> HeadRuns(int64_t leaf) const;
  PackedAttention AttentionOf(int64_t leaf, const HeadRun& run, const LeafTensors& t) const;
  // Rows [begin, begin + count) of the batch's targets in order of rows.
  void ForwardHead(const ModelWeights& weights, absl::Span<float> logprobs_N,
                   absl::Span<float> entropy_N);
  // Values of the rows; every rank computes all of them.
  void RunValues(const ModelWeights& weights, int64_t begin, int64_t count);
  void RunLogits(const ModelWeights& weights, int64_t begin, int64_t count);
  std::vector<int64_t> TargetsOfRanks(int64_t begin, int64_t count) const;

  // --- backward
  void BackwardHead(Gradients& g, absl::Span<const float> d_logprobs_N,
                    absl::Span<const float> d_entropy_N);
  void BackwardHeadChunk(Gradients& g, int64_t begin, int64_t count, const Tensor& d_entropy);
  void BackwardValueChunk(Gradients& g, int64_t begin, int64_t count);
  void BackwardMlp(Gradients& g, int64_t layer);
  void BackwardAttention(Gradients& g, int64_t layer);
  void BackwardProjection(Gradients& g, int64_t layer, int64_t leaf, const Tensor& normed,
                          const Tensor& d_normed);
  void BackwardHeads(Gradients& g, int64_t layer, int64_t leaf);
  void BackwardEmbedding(Gradients& g);
  // Gradient of the norm of this rank's rows, added to d_x; the weight's to its partials.
  void BackwardNorm(Gradients& g, const ParameterView& weight_view, const Tensor& weight,
                    const Tensor& d_x, const Tensor& d_normed, const Tensor& x);
  void Enter(Gradients& g, int64_t unit);
  // Adds up what leaves share of the unit.
  void Leave(Gradients& g, int64_t unit);

  const Transformer& transformer_;
  const PackedPassOptions options_;
  Device& device_;
  Stream& stream_;
  LeafGroup group_;
  std::vector<LeafSlice> slices_;  // of all leaves
  std::unique_ptr<State> state_;
};
}  // namespace stretto::engine
