// What a trainer of a model in leaves has beside its pass: the groups of ranks that it belongs to,
// and the way between whole parameters, as files and other services know them, and the pieces that
// ranks hold.
//
// Of N ranks, T = tensor_parallel share the leaves of one copy of the model: ranks [T·d, T·(d + 1))
// are copy d. Those at the same place in their copies hold the same pieces, and divide data and
// state among them as parallel.h says.
#pragma once

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"
#include "engine/formats/model_config.h"
#include "engine/model/parameters.h"
#include "engine/training/parallel.h"
#include "engine/training/training_state.h"

namespace stretto::engine {
// InvalidArgument names what can't be: see docs/parallel-training.md.
absl::Status CheckTensorParallel(const ModelConfig& config, const ParallelOptions& options,
                                 int num_ranks);

class TensorParallel {
 public:
  // (collective) in `world`, which is null for a rank that is alone and outlives this.
  static absl::StatusOr<std::unique_ptr<TensorParallel>> Create(const ModelConfig& config,
                                                                const ParallelOptions& options,
                                                                Communicator* world);

  // Null: nobody else.
  Communicator* leaves() const { return leaves_group_.get(); }  // that share a copy of the model
  Communicator* data() const { return data_; }                  // that hold the same pieces
  const std::shared_ptr<const ParameterLayout>& layout() const { return layouts_[rank()]; }

  // As the functions of TrainingState, of parameters of the whole layout.
  void Upload(TrainingState& state, StateTensor which, const Parameter& parameter,
              const float* src) const;
  absl::Status Download(TrainingState& state, StateTensor which, const Parameter& parameter,
                        float* dst) const;
  std::vector<StatePart> PartsToWrite(const TrainingState& state) const;
  absl::Status DownloadWeights(TrainingState& state, DType dtype, uint8_t* dst) const;
  // Where this rank holds everything: rows [row_begin, row_end) out of `flat`.
  void ReadRows(Device& device, Stream& stream, const Tensor& flat, const Parameter& parameter,
                int64_t row_begin, int64_t row_end, uint8_t* dst) const;

  // Once one of the groups has ended, ends the others, so that nobody waits for this rank.
  void EndBroken();

 private:
  TensorParallel(const ModelConfig& config, const ParallelOptions& options, Communicator* world);
  int rank() const { return leaves_group_ == nullptr ? 0 : leaves_group_->rank(); }
  size_t IndexOf(const Parameter& parameter) const;
  // Pieces of a parameter in the layout of a rank of leaves(), as indices; what all leaves share is
  // counted on its first rank alone.
  std::vector<size_t> PiecesOf(int rank, size_t parameter) const;
  std::vector<size_t> HeldPiecesOf(int rank, size_t parameter) const;
  // Between a piece (contiguous) and its place in the whole parameter.
  enum class Direction : uint8_t { kTake, kPut };
  void Move(Direction direction, int rank, size_t piece, size_t element, uint8_t* whole,
            uint8_t* contiguous) const;

  const ParameterLayout whole_;
  absl::flat_hash_map<std::string, size_t> index_;
  Communicator* world_ = nullptr;
  std::unique_ptr<Communicator> leaves_group_, data_group_;
  Communicator* data_ = nullptr;
  std::vector<std::shared_ptr<const ParameterLayout>> layouts_;  // by rank of leaves()
};
}  // namespace stretto::engine
