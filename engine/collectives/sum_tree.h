// Sums in an order that is fixed by the number of leaves alone: a binary tree over leaves [0, L) in
// which a node [a, b) splits at a plus the largest power of two below b − a. Whoever adds which
// leaves, and in which order they arrive, the sum has the same bits. A leaf without a value is left
// out, not added as zero; which leaves have one is part of the order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace stretto::engine {
// Leaves [begin, end), a node of the tree.
struct SumNode {
  int64_t begin = 0, end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const SumNode&, const SumNode&) = default;
};
// Of a node of at least two leaves.
std::pair<SumNode, SumNode> ChildrenOf(const SumNode& node);
// The fewest nodes of the tree over `num_leaves` that make up [begin, end), from left to right.
std::vector<SumNode> NodesOf(int64_t num_leaves, int64_t begin, int64_t end);

// One sum over a tree, element by element, in f32. Partials that can be joined are joined as they
// come. Not thread-safe.
class TreeSum {
 public:
  // `used`: one entry a leaf (at least one), whether it has a value.
  TreeSum(std::vector<bool> used, int64_t num_elements);

  // The sum over the used leaves of `node`; has num_elements values. A node without used leaves is
  // ignored; giving a leaf twice is a bug (STRETTO_CHECK).
  void Add(SumNode node, std::vector<float> values);
  // The same of values that stay the caller's; they are copied only where their sibling isn't
  // there.
  void AddBorrowed(SumNode node, const float* values);
  // Whether every used leaf is in.
  bool complete() const;
  // The whole sum: zeros when no leaf is used. Only when complete(), once: its memory goes along.
  std::vector<float> Take();
  // Bytes of partials that wait for their sibling now, and at most so far.
  size_t bytes() const { return bytes_; }
  size_t bytes_max() const { return bytes_max_; }
  int64_t num_elements() const { return num_elements_; }

 private:
  bool AnyUsed(const SumNode& node) const;
  // The smallest node with the same used leaves.
  SumNode Narrowed(SumNode node) const;
  // Nodes from the root down to a narrowed one that have two used children: where joins may happen.
  std::vector<SumNode> PathTo(const SumNode& node) const;
  SumNode Root() const { return {0, static_cast<int64_t>(used_.size())}; }

  std::vector<bool> used_;
  int64_t num_elements_;
  std::vector<int64_t> num_used_before_;           // prefix sums of used_
  std::map<int64_t, std::vector<float>> waiting_;  // by the first leaf of a narrowed node
  std::map<int64_t, SumNode> node_of_;
  size_t bytes_ = 0, bytes_max_ = 0;
};
}  // namespace stretto::engine
