// The ranks that share one model's leaves (model/leaf_layout.h): who owns which leaves and which
// rows of a sequence-parallel tensor, and the collectives of a tensor-parallel pass. Sums run over
// leaves in the tree of collectives/sum_tree.h, whoever owns them.
//
// Rows are divided like leaves: leaf i of L has rows ⌊T·i/L⌋ to ⌊T·(i+1)/L⌋, a rank those of its
// leaves.
//
// Passes can't fail, collectives can: after the first error every later call returns at once, what
// they would have filled holds anything, and status() says why.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "engine/collectives/communicator.h"
#include "engine/device/device.h"
#include "engine/model/parameters.h"

namespace stretto::engine {
// Leaves of a rank; num_ranks divides num_leaves.
LeafRange LeavesOfRank(int64_t num_leaves, int num_ranks, int rank);

class LeafGroup {
 public:
  // `communicator`: null for a rank that owns all leaves; outlives the group, as do the others.
  LeafGroup(Device& device, Stream& stream, Communicator* communicator, int64_t num_leaves);

  int size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  bool alone() const { return size() == 1; }
  const LeafRange& leaves() const { return leaves_; }
  LeafRange LeavesOf(int rank) const { return LeavesOfRank(leaves_.num_leaves, size(), rank); }

  int64_t RowBegin(int64_t num_rows, int64_t leaf) const {
    return num_rows * leaf / leaves_.num_leaves;
  }
  // Rows of every rank.
  std::vector<int64_t> RowsOfRanks(int64_t num_rows) const;

  // Buffers that SumLeaves needs.
  int64_t num_sum_buffers() const;
  // The sum over all leaves of what `compute` gives each of this rank's, called in order of leaves;
  // it overwrites its tensor (f32, contiguous, rows_of_rank's sum × cols). Each rank receives its
  // rows of it: `mine`, or where it is alone what is returned lies in a buffer. A ReduceScatter.
  using ComputeLeaf = std::function<void(int64_t leaf, const Tensor& partial)>;
  Tensor SumLeaves(const std::vector<int64_t>& rows_of_rank, const std::vector<Tensor>& buffers,
                   const Tensor& mine, const ComputeLeaf& compute);
  // The sum over all leaves, on every rank: in partials[0], one f32 tensor for each of this rank's
  // leaves, of which all are used up. An AllReduce.
  void SumPartials(std::vector<Tensor> partials);
  // `all` = every rank's rows in order of rank. Where a rank is alone, `mine` itself. An AllGather.
  Tensor GatherRows(const std::vector<int64_t>& rows_of_rank, const Tensor& all,
                    const Tensor& mine);
  // Rows to and from every rank, in order of rank; alone: `mine` itself.
  Tensor ExchangeRows(const std::vector<int64_t>& to, const std::vector<int64_t>& from,
                      const Tensor& theirs, const Tensor& mine);
  // The largest of all ranks' values, element by element (f32, one row).
  void Max(const Tensor& values);

  const absl::Status& status() const { return status_; }

 private:
  void Run(CollectiveCall call);
  void SumNodeInto(const SumNode& node, const Tensor& out, absl::Span<const Tensor> spare,
                   const ComputeLeaf& compute);
  CollectiveCall SumCall(CollectiveKind kind, const std::vector<Tensor>& nodes) const;

  Device& device_;
  Stream& stream_;
  Communicator* communicator_;
  const LeafRange leaves_;
  std::vector<SumNode> nodes_;  // of this rank
  absl::Status status_;
};
}  // namespace stretto::engine
