#include "engine/training/parallel.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr DataParallel kKinds[] = {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2,
                                   DataParallel::kFsdp};
}  // namespace

absl::string_view Name(DataParallel kind) {
  switch (kind) {
    case DataParallel::kDdp:
      return "ddp";
    case DataParallel::kZero1:
      return "zero1";
    case DataParallel::kZero2:
      return "zero2";
    case DataParallel::kFsdp:
      return "fsdp";
  }
  return "?";
}

absl::StatusOr<DataParallel> ParseDataParallel(absl::string_view name) {
  for (const DataParallel kind : kKinds) {
    if (name == Name(kind)) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("data parallelism: expected ddp, zero1, zero2 or fsdp, found '", name, "'"));
}

static_assert(kLeafAlignment % ShardMap::kBlock == 0);  // a block is of one leaf

ShardMap::ShardMap(const ParameterLayout& layout, int num_ranks) : owned_(num_ranks, 0) {
  std::vector<int64_t> begins = {0};
  for (const LayerParameters& l : layout.layers) begins.push_back(l.input_norm.offset);
  begins.push_back(layout.final_norm.offset);
  begins.push_back(layout.size());
  for (size_t u = 0; u + 1 < begins.size(); ++u) {
    const int64_t begin = begins[u], end = begins[u + 1];
    const bool is_layer = u > 0 && u <= layout.layers.size() && !layout.has_leaves();
    int64_t gate_up = begin, down = begin;
    if (is_layer && layout.layers[u - 1].gate_up && layout.layers[u - 1].down) {
      const auto cut = [begin](const ParameterView& view) {
        return begin + (view.offset - begin + kBlock - 1) / kBlock * kBlock;
      };
      gate_up = cut(layout.layers[u - 1].gate_up);
      down = cut(layout.layers[u - 1].down);
    }
    const int64_t least = num_ranks * kBlock;  // of a part: a block for each
    const bool splits =
        num_ranks > 1 && gate_up - begin >= least && down - gate_up >= least && end - down >= least;
    if (splits) {
      AddPart(begin, gate_up);
      AddPart(gate_up, down);
    }
    AddPart(splits ? down : begin, end);
    first_parts_.push_back(static_cast<int64_t>(parts_.size()));
  }
}

void ShardMap::AddPart(int64_t begin, int64_t end) {
  Part part{begin, end, {}, {}, {}};
  const int num_ranks = this->num_ranks();
  const int64_t blocks = (part.size() + kBlock - 1) / kBlock;
  // Those that own the least so far have the remainder, so that all own about the same.
  std::vector<int> by_owned(num_ranks);
  std::iota(by_owned.begin(), by_owned.end(), 0);
  std::stable_sort(by_owned.begin(), by_owned.end(),
                   [this](int a, int b) { return owned_[a] < owned_[b]; });
  std::vector<int64_t> blocks_of(num_ranks, blocks / num_ranks);
  for (int64_t i = 0; i < blocks % num_ranks; ++i) ++blocks_of[by_owned[i]];
  int64_t offset = 0;
  for (int r = 0; r < num_ranks; ++r) {
    const int64_t count = std::min(blocks_of[r] * kBlock, part.size() - offset);
    part.counts.push_back(count);
    part.offsets.push_back(offset);
    part.local.push_back(owned_[r]);
    owned_[r] += count;
    offset += count;
  }
  STRETTO_CHECK(offset == part.size());
  parts_.push_back(std::move(part));
}

int64_t ShardMap::PartOf(int64_t offset) const {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), offset,
                                      [](int64_t o, const Part& p) { return o < p.begin; });
  return after - parts_.begin() - 1;
}

std::vector<ShardMap::Run> ShardMap::RunsOf(int rank, int64_t begin, int64_t end) const {
  std::vector<Run> runs;
  for (int64_t p = PartOf(begin); begin < end && p <= PartOf(end - 1); ++p) {
    const int64_t owned = parts_[p].begin + parts_[p].offsets[rank];
    const int64_t from = std::max(owned, begin), to = std::min(owned + parts_[p].counts[rank], end);
    if (from < to) runs.push_back({from, to - from, parts_[p].local[rank] + from - owned});
  }
  return runs;
}

int64_t ShardMap::largest_layer() const {
  int64_t largest = 0;
  for (int64_t u = 1; u + 1 < num_units(); ++u) largest = std::max(largest, UnitSize(u));
  return largest;
}

LeafPlan::LeafPlan(int64_t num_micro_batches, int64_t num_leaves, int num_ranks)
    : num_micro_batches_(num_micro_batches), num_ranks_(num_ranks), used_(num_leaves, false) {
  STRETTO_CHECK(num_micro_batches > 0 && num_leaves >= num_ranks && num_ranks > 0);
  for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
    const auto [begin, end] = MicroBatchesOf(leaf);
    used_[leaf] = begin < end;
    if (begin < end) used_leaves_.push_back(leaf);
  }
}

// i·L/M ≥ leaf exactly when i ≥ leaf·M/L, rounded up.
std::pair<int64_t, int64_t> LeafPlan::MicroBatchesOf(int64_t leaf) const {
  const int64_t L = num_leaves(), M = num_micro_batches_;
  return {(leaf * M + L - 1) / L, ((leaf + 1) * M + L - 1) / L};
}

std::vector<int64_t> LeafPlan::LeavesOf(int rank) const {
  const int64_t L = num_leaves();
  std::vector<int64_t> leaves;
  for (int64_t leaf = rank * L / num_ranks_; leaf < (rank + 1) * L / num_ranks_; ++leaf) {
    if (used_[leaf]) leaves.push_back(leaf);
  }
  return leaves;
}

std::vector<SumNode> LeafPlan::NodesOfRank(int rank) const {
  const int64_t L = num_leaves();
  std::vector<SumNode> nodes = NodesOf(L, rank * L / num_ranks_, (rank + 1) * L / num_ranks_);
  std::erase_if(nodes, [this](const SumNode& n) {
    return std::none_of(used_.begin() + n.begin, used_.begin() + n.end, [](bool u) { return u; });
  });
  return nodes;
}

int64_t LeafPlan::num_rounds() const {
  return (static_cast<int64_t>(used_leaves_.size()) + num_ranks_ - 1) / num_ranks_;
}

std::vector<int64_t> LeafPlan::Round(int64_t round) const {
  std::vector<int64_t> leaves(num_ranks_, -1);
  for (int r = 0; r < num_ranks_; ++r) {
    const auto i = static_cast<size_t>(round * num_ranks_ + r);
    if (i < used_leaves_.size()) leaves[r] = used_leaves_[i];
  }
  return leaves;
}
}  // namespace stretto::engine
