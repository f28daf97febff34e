// Backward direction of the training face. Activations that are cheap to have again (norms, the
// MLP's product) are computed again; with checkpointing
// the MLP's first product is, or a whole layer from its input.
#include <algorithm>

#include "engine/model/lora.h"
#include "engine/model/packed_state.h"

namespace stretto::engine {
void PackedPass::Backward(Stream& stream, const ModelWeights& weights,
                          const ParameterLayout& layout, const Tensor& flat_weights,
                          const Tensor& gradients, absl::Span<const float> d_logprobs_N,
                          absl::Span<const float> d_entropy_N) {
  State& s = *state_;
  STRETTO_CHECK_MSG(options_.train && s.batch != nullptr, "Backward without a Forward before it");
  const int64_t T = s.batch->num_rows(), N = s.batch->num_targets();
  STRETTO_CHECK(static_cast<int64_t>(d_logprobs_N.size()) == N);
  STRETTO_CHECK(d_entropy_N.empty() || static_cast<int64_t>(d_entropy_N.size()) == N);
  if (options_.units == nullptr) {
    const ParameterLayout& of_gradients = options_.lora ? *options_.lora->layout() : layout;
    STRETTO_CHECK(gradients.dtype == DType::kF32 && gradients.size() == of_gradients.size());
  }
  const LayerContext c = Context(stream, T);
  GradientContext g{weights, layout, {flat_weights, gradients}, {flat_weights, gradients}};
  c.device.Fill(stream, s.d_x_TD.Rows(0, T), 0.0f);
  BackwardHead(c, g, d_logprobs_N, d_entropy_N);
  for (auto l = static_cast<int64_t>(s.layers.size()) - 1; l >= 0; --l) {
    const LayerTensors t = FirstRows(s.layers[l], T);
    Enter(g, 1 + l);
    if (options_.checkpointing == Checkpointing::kFull) {
      RunProjections(c, weights.layers[l], t);
      c.device.Attention(stream, AttentionOf(t));
      RunAttentionOutput(c, weights.layers[l], t);
    }
    if (options_.checkpointing != Checkpointing::kNone) RunGateUp(c, weights.layers[l], t);
    BackwardMlp(c, g, l, t);
    BackwardAttention(c, g, l, t);
    Leave(1 + l);
  }
  const bool tied = layout.lm_head.offset == layout.embedding.offset;
  if (tied) {
    g.unit = g.head;
  } else {
    Enter(g, 0);
  }
  const bool taken = options_.units != nullptr && options_.units->TakeLookups(s.d_x_TD.Rows(0, T));
  if (options_.lora == nullptr && !taken) {
    c.device.EmbeddingBackward(stream, layout.embedding.In(g.unit.gradients), s.d_x_TD.Rows(0, T),
                               s.ids_T.Cols(0, T));
  }
  Leave(0);
  c.device.Synchronize(stream);
  s.batch = nullptr;
}

void PackedPass::BackwardLinear(const LayerContext& c, const GradientContext& g,
                                const LinearGroup& map, const Tensor& d_x_TK, const Tensor& d_y_TN,
                                const Tensor& x_TK) const {
  const Tensor d_y = ForProducts(c, d_y_TN);
  BackwardWeight(c, g, map, d_y, d_y_TN, x_TK);
  BackwardInput(c, g, map, d_x_TK, d_y);
}

void PackedPass::BackwardWeight(const LayerContext& c, const GradientContext& g,
                                const LinearGroup& map, const Tensor& d_y_of_products_TN,
                                const Tensor& d_y_TN, const Tensor& x_TK) const {
  if (options_.lora != nullptr) {
    options_.lora->AddGradients(c.stream, map.layer, map.group, g.unit.gradients, d_y_TN, x_TK);
    return;
  }
  c.device.LinearBackwardWeight(c.stream, map.weight.In(g.unit.gradients), d_y_of_products_TN,
                                x_TK);
  if (map.bias) c.device.BiasBackward(c.stream, map.bias.In(g.unit.gradients), d_y_TN);
}

void PackedPass::BackwardInput(const LayerContext& c, const GradientContext& g,
                               const LinearGroup& map, const Tensor& d_x_TK,
                               const Tensor& d_y_TN) const {
  c.device.LinearBackwardInput(c.stream, d_x_TK, d_y_TN, map.weight.In(g.unit.flat_weights),
                               /*accumulate=*/false);
}

Tensor PackedPass::ForProducts(const LayerContext& c, const Tensor& d_y_TN) const {
  if (d_y_TN.dtype == options_.gradient_dtype) return d_y_TN;
  const Tensor rounded = state_->d_rounded.Cols(0, d_y_TN.size()).Reshape(d_y_TN.rows);
  c.device.Copy(c.stream, rounded, d_y_TN);
  return rounded;
}

Tensor PackedPass::GateUpGradient(const ParameterView& bias, int64_t rows) const {
  Tensor d = state_->d_gate_up_T2F.Rows(0, rows);
  if (options_.lora == nullptr && !bias) d.dtype = options_.gradient_dtype;
  return d;
}

Tensor PackedPass::NormGradient(const GradientContext& g, const ParameterView& norm) const {
  return options_.lora != nullptr ? options_.lora->Unwanted(norm.cols) : norm.In(g.unit.gradients);
}

void PackedPass::Enter(GradientContext& g, int64_t unit) const {
  if (options_.units != nullptr) g.unit = options_.units->BeforeBackward(unit);
}

void PackedPass::Leave(int64_t unit) const {
  if (options_.units != nullptr) options_.units->AfterBackward(unit);
}

void PackedPass::BackwardHead(const LayerContext& c, GradientContext& g,
                              absl::Span<const float> d_logprobs_N,
                              absl::Span<const float> d_entropy_N) {
  State& s = *state_;
  const int64_t N = s.batch->num_targets();
  const auto last_unit = static_cast<int64_t>(s.layers.size()) + 1;
  if (g.layout.lm_head.offset == g.layout.embedding.offset) {
    Enter(g, 0);
    g.head = g.unit;
    Enter(g, last_unit);
  } else {
    Enter(g, last_unit);
    g.head = g.unit;
  }
  for (int64_t begin = 0; begin < N; begin += s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, N - begin);
    if (begin > 0) RunHeadChunk(c, g.weights, begin, count);  // the first is there (Forward)
    if (c.config.value_head) {  // its outputs are what the gradients are by
      c.device.Upload(c.stream, s.logits_RV.Rows(0, count), &d_logprobs_N[begin]);
      BackwardHeadChunk(c, g, begin, count, Tensor{});
      continue;
    }
    c.device.Upload(c.stream, s.d_logprobs_R.Cols(0, count), &d_logprobs_N[begin]);
    Tensor d_entropy;
    if (!d_entropy_N.empty()) {
      d_entropy = s.d_entropy_R.Cols(0, count);
      c.device.Upload(c.stream, d_entropy, &d_entropy_N[begin]);
    }
    BackwardHeadChunk(c, g, begin, count, d_entropy);
  }
  Leave(last_unit);
}

void PackedPass::BackwardHeadChunk(const LayerContext& c, const GradientContext& g, int64_t begin,
                                   int64_t count, const Tensor& d_entropy) {
  State& s = *state_;
  const Tensor logits = s.logits_RV.Rows(0, count);
  const Tensor d_normed = s.d_normed_RD.Rows(0, count), d_last = s.d_last_RD.Rows(0, count);
  Tensor d_logits = logits;                       // overwrites them
  if (options_.gradient_dtype == DType::kBF16) {  // rounded where they are
    d_logits.dtype = DType::kBF16;
    d_logits.row_stride *= 2;
  }
  if (c.config.value_head) {
    if (d_logits.dtype == DType::kBF16) c.device.Copy(c.stream, d_logits, logits);
  } else {
    Device::LogitsGradient gradient{logits,
                                    d_logits,
                                    s.d_logprobs_R.Cols(0, count),
                                    d_entropy,
                                    s.targets_N.Cols(begin, count),
                                    options_.temperature,
                                    {}};
    if (begin == 0 && (s.stats_have_entropy || !d_entropy)) {
      gradient.stats_T3 = s.stats_R3.Rows(0, count);
    }
    c.device.LogProbsBackward(c.stream, gradient);
  }
  const bool tied = g.layout.lm_head.offset == g.layout.embedding.offset;
  if (options_.units != nullptr && tied && begin + count == s.batch->num_targets()) {
    BackwardTiedHead(c, g, d_logits, s.normed_RD.Rows(0, count));
  } else if (options_.lora == nullptr) {
    c.device.LinearBackwardWeight(c.stream, g.layout.lm_head.In(g.head.gradients), d_logits,
                                  s.normed_RD.Rows(0, count));
  }
  c.device.LinearBackwardInput(c.stream, d_normed, d_logits,
                               g.layout.lm_head.In(g.head.flat_weights), /*accumulate=*/false);
  c.device.RmsNormBackward(c.stream, d_last, NormGradient(g, g.layout.final_norm), d_normed,
                           s.last_RD.Rows(0, count), g.weights.final_norm,
                           static_cast<float>(c.config.rms_norm_eps), 1, /*accumulate=*/false);
  // A row may be the source of several targets: the scatter of an embedding's gradient allows that.
  c.device.EmbeddingBackward(c.stream, s.d_x_TD.Rows(0, s.batch->num_rows()), d_last,
                             s.target_rows_N.Cols(begin, count));
}

// The last chunk's part of the weight's gradient, after which it is done.
void PackedPass::BackwardTiedHead(const LayerContext& c, const GradientContext& g,
                                  const Tensor& d_logits_RV, const Tensor& normed_RD) {
  std::vector<std::vector<ParameterUnits::Rows>> pieces = options_.units->TiedHeadPieces();
  if (pieces.empty()) pieces = {{{0, g.layout.lm_head.rows}}};
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    for (const auto& [begin, end] : pieces[piece]) {
      if (options_.lora != nullptr || begin == end) continue;
      c.device.LinearBackwardWeight(c.stream,
                                    g.layout.lm_head.In(g.head.gradients).Rows(begin, end - begin),
                                    d_logits_RV.Cols(begin, end - begin), normed_RD);
    }
    options_.units->AfterTiedHeadBackward(static_cast<int64_t>(piece));
  }
}

// d_x arrives as the gradient of x_out and leaves as that of x_mid.
void PackedPass::BackwardMlp(const LayerContext& c, const GradientContext& g, int64_t layer,
                             const LayerTensors& t) {
  State& s = *state_;
  const int64_t T = t.x_in_TD.rows;
  const LayerParameters& p = g.layout.layers[layer];
  const Tensor d_x = s.d_x_TD.Rows(0, T), d_normed = s.d_normed_TD.Rows(0, T);
  const Tensor d_activated = s.d_activated_TF.Rows(0, T);
  const Tensor d_gate_up = GateUpGradient(p.gate_up_bias, T);
  const LinearGroup down{layer, LoraGroup::kDown, p.down, p.down_bias};
  const Tensor d_out = ForProducts(c, d_x);
  BackwardInput(c, g, down, d_activated, d_out);
  c.device.SwiGluBackward(c.stream, d_gate_up, t.activated_TF, d_activated, t.gate_up_T2F);
  BackwardWeight(c, g, down, d_out, d_x, t.activated_TF);
  using MlpPart = ParameterUnits::MlpPart;
  const auto done = [&](MlpPart part) {
    if (options_.units != nullptr) options_.units->AfterMlpBackward(1 + layer, part);
  };
  if (!p.gate_up_bias) done(MlpPart::kDown);
  RunMlpNorm(c, g.weights.layers[layer], t);
  const LinearGroup gate_up{layer, LoraGroup::kGateUp, p.gate_up, p.gate_up_bias};
  const Tensor d_gate_up_of_products = ForProducts(c, d_gate_up);
  BackwardWeight(c, g, gate_up, d_gate_up_of_products, d_gate_up, t.normed_TD);
  if (p.gate_up_bias) done(MlpPart::kDown);
  done(MlpPart::kGateUp);
  BackwardInput(c, g, gate_up, d_normed, d_gate_up_of_products);
  c.device.RmsNormBackward(c.stream, d_x, NormGradient(g, p.post_attention_norm), d_normed,
                           t.x_mid_TD, g.weights.layers[layer].post_attention_norm,
                           static_cast<float>(c.config.rms_norm_eps), 1, /*accumulate=*/true);
}

// d_x arrives as the gradient of x_mid and leaves as that of x_in.
void PackedPass::BackwardAttention(const LayerContext& c, const GradientContext& g, int64_t layer,
                                   const LayerTensors& t) {
  State& s = *state_;
  const int64_t T = t.x_in_TD.rows, H = c.config.num_heads, G = c.config.num_kv_heads;
  const int64_t q_cols = H * c.config.head_dim, kv_cols = G * c.config.head_dim;
  const LayerParameters& p = g.layout.layers[layer];
  const LayerWeights& w = g.weights.layers[layer];
  const auto eps = static_cast<float>(c.config.rms_norm_eps);
  const Tensor d_x = s.d_x_TD.Rows(0, T), d_normed = s.d_normed_TD.Rows(0, T);
  const Tensor d_qkv = s.d_qkv_TE.Rows(0, T);
  BackwardLinear(c, g, {layer, LoraGroup::kO, p.o, p.o_bias}, s.d_attention_TE.Rows(0, T), d_x,
                 t.attention_TE);

  PackedAttentionBackward attention;
  attention.forward = AttentionOf(t);
  attention.d_out = s.d_attention_TE.Rows(0, T);
  const Tensor d_qk = c.config.qk_norm ? s.d_qk_TE.Rows(0, T) : d_qkv;
  attention.d_q = d_qk.Cols(0, q_cols);
  attention.d_k = d_qk.Cols(q_cols, kv_cols);
  attention.d_v = d_qkv.Cols(q_cols + kv_cols, kv_cols);
  c.device.AttentionBackward(c.stream, attention);
  for (const auto& [d, heads] : {std::pair{attention.d_q, H}, std::pair{attention.d_k, G}}) {
    c.device.Rope(c.stream, d, c.positions_T, c.cos_PC, c.sin_PC, heads, /*inverse=*/true);
  }
  if (c.config.qk_norm) {
    c.device.RmsNormBackward(c.stream, d_qkv.Cols(0, q_cols), NormGradient(g, p.q_norm),
                             attention.d_q, t.qkv_TE.Cols(0, q_cols), w.q_norm, eps, H, false);
    c.device.RmsNormBackward(c.stream, d_qkv.Cols(q_cols, kv_cols), NormGradient(g, p.k_norm),
                             attention.d_k, t.qkv_TE.Cols(q_cols, kv_cols), w.k_norm, eps, G,
                             false);
  }
  RunInputNorm(c, w, t);
  BackwardLinear(c, g, {layer, LoraGroup::kQkv, p.qkv, p.qkv_bias}, d_normed, d_qkv, t.normed_TD);
  c.device.RmsNormBackward(c.stream, d_x, NormGradient(g, p.input_norm), d_normed, t.x_in_TD,
                           w.input_norm, eps, 1, /*accumulate=*/true);
}
}  // namespace stretto::engine
