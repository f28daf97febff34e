// Follows a pass unit by unit for layouts that don't hold everything: brings weights in (fsdp: an
// AllGather a part, the next layers' while the current one computes) and takes gradients out (zero2
// and fsdp: a ReduceScatter a part, while the layers below compute; of a tied embedding in two
// halves, tied_embedding_sum.h). All ranks make the same collectives in the same order, those
// without a micro-batch of their own too.
//
// Passes can't fail, collectives can: after the first error units hold anything, every later call
// returns at once, and status() says why.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/collectives/communicator.h"
#include "engine/device/device.h"
#include "engine/model/memory.h"
#include "engine/model/packed_pass.h"
#include "engine/model/weights.h"
#include "engine/training/parallel.h"
#include "engine/training/tied_embedding_sum.h"

namespace stretto::engine {
// What the stream works on; all of it outlives the stream.
struct UnitStreamContext {
  Device& device;
  Stream& stream;
  // Of the weights, and of the gradients: the model's, or of an adapter the other one's.
  const ParameterLayout& layout;
  const ShardMap& map;
  const ParameterLayout& gradient_layout;
  const ShardMap& gradient_map;
  Communicator& communicator;
  ModelWeights& weights;
  bool gathers_weights = false;
  Tensor weight_shard;    // with gathers_weights: this rank's elements
  Tensor flat_weights;    // else: all
  Tensor gradient_shard;  // f32, this rank's elements: receives the step's sums
};

class UnitStream final : public ParameterUnits {
 public:
  static absl::StatusOr<std::unique_ptr<UnitStream>> Create(const UnitStreamContext& context,
                                                            const ParallelOptions& options);
  ~UnitStream() override;

  void BeforeForward(int64_t unit) override;
  void AfterForward(int64_t unit) override;
  Tensors BeforeBackward(int64_t unit) override;
  void AfterBackward(int64_t unit) override;
  void AfterMlpBackward(int64_t unit, MlpPart part) override;
  std::vector<std::vector<Rows>> TiedHeadPieces() override;
  void AfterTiedHeadBackward(int64_t piece) override;
  bool TakeLookups(const Tensor& d_x_TD) override;

  // A step's gradients come from these leaves, some in each round.
  void BeginStep(const std::vector<bool>& used_leaves);
  // `leaf_of_rank`: −1 for a rank without one. `ids_of_ranks`: the tokens of their micro-batches,
  // where passes send a tied embedding's gradient in two halves; or empty. What is gathered is of
  // the current weights.
  void BeginRound(const std::vector<int64_t>& leaf_of_rank,
                  TiedEmbeddingSum::IdsOfRanks ids_of_ranks = {});
  // The part of a rank without a micro-batch, or without gradients while others have some.
  void ForwardAlone();
  void BackwardAlone();
  // No rank has gradients in this round: its leaves are zeros.
  void AddZeros();
  // Waits for what is under way.
  absl::Status EndRound();
  const absl::Status& status() const { return status_; }

  // Memory for gathered weights and for gradients on their way, and what sums held at most.
  size_t window_bytes() const { return memory_.bytes(); }
  size_t packed_bytes() const;
  size_t sum_bytes_max() const;

 private:
  // Weights of one layer, gathered and packed.
  struct WeightSlot {
    Tensor window;
    int64_t unit = -1;
    std::vector<CollectiveHandle> gathered;  // by part
    LayerWeights packed;
  };
  struct GradientSlot {
    Tensor window;
    std::vector<CollectiveHandle> taken;  // by part
  };

  UnitStream(const UnitStreamContext& context, const ParallelOptions& options);
  absl::Status Allocate();
  int64_t last_unit() const { return c_.map.num_units() - 1; }
  bool IsLayer(int64_t unit) const { return unit > 0 && unit < last_unit(); }
  bool adapts() const { return &c_.gradient_layout != &c_.layout; }
  bool tied() const { return c_.layout.lm_head.offset == c_.layout.embedding.offset; }
  // `window` as if it were what begins at `begin` of a flat run of so many elements.
  static Tensor InFlatRun(const Tensor& window, int64_t begin, int64_t size);
  Tensor WeightsInFlatRun(const Tensor& window, int64_t unit) const {
    return InFlatRun(window, c_.map.UnitBegin(unit), c_.layout.size());
  }
  WeightSlot& SlotOf(int64_t unit);
  GradientSlot& GradientSlotOf(int64_t unit);
  void StartGather(int64_t unit);
  // Starts the layers after `unit` in `direction` (+1, −1), as many as there are slots for.
  void GatherAhead(int64_t unit, int direction);
  // The unit's weights, once they are here.
  Tensor Gathered(int64_t unit, int direction);
  // Starts the sum of one of the unit's parts.
  void StartSum(int64_t unit, int64_t part);
  void StartLookups(const float* d_x_TD, int64_t row_stride);
  // What the embedding's two halves came to.
  void AddTiedEmbedding();
  // A sum that all leaves have come to is this rank's gradient.
  void TakeIfComplete(int64_t part);
  void WaitFor(std::vector<CollectiveHandle>& handles);
  void Keep(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }

  UnitStreamContext c_;
  ParallelOptions options_;
  DeviceMemory memory_;
  std::vector<WeightSlot> layer_slots_;
  std::array<WeightSlot, 2> edge_slots_;  // of the embedding and the head
  std::array<GradientSlot, 2> layer_gradients_, edge_gradients_;
  std::vector<bool> used_leaves_;
  std::vector<int64_t> leaf_of_rank_;
  std::vector<std::unique_ptr<TreeSum>> sums_;  // by part
  TiedEmbeddingSum tied_embedding_;
  bool halves_ = false;  // of this round: the tied embedding's gradient comes in two
  bool lookups_sent_ = false;
  std::vector<CollectiveHandle> under_way_;
  absl::Status status_;
};
}  // namespace stretto::engine
