#include "engine/training/leaf_group.h"

#include <algorithm>

#include "base/check.h"

namespace stretto::engine {
namespace {
// Joins of a path from a node to its leaves.
int64_t DepthOf(const SumNode& node) {
  if (node.size() == 1) return 0;
  const auto [left, right] = ChildrenOf(node);
  return 1 + std::max(DepthOf(left), DepthOf(right));
}

std::vector<int64_t> Times(std::vector<int64_t> rows, int64_t cols) {
  for (int64_t& r : rows) r *= cols;
  return rows;
}
int64_t Total(const std::vector<int64_t>& rows) {
  int64_t total = 0;
  for (const int64_t r : rows) total += r;
  return total;
}
}  // namespace

LeafRange LeavesOfRank(int64_t num_leaves, int num_ranks, int rank) {
  STRETTO_CHECK(num_leaves % num_ranks == 0);
  const int64_t each = num_leaves / num_ranks;
  return {num_leaves, rank * each, (rank + 1) * each};
}

LeafGroup::LeafGroup(Device& device, Stream& stream, Communicator* communicator, int64_t num_leaves)
    : device_(device),
      stream_(stream),
      communicator_(communicator),
      leaves_(LeavesOfRank(num_leaves, size(), rank())),
      nodes_(NodesOf(num_leaves, leaves_.begin, leaves_.end)) {}

std::vector<int64_t> LeafGroup::RowsOfRanks(int64_t num_rows) const {
  std::vector<int64_t> rows(size());
  for (int r = 0; r < size(); ++r) {
    const LeafRange leaves = LeavesOf(r);
    rows[r] = RowBegin(num_rows, leaves.end) - RowBegin(num_rows, leaves.begin);
  }
  return rows;
}

int64_t LeafGroup::num_sum_buffers() const {
  int64_t depth = 0;
  for (const SumNode& node : nodes_) depth = std::max(depth, DepthOf(node));
  return static_cast<int64_t>(nodes_.size()) + depth;
}

void LeafGroup::Run(CollectiveCall call) {
  if (!status_.ok()) return;
  device_.Synchronize(stream_);
  status_ = communicator_->Start(std::move(call)).Wait();
}

void LeafGroup::SumNodeInto(const SumNode& node, const Tensor& out, absl::Span<const Tensor> spare,
                            const ComputeLeaf& compute) {
  if (node.size() == 1) {
    compute(node.begin, out);
    return;
  }
  const auto [left, right] = ChildrenOf(node);
  SumNodeInto(left, out, spare, compute);
  SumNodeInto(right, spare[0], spare.subspan(1), compute);
  device_.Add(stream_, out, out, spare[0]);
}

CollectiveCall LeafGroup::SumCall(CollectiveKind kind, const std::vector<Tensor>& nodes) const {
  CollectiveCall call;
  call.kind = kind;
  call.dtype = DType::kF32;
  call.num_elements = nodes[0].size();
  call.plan.used.assign(leaves_.num_leaves, true);
  for (int r = 0; r < size(); ++r) {
    const LeafRange leaves = LeavesOf(r);
    call.plan.nodes_of_rank.push_back(NodesOf(leaves_.num_leaves, leaves.begin, leaves.end));
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    call.parts.push_back({nodes_[i], device_.HostMemory(nodes[i])});
    STRETTO_CHECK(call.parts.back().data != nullptr);
  }
  return call;
}

Tensor LeafGroup::SumLeaves(const std::vector<int64_t>& rows_of_rank,
                            const std::vector<Tensor>& buffers, const Tensor& mine,
                            const ComputeLeaf& compute) {
  const int64_t rows = Total(rows_of_rank);
  std::vector<Tensor> views;
  for (const Tensor& buffer : buffers) views.push_back(buffer.Rows(0, rows));
  STRETTO_CHECK(static_cast<int64_t>(views.size()) >= num_sum_buffers());
  const auto spare = absl::MakeConstSpan(views).subspan(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) SumNodeInto(nodes_[i], views[i], spare, compute);
  if (alone()) return views[0];
  CollectiveCall call = SumCall(CollectiveKind::kReduceScatter, views);
  call.counts = Times(rows_of_rank, mine.cols);
  const Tensor out = mine.Rows(0, rows_of_rank[rank()]);
  call.output = device_.HostMemory(out);
  Run(std::move(call));
  return out;
}

void LeafGroup::SumPartials(std::vector<Tensor> partials) {
  STRETTO_CHECK(static_cast<int64_t>(partials.size()) == leaves_.size());
  const std::function<void(const SumNode&)> join = [&](const SumNode& node) {
    if (node.size() == 1) return;
    const auto [left, right] = ChildrenOf(node);
    join(left);
    join(right);
    const Tensor& sum = partials[left.begin - leaves_.begin];
    device_.Add(stream_, sum, sum, partials[right.begin - leaves_.begin]);
  };
  std::vector<Tensor> nodes;
  for (const SumNode& node : nodes_) {
    join(node);
    nodes.push_back(partials[node.begin - leaves_.begin]);
  }
  if (alone()) return;
  CollectiveCall call = SumCall(CollectiveKind::kAllReduce, nodes);
  call.output = device_.HostMemory(partials[0]);
  Run(std::move(call));
}

Tensor LeafGroup::GatherRows(const std::vector<int64_t>& rows_of_rank, const Tensor& all,
                             const Tensor& mine) {
  if (alone()) return mine;
  const Tensor out = all.Rows(0, Total(rows_of_rank));
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.dtype = mine.dtype;
  call.counts = Times(rows_of_rank, mine.cols);
  call.num_elements = mine.size();
  call.input = device_.HostMemory(mine);
  call.output = device_.HostMemory(out);
  Run(std::move(call));
  return out;
}

Tensor LeafGroup::ExchangeRows(const std::vector<int64_t>& to, const std::vector<int64_t>& from,
                               const Tensor& theirs, const Tensor& mine) {
  if (alone()) return mine;
  const Tensor out = theirs.Rows(0, Total(from));
  CollectiveCall call;
  call.kind = CollectiveKind::kAllToAll;
  call.dtype = mine.dtype;
  call.counts = Times(to, mine.cols);
  call.receive_counts = Times(from, mine.cols);
  call.num_elements = mine.size();
  call.input = device_.HostMemory(mine);
  call.output = device_.HostMemory(out);
  Run(std::move(call));
  return out;
}

void LeafGroup::Max(const Tensor& values) {
  if (alone()) return;
  const auto n = static_cast<size_t>(values.size());
  std::vector<float> all(n * static_cast<size_t>(size())), largest(n);
  device_.Download(stream_, values, largest.data());
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.dtype = DType::kF32;
  call.num_elements = values.size();
  call.input = largest.data();
  call.output = all.data();
  Run(std::move(call));
  for (size_t i = 0; i < n; ++i) {
    largest[i] = all[i];
    for (size_t j = i + n; j < all.size(); j += n) {
      if (all[j] > largest[i] || all[j] != all[j]) largest[i] = all[j];  // a NaN is kept
    }
  }
  device_.Upload(stream_, values, largest.data());
}
}  // namespace stretto::engine
