#include "engine/model/layer.h"

namespace stretto::engine {
namespace {
float Epsilon(const LayerContext& c) { return static_cast<float>(c.config.rms_norm_eps); }
}  // namespace

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
  c.device.Linear(c.stream, t.branch_TD, t.attention_TE, *w.o, w.o_bias);
  c.device.Add(c.stream, t.x_mid_TD, t.x_in_TD, t.branch_TD);
}

void RunGateUp(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  RunMlpNorm(c, w, t);
  c.device.Linear(c.stream, t.gate_up_T2F, t.normed_TD, *w.gate_up, w.gate_up_bias);
}

void RunMlpOutput(const LayerContext& c, const LayerWeights& w, const LayerTensors& t) {
  c.device.SwiGlu(c.stream, t.activated_TF, t.gate_up_T2F);
  c.device.Linear(c.stream, t.branch_TD, t.activated_TF, *w.down, w.down_bias);
  c.device.Add(c.stream, t.x_out_TD, t.x_mid_TD, t.branch_TD);
}

void RunHead(const LayerContext& c, const ModelWeights& weights, const Tensor& x_RD,
             const Tensor& normed_RD, const Tensor& logits_RV) {
  c.device.RmsNorm(c.stream, normed_RD, x_RD, weights.final_norm, Epsilon(c), 1);
  c.device.Linear(c.stream, logits_RV, normed_RD, *weights.lm_head, Tensor{});
}
}  // namespace stretto::engine
