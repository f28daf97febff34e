// Sums over a tree have the same bits whoever holds which leaves and however they arrive.
#include "engine/collectives/sum_tree.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>

#include "base/testing.h"

namespace stretto::engine {
namespace {
using Leaves = std::vector<std::vector<float>>;

// The definition, word for word.
std::vector<float> SumOf(const Leaves& leaves, const std::vector<bool>& used, SumNode node,
                         bool& any) {
  if (node.size() == 1) {
    any = used[node.begin];
    return leaves[node.begin];
  }
  int64_t half = 1;
  while (half * 2 < node.size()) half *= 2;
  bool any_left = false, any_right = false;
  std::vector<float> left = SumOf(leaves, used, {node.begin, node.begin + half}, any_left);
  const std::vector<float> right = SumOf(leaves, used, {node.begin + half, node.end}, any_right);
  any = any_left || any_right;
  if (!any_left) return right;
  for (size_t i = 0; any_right && i < left.size(); ++i) left[i] += right[i];
  return left;
}

TEST_CASE("a node splits at the largest power of two below its size") {
  CHECK(ChildrenOf({0, 2}) == std::pair{SumNode{0, 1}, SumNode{1, 2}});
  CHECK(ChildrenOf({0, 3}) == std::pair{SumNode{0, 2}, SumNode{2, 3}});
  CHECK(ChildrenOf({4, 8}) == std::pair{SumNode{4, 6}, SumNode{6, 8}});
  CHECK(ChildrenOf({0, 12}) == std::pair{SumNode{0, 8}, SumNode{8, 12}});
  CHECK(NodesOf(8, 0, 8) == std::vector<SumNode>{{0, 8}});
  CHECK(NodesOf(8, 3, 6) == std::vector<SumNode>{{3, 4}, {4, 6}});
  CHECK(NodesOf(8, 5, 5).empty());
}

TEST_CASE("every division of leaves among ranks, in any order, gives the bits of the tree") {
  PhiloxStream random(stretto::testing::Seed(), 70);
  for (int round = 0; round < 200; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const auto L = 1 + static_cast<int64_t>(random.Below(13));
    const auto n = static_cast<int64_t>(random.Below(5));
    Leaves leaves(L);
    std::vector<bool> used(L);
    for (int64_t l = 0; l < L; ++l) {
      used[l] = random.Below(4) != 0;
      for (int64_t i = 0; i < n; ++i) {
        leaves[l].push_back(static_cast<float>(random.NextGaussian() * 1e3));
      }
    }
    bool any = false;
    std::vector<float> expected = SumOf(leaves, used, {0, L}, any);
    if (!any) expected.assign(n, 0.0f);

    // Ranks with contiguous leaves, their partials made by trees of their own.
    std::vector<SumNode> nodes;
    for (int64_t begin = 0; begin < L;) {
      const int64_t end = begin + 1 + static_cast<int64_t>(random.Below(L - begin));
      for (const SumNode& node : NodesOf(L, begin, end)) nodes.push_back(node);
      begin = end;
    }
    for (size_t i = nodes.size(); i > 1; --i) std::swap(nodes[i - 1], nodes[random.Below(i)]);
    TreeSum sum(used, n);
    CHECK(sum.complete() == !any);
    for (const SumNode& node : nodes) {
      bool any_here = false;
      std::vector<float> part = SumOf(leaves, used, node, any_here);
      if (!any_here) continue;
      if (random.Below(2) == 0) {
        sum.AddBorrowed(node, part.data());
        part.assign(part.size(), 0.0f);  // not read any more
      } else {
        sum.Add(node, std::move(part));
      }
    }
    REQUIRE(sum.complete());
    const std::vector<float> got = sum.Take();
    REQUIRE(got.size() == expected.size());
    CHECK((n == 0 || std::memcmp(got.data(), expected.data(), n * sizeof(float)) == 0));
  }
}

TEST_CASE("leaves that come in order hold at most one partial for each level of the tree") {
  TreeSum sum(std::vector<bool>(16, true), 100);
  for (int64_t l = 0; l < 16; ++l) sum.Add({l, l + 1}, std::vector<float>(100, 1.0f));
  CHECK(sum.bytes() == 100 * sizeof(float));
  CHECK(sum.Take()[99] == 16.0f);
  CHECK(sum.bytes() == 0);
  CHECK(sum.bytes_max() == 5 * 100 * sizeof(float));
}
}  // namespace
}  // namespace stretto::engine
