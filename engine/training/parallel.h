// How a training step is divided among ranks that hold the same model and see the same batch
// (data parallelism), such that its bits do not depend on the division.
//
// Leaves. A step's micro-batches are dealt to `reduction_leaves` L leaves by index alone:
// micro-batch i of M to leaf ⌊i·L/M⌋. Inside a leaf gradients accumulate in order; leaves are
// joined by the binary tree of collectives/sum_tree.h. So any number of ranks up to L gives the
// same bits, and L = 1 those of a single accumulation.
//
// Units, parts and blocks. The flat run of parameters is cut into units (packed_pass.h: embedding,
// each layer, head), and a unit into blocks of 4096 elements. What is sent on its way at once is a
// part: a unit, or one of the three that a layer is cut into between blocks, attention with the
// norms and the MLP's two products, since a backward pass is done with these earlier. Each rank
// owns a run of every part's blocks. Sums over gradients (the norm) are made of blocks, in order,
// whoever owns them.
//
// Leaves of K (model/leaf_layout.h) are another division, of the model itself; tensor_parallel.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/collectives/sum_tree.h"
#include "engine/model/parameters.h"

namespace stretto::engine {
// What is divided; W, G bytes of a weight and a gradient, 12 of master and moments.
enum class DataParallel : uint8_t {
  kDdp,    // nothing:                            (W + G + 12)·P a rank
  kZero1,  // masters and moments:                (W + G)·P + 12·P/N
  kZero2,  // and gradients (ZeRO-2):             W·P + (G + 12)·P/N
  kFsdp,   // and weights (ZeRO-3): gathered layer by layer, (W + G + 12)·P/N
};
absl::string_view Name(DataParallel kind);  // "ddp", "zero1", "zero2", "fsdp"
absl::StatusOr<DataParallel> ParseDataParallel(absl::string_view name);

struct ParallelOptions {
  DataParallel kind = DataParallel::kDdp;
  int64_t reduction_leaves = 1;  // L: at least the number of ranks
  // ddp, zero1: bytes of gradients or weights in one collective.
  int64_t bucket_bytes = 25 << 20;
  // fsdp: layers whose weights are gathered at once, the one being computed included; 1 gathers
  // nothing ahead. More than 2 use the time in which the head is computed, when there are no
  // gradients to send yet.
  int64_t max_gathered_layers = 4;
  // Ranks that share each copy of the model (tensor and sequence parallelism): they divide the
  // group. L of K sums, a part of the numeric profile: 1 for a model that isn't divided, else a
  // multiple of tensor_parallel.
  int64_t tensor_parallel = 1;
  int64_t k_leaves = 1;

  // Whether gradients leave a rank unit by unit, during the backward pass.
  bool streams_gradients() const {
    return kind == DataParallel::kZero2 || kind == DataParallel::kFsdp;
  }
};

// Who owns which elements of the flat run.
class ShardMap {
 public:
  static constexpr int64_t kBlock = 4096;
  struct Part {
    int64_t begin = 0, end = 0;    // in the flat run
    std::vector<int64_t> counts;   // elements of each rank, whole blocks but for the last
    std::vector<int64_t> offsets;  // where they begin, from `begin`
    std::vector<int64_t> local;    // where they begin in the rank's own elements
    int64_t size() const { return end - begin; }
  };
  ShardMap(const ParameterLayout& layout, int num_ranks);

  const std::vector<Part>& parts() const { return parts_; }
  int64_t PartOf(int64_t offset) const;
  // Parts [first, second) of a unit: one, or those of attention and the MLP's products.
  std::pair<int64_t, int64_t> PartsOf(int64_t unit) const {
    return {first_parts_[unit], first_parts_[unit + 1]};
  }
  int64_t UnitOf(int64_t part) const {
    return std::upper_bound(first_parts_.begin(), first_parts_.end(), part) - first_parts_.begin() -
           1;
  }
  int64_t num_units() const { return static_cast<int64_t>(first_parts_.size()) - 1; }
  int64_t UnitBegin(int64_t unit) const { return parts_[first_parts_[unit]].begin; }
  int64_t UnitSize(int64_t unit) const {
    return parts_[first_parts_[unit + 1] - 1].end - UnitBegin(unit);
  }
  // The elements among [begin, end) that a rank owns, part by part.
  struct Run {
    int64_t begin = 0, count = 0;  // in the flat run
    int64_t local = 0;             // where they begin in the rank's own elements
  };
  std::vector<Run> RunsOf(int rank, int64_t begin, int64_t end) const;
  int64_t owned(int rank) const { return owned_[rank]; }
  int num_ranks() const { return static_cast<int>(owned_.size()); }
  int64_t largest_layer() const;  // elements

 private:
  void AddPart(int64_t begin, int64_t end);

  std::vector<Part> parts_;
  std::vector<int64_t> first_parts_ = {0};  // of units, and one past the last
  std::vector<int64_t> owned_;
};

// Which leaf a micro-batch belongs to, and which rank computes it.
class LeafPlan {
 public:
  LeafPlan(int64_t num_micro_batches, int64_t num_leaves, int num_ranks);

  const std::vector<bool>& used() const { return used_; }
  int64_t num_leaves() const { return static_cast<int64_t>(used_.size()); }
  // Micro-batches [first, second) of a leaf.
  std::pair<int64_t, int64_t> MicroBatchesOf(int64_t leaf) const;
  // Ranks own runs of leaves: those of them that are used, and the fewest nodes they make up.
  std::vector<int64_t> LeavesOf(int rank) const;
  std::vector<SumNode> NodesOfRank(int rank) const;
  // Or ranks take used leaves by turns: in round j rank r has the (j·N + r)-th, or −1.
  int64_t num_rounds() const;
  std::vector<int64_t> Round(int64_t round) const;  // by rank

 private:
  int64_t num_micro_batches_;
  int num_ranks_;
  std::vector<bool> used_;
  std::vector<int64_t> used_leaves_;
};
}  // namespace stretto::engine
