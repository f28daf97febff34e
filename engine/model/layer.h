// The operations of one transformer layer and of the head, in the one order that both faces issue.
#pragma once

#include "engine/device/device.h"
#include "engine/formats/model_config.h"
#include "engine/model/weights.h"

namespace stretto::engine {
// What a pass needs beside weights.
struct LayerContext {
  Device& device;
  Stream& stream;
  const ModelConfig& config;
  Tensor positions_T, cos_PC, sin_PC;
  // With weights in several leaves: NumLeafSums of them, f32, of as many rows as a pass has.
  absl::Span<const Tensor> leaf_sums_TD = {};
};

// Tensors of one layer. Those that the backward pass does not need may be shared by all layers, and
// x_in, x_mid and x_out may be the same memory.
struct LayerTensors {
  Tensor x_in_TD;
  Tensor normed_TD;     // either norm's output
  Tensor qkv_TE;        // E = (H + 2G) C: [q | k | v] as projected
  Tensor qk_TE;         // (H + G) C: q and k after their norms; absent without qk_norm
  Tensor attention_TE;  // H C
  Tensor branch_TD;     // what is added to the residual stream
  Tensor x_mid_TD;
  Tensor gate_up_T2F;
  Tensor activated_TF;
  Tensor x_out_TD;
};
// The queries, keys and values that attention sees.
struct Qkv {
  Tensor q, k, v;
};
Qkv AttentionInputs(const ModelConfig& config, const LayerTensors& t);

// Tensors that a sum over so many leaves goes through; 0 for one.
int64_t NumLeafSums(int64_t k_leaves);

// Everything up to the rotated queries and keys.
void RunProjections(const LayerContext& c, const LayerWeights& w, const LayerTensors& t);
// x_mid = x_in + the projected attention.
void RunAttentionOutput(const LayerContext& c, const LayerWeights& w, const LayerTensors& t);
// gate_up from x_mid.
void RunGateUp(const LayerContext& c, const LayerWeights& w, const LayerTensors& t);
// x_out = x_mid + the projected activation.
void RunMlpOutput(const LayerContext& c, const LayerWeights& w, const LayerTensors& t);
// Norms alone, which the backward pass repeats.
void RunInputNorm(const LayerContext& c, const LayerWeights& w, const LayerTensors& t);
void RunMlpNorm(const LayerContext& c, const LayerWeights& w, const LayerTensors& t);

// logits_RV = lm_head · norm(x_RD); normed_RD is scratch.
void RunHead(const LayerContext& c, const ModelWeights& weights, const Tensor& x_RD,
             const Tensor& normed_RD, const Tensor& logits_RV);
}  // namespace stretto::engine
