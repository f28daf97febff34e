#include "engine/collectives/sum_tree.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace stretto::engine {
namespace {
void AppendNodes(const SumNode& node, int64_t begin, int64_t end, std::vector<SumNode>& out) {
  if (end <= node.begin || begin >= node.end) return;
  if (begin <= node.begin && node.end <= end) {
    out.push_back(node);
    return;
  }
  const auto [left, right] = ChildrenOf(node);
  AppendNodes(left, begin, end, out);
  AppendNodes(right, begin, end, out);
}
}  // namespace

std::pair<SumNode, SumNode> ChildrenOf(const SumNode& node) {
  STRETTO_CHECK(node.size() > 1);
  const auto half = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(node.size() - 1)));
  return {{node.begin, node.begin + half}, {node.begin + half, node.end}};
}

std::vector<SumNode> NodesOf(int64_t num_leaves, int64_t begin, int64_t end) {
  std::vector<SumNode> nodes;
  if (begin < end) AppendNodes({0, num_leaves}, begin, end, nodes);
  return nodes;
}

TreeSum::TreeSum(std::vector<bool> used, int64_t num_elements)
    : used_(std::move(used)), num_elements_(num_elements), num_used_before_(1, 0) {
  STRETTO_CHECK(!used_.empty() && num_elements >= 0);
  for (const bool u : used_) num_used_before_.push_back(num_used_before_.back() + (u ? 1 : 0));
}

bool TreeSum::AnyUsed(const SumNode& node) const {
  return num_used_before_[node.end] > num_used_before_[node.begin];
}

SumNode TreeSum::Narrowed(SumNode node) const {
  while (node.size() > 1) {
    const auto [left, right] = ChildrenOf(node);
    if (AnyUsed(left) && AnyUsed(right)) return node;
    node = AnyUsed(left) ? left : right;
  }
  return node;
}

std::vector<SumNode> TreeSum::PathTo(const SumNode& node) const {
  std::vector<SumNode> path;
  for (SumNode at = Narrowed(Root()); at != node;) {
    STRETTO_CHECK(at.size() > 1);
    path.push_back(at);
    const auto [left, right] = ChildrenOf(at);
    at = Narrowed(node.begin < left.end ? left : right);
  }
  return path;
}

void TreeSum::AddBorrowed(SumNode node, const float* values) {
  STRETTO_CHECK(node.begin >= 0 && node.end <= Root().end && node.size() > 0);
  if (!AnyUsed(node)) return;
  node = Narrowed(node);
  const std::vector<SumNode> path = PathTo(node);
  if (!path.empty()) {
    const auto children = ChildrenOf(path.back());
    const bool is_left = node.begin < children.first.end;
    const SumNode sibling = Narrowed(is_left ? children.second : children.first);
    const auto it = node_of_.find(sibling.begin);
    if (it != node_of_.end() && it->second == sibling) {
      std::vector<float> sum = std::move(waiting_[sibling.begin]);
      waiting_.erase(sibling.begin);
      node_of_.erase(it);
      bytes_ -= sum.size() * sizeof(float);
      // Either order has the same bits.
      for (int64_t i = 0; i < num_elements_; ++i) sum[i] += values[i];
      Add(path.back(), std::move(sum));
      return;
    }
  }
  Add(node, std::vector<float>(values, values + num_elements_));
}

void TreeSum::Add(SumNode node, std::vector<float> values) {
  STRETTO_CHECK(node.begin >= 0 && node.end <= Root().end && node.size() > 0);
  STRETTO_CHECK(static_cast<int64_t>(values.size()) == num_elements_);
  if (!AnyUsed(node)) return;
  node = Narrowed(node);
  const std::vector<SumNode> path = PathTo(node);
  STRETTO_CHECK(node_of_.emplace(node.begin, node).second);
  bytes_ += values.size() * sizeof(float);
  bytes_max_ = std::max(bytes_max_, bytes_);
  waiting_[node.begin] = std::move(values);
  for (auto parent = path.rbegin(); parent != path.rend(); ++parent) {
    const auto children = ChildrenOf(*parent);
    const SumNode left = Narrowed(children.first), right = Narrowed(children.second);
    const auto l = node_of_.find(left.begin), r = node_of_.find(right.begin);
    if (l == node_of_.end() || r == node_of_.end()) return;
    if (l->second != left || r->second != right) return;
    std::vector<float> sum = std::move(waiting_[left.begin]);
    const std::vector<float>& other = waiting_[right.begin];
    for (int64_t i = 0; i < num_elements_; ++i) sum[i] += other[i];
    bytes_ -= other.size() * sizeof(float);
    for (const int64_t begin : {left.begin, right.begin}) {
      waiting_.erase(begin);
      node_of_.erase(begin);
    }
    waiting_[parent->begin] = std::move(sum);
    node_of_[parent->begin] = *parent;
  }
}

bool TreeSum::complete() const {
  if (!AnyUsed(Root())) return true;
  const SumNode root = Narrowed(Root());
  const auto it = node_of_.find(root.begin);
  return it != node_of_.end() && it->second == root;
}

std::vector<float> TreeSum::Take() {
  STRETTO_CHECK(complete());
  if (!AnyUsed(Root())) return std::vector<float>(num_elements_, 0.0f);
  std::vector<float> sum = std::move(waiting_.begin()->second);
  waiting_.clear();
  node_of_.clear();
  bytes_ = 0;
  return sum;
}
}  // namespace stretto::engine
