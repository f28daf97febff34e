// The tensors of a training run, and how a data-parallel layout divides them: f32 masters and Adam
// moments, f32 gradients, and the weights of computation. With a layout that divides something,
// calls marked (collective) are made by all ranks in the same order; they return the group's error
// when it ends.
//
// Not thread-safe; every call blocks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"
#include "engine/device/device.h"
#include "engine/model/memory.h"
#include "engine/model/packed_pass.h"
#include "engine/model/weights.h"
#include "engine/training/gradient_sums.h"
#include "engine/training/optimizer_state.h"
#include "engine/training/parallel.h"
#include "engine/training/unit_stream.h"

namespace stretto::engine {
class AdaptedModel;

// Bytes that a rank holds.
struct MemoryLedger {
  size_t weights = 0, gradients = 0, optimizer = 0;  // what the layout divides
  size_t packed = 0;                                 // copies of matrices as products like them
  // zero2, fsdp: weights and gradients of the units at hand. ddp, zero1: partial sums, at most,
  // when a rank had several leaves. And the window of optimizer state that isn't f32 in memory.
  size_t windows = 0;
  size_t offloaded = 0;  // in files: masters and moments
};

// A run of a parameter's elements, or of a rectangle of them, row-major, of which this rank holds a
// kind of state.
struct StatePart {
  StateTensor which = StateTensor::kMaster;
  const Parameter* parameter = nullptr;
  int64_t begin = 0, count = 0;
  Tensor values;                                                   // on the device, of one row
  int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;  // row_end 0: no rectangle
  // Where there are no such values: gives elements [first, first + count) of the run. Any thread.
  std::function<absl::Status(int64_t first, int64_t count, float* dst)> read;
};

struct TrainingStateOptions {
  DType dtype = DType::kBF16;  // of weights
  OptimizerStorage storage;
  // The layout is an adapter's, and this the model of which passes read the weights; it outlives
  // the state. Then weights() and flat_weights() are the adapter's values, which every rank has.
  AdaptedModel* model = nullptr;
};

// Somebody who reads masters and moments while training goes on: before they change for the first
// time he is asked to be done with it.
class StateReader {
 public:
  virtual ~StateReader() = default;
  // Blocks until the state isn't read any more.
  virtual void FinishReading() = 0;
};

class TrainingState {
 public:
  // `communicator` may be null for a rank that is alone; it outlives the state. `leaves`: of the
  // ranks that hold the model's other leaves, or null.
  static absl::StatusOr<std::unique_ptr<TrainingState>> Create(
      Device& device, Stream& stream, std::shared_ptr<const ParameterLayout> layout,
      const TrainingStateOptions& state, const ParallelOptions& options, Communicator* communicator,
      Communicator* leaves = nullptr);
  ~TrainingState();

  // --- what passes work on
  ModelWeights& weights() { return *weights_; }
  UnitStream* stream() { return unit_stream_.get(); }  // null: everything is there
  ParameterUnits* units();                             // what passes are to be followed by, or null
  const Tensor& flat_weights() const { return weights_flat_; }
  const Tensor& gradients() const { return gradients_; }

  // --- the state's values
  // A parameter's part that this rank holds, out of all of it.
  void Upload(StateTensor which, const Parameter& parameter, const float* src);
  // (collective) All of a parameter.
  absl::Status Download(StateTensor which, const Parameter& parameter, float* dst);
  // Elements [begin, begin + count) of the flat run, which lie in one unit, where this rank has all
  // of it (has_all_masters).
  absl::Status Read(StateTensor which, int64_t begin, int64_t count, float* dst) const;
  void ClearMoments();
  // What this rank is to write of a checkpoint: all ranks' parts are the whole state, once. Where
  // every rank holds everything, they take turns as a divided layout's owners would.
  std::vector<StatePart> PartsToWrite() const;
  // Asked once, before the state changes or ends; not kept alive for longer.
  void AddReader(std::shared_ptr<StateReader> reader) { readers_.push_back(std::move(reader)); }
  // (collective) Weights follow from the masters. An error of an Upload or ClearMoments before is
  // returned here.
  absl::Status RefreshWeights();
  // (collective) All weights, in the layout's order.
  absl::Status DownloadWeights(uint8_t* dst);
  // Whether this rank holds all weights, and all masters.
  bool has_all_weights() const;
  bool has_all_masters() const { return optimizer_place_.whole(); }
  bool is_plain() const { return optimizer_->is_plain(); }
  // Of a plain state.
  const Tensor& Flat(StateTensor which) const { return optimizer_->Flat(which); }

  // --- gradients of a step, for layouts without a stream
  // `ids_of_ranks`: by rank, the tokens of the last pass of its part of the step, where passes send
  // a tied embedding's gradient in two halves (tied_embedding_sum.h); or empty.
  void BeginStep(const LeafPlan& plan, TiedEmbeddingSum::IdsOfRanks ids_of_ranks = {});
  void BeginLeaf();
  // The next backward pass is the last of this rank's part of the step: where its gradients are its
  // only partial, each unit's are sent on their way as soon as they are done, while the units below
  // compute.
  void ExpectLastPass();
  void EndLeaf(const LeafPlan& plan, int64_t leaf);
  // (collective) The sum over all leaves of all ranks, where it is owned. Under ddp what others own
  // is still on its way then: Update waits for it, and so does FinishSums where there is no update.
  absl::Status SumGradients();
  absl::Status FinishSums();

  // (collective) The gradient's Euclidean norm. Blocks of 4096 elements in order, from the run's
  // beginning with one leaf, from each unit's with more. In a layout of leaves a unit's are those
  // of what all leaves share, then leaf after leaf.
  absl::StatusOr<double> GradientNorm();
  // (collective) AdamW; `weight_decay` is that of matrices.
  absl::Status Update(AdamWStep step, double weight_decay);

  MemoryLedger ledger() const;
  const ShardMap& map() const { return map_; }

 private:
  // Whose elements a kind of tensor holds: all of them, or this rank's.
  struct Place {
    const ShardMap* map = nullptr;
    int rank = 0;
    bool whole() const { return map->num_ranks() == 1; }
    int64_t size() const { return map->owned(rank); }
  };
  // A run of elements: in the flat run, and in a tensor that holds a place.
  struct Piece {
    int64_t begin = 0, count = 0;
  };

  TrainingState(Device& device, Stream& stream, std::shared_ptr<const ParameterLayout> layout,
                const ParallelOptions& options, Communicator* communicator, Communicator* leaves);
  absl::Status Allocate(const TrainingStateOptions& state);
  absl::Status AllocateOptimizer(const OptimizerStorage& storage);
  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  bool alone() const { return communicator_ == nullptr || communicator_->size() == 1; }
  // Elements of a part that a place holds.
  static Piece PieceOf(const Place& place, int64_t part);
  // Where an element of the flat run is among those of a place; the `count` from there on are, too.
  static int64_t LocalOf(const Place& place, int64_t begin, int64_t count);
  // Elements [begin, begin + count) of the flat run in a tensor of `place`.
  Tensor In(const Tensor& tensor, const Place& place, int64_t begin, int64_t count) const;
  uint8_t* Host(const Tensor& tensor) const {
    return static_cast<uint8_t*>(device_.HostMemory(tensor));
  }
  absl::Status AllocateStream();
  absl::Status GatherFlat(const Tensor& flat);
  // Where whole weights are held: completes them from the ranks' parts and packs them anew.
  absl::Status PublishWeights();
  // Sums of squares of blocks, by unit: of everybody that holds a part of this layout.
  using BlockSums = std::vector<std::vector<double>>;
  absl::StatusOr<BlockSums> SquaredBlocks();
  std::vector<double> OwnSquaredBlocks();
  // The same of all leaves.
  absl::Status AddLeaves(BlockSums& sums) const;
  // Elements of one unit, at most a window of them.
  absl::Status UpdatePiece(const Piece& piece, AdamWStep step, double weight_decay,
                           const MomentRounding& rounding);
  // Calls with pieces of this rank's masters, or of a run of them, each at most a window.
  absl::Status ForEachWindow(const std::function<absl::Status(const Piece&)>& call) const;
  absl::Status ForEachWindow(const Piece& run,
                             const std::function<absl::Status(const Piece&)>& call) const;
  // Lays out a unit's matrices anew.
  absl::Status PackUnit(int64_t unit);
  void FinishReaders();

  Device& device_;
  Stream& stream_;
  std::shared_ptr<const ParameterLayout> layout_;
  ParallelOptions options_;
  Communicator* communicator_;
  Communicator* leaves_;
  const ShardMap map_, whole_;
  Place optimizer_place_, gradient_place_, weight_place_;
  AdaptedModel* model_ = nullptr;  // with an adapter
  DeviceMemory gradient_memory_, weight_memory_;
  Tensor weights_flat_, gradients_;  // of one row
  std::unique_ptr<OptimizerState> optimizer_;
  absl::Status upload_status_;  // the first error of an Upload
  std::unique_ptr<ModelWeights> weights_;
  std::unique_ptr<UnitStream> unit_stream_;
  // Of this rank's nodes, where it has more than one leaf.
  std::vector<std::unique_ptr<TreeSum>> partial_sums_;
  size_t partial_bytes_max_ = 0;
  std::unique_ptr<GradientSums> sums_;  // of a rank of several, without a stream
  std::vector<double> own_squares_;     // of the sums that it owns, before they are compared
  std::vector<std::shared_ptr<StateReader>> readers_;
};
}  // namespace stretto::engine
