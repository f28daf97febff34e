#include "engine/model/layer.h"

#include <algorithm>

#include "base/check.h"
#include "engine/collectives/sum_tree.h"
#include "engine/model/leaf_layout.h"

namespace stretto::engine {
namespace {
using Leaves = std::vector<std::shared_ptr<PackedWeight>>;

float Epsilon(const LayerContext& c) { return static_cast<float>(c.config.rms_norm_eps); }

int64_t DepthOf(const SumNode& node) {
  if (node.size() == 1) return 0;
  const auto [left, right] = ChildrenOf(node);
  return 1 + std::max(DepthOf(left), DepthOf(right));
}

// The sum of the node's leaves, in sums[0]; those behind it are used up.
void SumLeaves(const LayerContext& c, const Leaves& leaves, const SumNode& node, const Tensor& x_TK,
               const Tensor& bias_N, absl::Span<const Tensor> sums) {
  const Tensor out = sums[0].Rows(0, x_TK.rows);
  if (node.size() == 1) {
    const auto num_leaves = static_cast<int64_t>(leaves.size());
    const int64_t begin = LeafBegin(x_TK.cols, num_leaves, node.begin);
    const int64_t end = LeafBegin(x_TK.cols, num_leaves, node.end);
    c.device.Linear(c.stream, out, x_TK.Cols(begin, end - begin), *leaves[node.begin],
                    node.begin == 0 ? bias_N : Tensor{});
    return;
  }
  const auto [left, right] = ChildrenOf(node);
  SumLeaves(c, leaves, left, x_TK, bias_N, sums);
  SumLeaves(c, leaves, right, x_TK, bias_N, sums.subspan(1));
  c.device.Add(c.stream, out, out, sums[1].Rows(0, x_TK.rows));
}

// out = residual + W · x + bias, the product in one sum (`branch` is scratch) or leaf by leaf.
struct Residual {
  const Tensor &out, &in, &branch;
};
void AddLinear(const LayerContext& c, const Residual& r, const PackedWeight* weight,
               const Leaves& leaves, const Tensor& x_TK, const Tensor& bias_N) {
  if (leaves.empty()) {
    c.device.Linear(c.stream, r.branch, x_TK, *weight, bias_N);
    c.device.Add(c.stream, r.out, r.in, r.branch);
    return;
  }
  STRETTO_CHECK(!c.leaf_sums_TD.empty());
  SumLeaves(c, leaves, {0, static_cast<int64_t>(leaves.size())}, x_TK, bias_N, c.leaf_sums_TD);
  c.device.Add(c.stream, r.out, r.in, c.leaf_sums_TD[0].Rows(0, x_TK.rows));
}
}  // namespace

int64_t NumLeafSums(int64_t k_leaves) { return k_leaves == 1 ? 0 : 1 + DepthOf({0, k_leaves}); }

Qkv AttentionInputs(const ModelConfig& config, const LayerTensors& t) {
  const int64_t q_cols = config.num_heads * config.head_dim;
  const int64_t kv_cols = config.num_kv_heads * config.head_dim;
  const Tensor& qk = config.qk_norm ? t.qk_TE : t.qkv_TE;
  return {qk.Cols(0, q_cols), qk.Cols(q_cols, kv_cols), t.qkv_TE.Cols(q_cols + kv_cols, kv_cols)};
}

void RunInputNorm(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  c.device.RmsNorm(c.stream, t.normed_TD, t.x_in_TD, w.input_norm, Epsilon(c), 1);
}

void RunMlpNorm(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  c.device.RmsNorm(c.stream, t.normed_TD, t.x_mid_TD, w.post_attention_norm, Epsilon(c), 1);
}

void RunProjections(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  RunInputNorm(c, w, t);
  c.device.Linear(c.stream, t.qkv_TE, t.normed_TD, *w.qkv, w.qkv_bias);
  const Qkv in = AttentionInputs(c.config, t);
  if (c.config.qk_norm) {
    const Tensor q_raw = t.qkv_TE.Cols(0, in.q.cols);
    const Tensor k_raw = t.qkv_TE.Cols(in.q.cols, in.k.cols);
    c.device.RmsNorm(c.stream, in.q, q_raw, w.q_norm, Epsilon(c), c.config.num_heads);
    c.device.RmsNorm(c.stream, in.k, k_raw, w.k_norm, Epsilon(c), c.config.num_kv_heads);
  }
  // Queries and keys stand side by side.
  const Tensor& qk_TE = c.config.qk_norm ? t.qk_TE : t.qkv_TE;
  c.device.Rope(c.stream, qk_TE.Cols(0, in.q.cols + in.k.cols), c.positions_T, c.cos_PC, c.sin_PC,
                c.config.num_heads + c.config.num_kv_heads, /*inverse=*/false);
}

void RunAttentionOutput(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  AddLinear(c, {t.x_mid_TD, t.x_in_TD, t.branch_TD}, w.o.get(), w.o_leaves, t.attention_TE,
            w.o_bias);
}

void RunGateUp(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  RunMlpNorm(c, w, t);
  c.device.Linear(c.stream, t.gate_up_T2F, t.normed_TD, *w.gate_up, w.gate_up_bias);
}

void RunMlpOutput(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  c.device.SwiGlu(c.stream, t.activated_TF, t.gate_up_T2F);
  AddLinear(c, {t.x_out_TD, t.x_mid_TD, t.branch_TD}, w.down.get(), w.down_leaves, t.activated_TF,
            w.down_bias);
}

void RunHead(const LayerContext& c, const ModelWeights& weights, const Tensor& x_RD,
             const Tensor& normed_RD, const Tensor& logits_RV) {
  c.device.RmsNorm(c.stream, normed_RD, x_RD, weights.final_norm, Epsilon(c), 1);
  c.device.Linear(c.stream, logits_RV, normed_RD, *weights.lm_head, Tensor{});
}
}  // namespace stretto::engine
