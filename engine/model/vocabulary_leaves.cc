#include "engine/model/vocabulary_leaves.h"

#include "base/check.h"
#include "base/status.h"
#include "engine/collectives/sum_tree.h"
#include "engine/model/leaf_layout.h"

namespace stretto::engine {
namespace {
// The node's sum, in its first leaf's tensor.
void Join(Device& device, Stream& stream, const SumNode& node, const std::vector<Tensor>& sums) {
  if (node.size() == 1) return;
  const auto [left, right] = ChildrenOf(node);
  Join(device, stream, left, sums);
  Join(device, stream, right, sums);
  device.Add(stream, sums[left.begin], sums[left.begin], sums[right.begin]);
}
}  // namespace

absl::StatusOr<std::unique_ptr<VocabularyLeaves>> VocabularyLeaves::Create(Device& device,
                                                                           int64_t k_leaves,
                                                                           int64_t max_rows) {
  std::unique_ptr<VocabularyLeaves> v(new VocabularyLeaves(device, k_leaves));
  if (k_leaves == 1) return v;
  ASSIGN_OR_RETURN(v->max_R_, v->memory_.Make(device, DType::kF32, 1, max_rows));
  v->sums_R3_.resize(static_cast<size_t>(k_leaves));
  for (Tensor& sums : v->sums_R3_) {
    ASSIGN_OR_RETURN(sums, v->memory_.Make(device, DType::kF32, max_rows, 3));
  }
  return v;
}

void VocabularyLeaves::LogProbs(Stream& stream, const Tensor& logprobs_R, const Tensor& entropy_R,
                                const Tensor& logits_RV, const Tensor& targets_R,
                                float temperature) {
  if (k_leaves_ == 1) {
    device_.LogProbs(stream, logprobs_R, entropy_R, logits_RV, targets_R, temperature);
    return;
  }
  const int64_t rows = logits_RV.rows;
  STRETTO_CHECK(rows <= max_R_.cols);
  const Tensor max = max_R_.Cols(0, rows);
  device_.VocabularyMax(stream, max, logits_RV, temperature);
  std::vector<Tensor> sums;
  for (int64_t leaf = 0; leaf < k_leaves_; ++leaf) {
    const int64_t begin = LeafBegin(logits_RV.cols, k_leaves_, leaf);
    const int64_t end = LeafBegin(logits_RV.cols, k_leaves_, leaf + 1);
    sums.push_back(sums_R3_[leaf].Rows(0, rows));
    device_.VocabularySums(stream, sums.back(), logits_RV.Cols(begin, end - begin), max, targets_R,
                           begin, temperature);
  }
  Join(device_, stream, {0, k_leaves_}, sums);
  device_.VocabularyLogProbs(stream, logprobs_R, entropy_R, sums[0]);
}
}  // namespace stretto::engine
