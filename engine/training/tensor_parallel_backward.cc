// Backward direction of the pass over leaves. As in model/backward.cc norms and the MLP's product
// are computed again; with any checkpointing a whole layer is, from
// its input.
#include <algorithm>

#include "base/status.h"
#include "engine/training/tensor_parallel_state.h"

namespace stretto::engine {
absl::Status TensorParallelPass::AllocateGradients() {
  State& s = *state_;
  const LeafRange& leaves = group_.leaves();
  const int64_t T = options_.max_rows, N = options_.max_targets, D = config().hidden_size;
  const int64_t C = config().head_dim;
  int64_t q_cols = 0, kv_cols = 0, mlp_cols = 0;
  for (int64_t leaf = leaves.begin; leaf < leaves.end; ++leaf) {
    q_cols = std::max(q_cols, Slice(leaf).num_heads * C);
    kv_cols = std::max(kv_cols, Slice(leaf).num_kv_heads * C);
    mlp_cols = std::max(mlp_cols, Slice(leaf).mlp_cols);
  }
  const ParameterLayout layout(config(), leaves);
  int64_t common = 0;
  for (int64_t unit = 0; unit < config().num_layers + 2; ++unit) {
    common = std::max(common, layout.common_size(unit));
  }
  struct Wish {
    Tensor* tensor;
    int64_t rows, cols;
  };
  std::vector<Wish> wishes = {{&s.d_x_tD, s.max_mine, D},
                              {&s.d_norm_tD, s.max_mine, D},
                              {&s.d_qkv_TE, T, q_cols + 2 * kv_cols},
                              {&s.d_attention_TE, T, q_cols},
                              {&s.d_gate_up_T2F, T, 2 * mlp_cols},
                              {&s.d_activated_TF, T, mlp_cols},
                              {&s.d_logprobs_N, 1, N},
                              {&s.d_entropy_N, 1, N}};
  if (config().qk_norm) wishes.push_back({&s.d_qk_TE, T, q_cols + kv_cols});
  if (!group_.alone()) wishes.push_back({&s.d_x_TD, T, D});
  s.partials.resize(leaves.size());
  for (Tensor& t : s.partials) wishes.push_back({&t, 1, common});
  for (const Wish& w : wishes) {
    ASSIGN_OR_RETURN(*w.tensor, s.memory.Make(device_, DType::kF32, w.rows, w.cols));
  }
  return absl::OkStatus();
}

void TensorParallelPass::Backward(Stream& stream, const ModelWeights& weights,
                                  const ParameterLayout& layout, const Tensor& flat_weights,
                                  const Tensor& gradients, absl::Span<const float> d_logprobs_N,
                                  absl::Span<const float> d_entropy_N) {
  State& s = *state_;
  STRETTO_CHECK_MSG(options_.train && s.batch != nullptr, "Backward without a Forward before it");
  STRETTO_CHECK(&stream == &stream_ && layout.leaves().begin == group_.leaves().begin);
  const auto N = static_cast<size_t>(s.batch->num_targets());
  STRETTO_CHECK(d_logprobs_N.size() == N && (d_entropy_N.empty() || d_entropy_N.size() == N));
  Gradients g{weights, layout, {flat_weights, gradients}, {flat_weights, gradients}};
  device_.Fill(stream_, Mine(s.d_x_tD), 0.0f);
  BackwardHead(g, d_logprobs_N, d_entropy_N);
  for (auto l = static_cast<int64_t>(s.layers.size()) - 1; l >= 0; --l) {
    Enter(g, 1 + l);
    if (options_.checkpointing != Checkpointing::kNone) {
      ForwardAttention(weights.layers[l], s.layers[l]);
      ForwardGateUp(weights.layers[l], s.layers[l]);
    }
    BackwardMlp(g, l);
    BackwardAttention(g, l);
    Leave(g, 1 + l);
  }
  if (config().tie_word_embeddings) {
    g.unit = g.head;
    g.common_size = 0;
  } else {
    Enter(g, 0);
  }
  BackwardEmbedding(g);
  Leave(g, 0);
  device_.Synchronize(stream_);
  s.batch = nullptr;
}

void TensorParallelPass::Enter(Gradients& g, int64_t unit) {
  if (options_.units != nullptr) g.unit = options_.units->BeforeBackward(unit);
  const auto num_layers = static_cast<int64_t>(g.layout.layers.size());
  g.common_size = g.layout.common_size(unit);
  g.unit_begin = unit == 0            ? 0
                 : unit <= num_layers ? g.layout.layers[unit - 1].input_norm.offset
                                      : g.layout.final_norm.offset;
  if (g.common_size == 0) return;
  for (const Tensor& t : state_->partials) {
    device_.Fill(stream_, t.Cols(0, g.common_size), 0.0f);
  }
}

void TensorParallelPass::Leave(Gradients& g, int64_t unit) {
  if (g.common_size > 0) {
    std::vector<Tensor> partials;
    for (const Tensor& t : state_->partials) partials.push_back(t.Cols(0, g.common_size));
    group_.SumPartials(partials);
    const Tensor sum = g.unit.gradients.Cols(g.unit_begin, g.common_size);
    device_.Add(stream_, sum, sum, partials[0]);
  }
  if (options_.units != nullptr) options_.units->AfterBackward(unit);
}

void TensorParallelPass::BackwardNorm(Gradients& g, const ParameterView& weight_view,
                                      const Tensor& weight, const Tensor& d_x,
                                      const Tensor& d_normed, const Tensor& x) {
  const State& s = *state_;
  const LeafRange& leaves = group_.leaves();
  for (int64_t leaf = leaves.begin; leaf < leaves.end; ++leaf) {
    const int64_t begin = group_.RowBegin(s.num_rows, leaf) - s.first_row;
    const int64_t count = group_.RowBegin(s.num_rows, leaf + 1) - s.first_row - begin;
    if (count == 0) continue;
    device_.RmsNormBackward(stream_, d_x.Rows(begin, count),
                            g.Partial(s, weight_view, leaf - leaves.begin),
                            d_normed.Rows(begin, count), x.Rows(begin, count), weight, epsilon(), 1,
                            /*accumulate=*/true);
  }
}

void TensorParallelPass::BackwardHead(Gradients& g, absl::Span<const float> d_logprobs_N,
                                      absl::Span<const float> d_entropy_N) {
  State& s = *state_;
  const int64_t N = s.batch->num_targets();
  const auto last_unit = static_cast<int64_t>(s.layers.size()) + 1;
  if (config().tie_word_embeddings) {
    Enter(g, 0);
    g.head = g.unit;
    Enter(g, last_unit);
  } else {
    Enter(g, last_unit);
    g.head = g.unit;
  }
  const auto upload = [&](const Tensor& to, absl::Span<const float> values) {
    std::vector<float> sorted;
    for (const int32_t n : s.order_N) sorted.push_back(values[n]);
    device_.Upload(stream_, to.Cols(0, N), sorted.data());
  };
  if (N > 0) upload(s.d_logprobs_N, d_logprobs_N);
  if (N > 0 && !d_entropy_N.empty()) upload(s.d_entropy_N, d_entropy_N);
  const Tensor d_normed = Mine(s.d_norm_tD);
  device_.Fill(stream_, d_normed, 0.0f);
  const bool logits_kept = N <= s.chunk_rows;
  for (int64_t begin = 0; begin < N; begin += s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, N - begin);
    if (config().value_head) {
      BackwardValueChunk(g, begin, count);
      continue;
    }
    if (!logits_kept) RunLogits(g.weights, begin, count);
    BackwardHeadChunk(g, begin, count,
                      d_entropy_N.empty() ? Tensor{} : s.d_entropy_N.Cols(begin, count));
  }
  BackwardNorm(g, g.layout.final_norm, g.weights.final_norm, Mine(s.d_x_tD), d_normed,
               Mine(s.x_last_tD));
  Leave(g, last_unit);
}

void TensorParallelPass::BackwardHeadChunk(Gradients& g, int64_t begin, int64_t count,
                                           const Tensor& d_entropy) {
  State& s = *state_;
  const Tensor d_logits = s.logits_RV.Rows(0, count), rows = s.rows_RD.Rows(0, count);
  device_.VocabularyBackward(
      stream_, {d_logits, s.max_N.Cols(begin, count), s.sums_N3.Rows(begin, count),
                s.targets_N.Cols(begin, count), s.d_logprobs_N.Cols(begin, count), d_entropy,
                s.vocab_begin, options_.temperature});
  const std::vector<int64_t> targets = TargetsOfRanks(begin, count);
  const Tensor d_rows =
      group_.SumLeaves(targets, s.sums_TD, s.reduced_tD, [&](int64_t leaf, const Tensor& partial) {
        const LeafSlice& slice = Slice(leaf);
        const ParameterView& view = g.layout.lm_head_leaves[leaf - group_.leaves().begin];
        const Tensor d_leaf = d_logits.Cols(slice.vocab_begin - s.vocab_begin, slice.vocab_rows);
        device_.LinearBackwardWeight(stream_, view.In(g.head.gradients), d_leaf, rows);
        device_.LinearBackwardInput(stream_, partial, d_leaf, view.In(g.head.flat_weights),
                                    /*accumulate=*/false);
      });
  int64_t first = begin;
  for (int r = 0; r < group_.rank(); ++r) first += targets[r];
  // A row may be the source of several targets: the scatter of an embedding's gradient allows that.
  device_.EmbeddingBackward(stream_, Mine(s.d_norm_tD), d_rows,
                            s.my_target_rows_N.Cols(first, targets[group_.rank()]));
}

// The head's gradient is of all rows, which every rank has: leaf 0's. Each rank takes back its
// rows.
void TensorParallelPass::BackwardValueChunk(Gradients& g, int64_t begin, int64_t count) {
  State& s = *state_;
  const Tensor d_values = s.d_logprobs_N.Cols(begin, count).Reshape(count);
  if (group_.leaves().begin == 0) {
    const Tensor rows = s.rows_RD.Rows(0, count);
    device_.GatherRows(stream_, rows, Whole(s.norm_TD), s.target_rows_N.Cols(begin, count));
    device_.LinearBackwardWeight(stream_, g.Partial(s, g.layout.lm_head, 0), d_values, rows);
  }
  const std::vector<int64_t> targets = TargetsOfRanks(begin, count);
  int64_t first = 0;
  for (int r = 0; r < group_.rank(); ++r) first += targets[r];
  const int64_t mine = targets[group_.rank()];
  if (mine == 0) return;
  const Tensor d_rows = s.sums_TD[0].Rows(0, mine);
  device_.LinearBackwardInput(stream_, d_rows, d_values.Rows(first, mine),
                              g.layout.lm_head.In(g.head.flat_weights), /*accumulate=*/false);
  device_.EmbeddingBackward(stream_, Mine(s.d_norm_tD), d_rows,
                            s.my_target_rows_N.Cols(begin + first, mine));
}

// d_x arrives as the gradient of x_out and leaves as that of x_mid.
void TensorParallelPass::BackwardMlp(Gradients& g, int64_t layer) {
  State& s = *state_;
  const Layer& t = s.layers[layer];
  const LayerParameters& p = g.layout.layers[layer];
  const LayerWeights& w = g.weights.layers[layer];
  const Tensor& flat = g.unit.flat_weights;
  const Tensor& gradients = g.unit.gradients;
  const Tensor d_x = Mine(s.d_x_tD);
  const Tensor d_out = group_.GatherRows(s.rows_of_rank, s.d_x_TD, d_x);
  const Tensor normed = GatherNorm(t.x_mid_tD, w.post_attention_norm);
  const Tensor d_normed = group_.SumLeaves(
      s.rows_of_rank, s.sums_TD, s.reduced_tD, [&](int64_t leaf, const Tensor& partial) {
        const int64_t i = leaf - group_.leaves().begin, cols = Slice(leaf).mlp_cols;
        const LeafParameters& q = p.leaves[i];
        const Tensor gate_up = Whole(t.leaves[i].gate_up_T2F);
        const Tensor activated = Whole(s.activated_TF).Cols(0, cols);
        const Tensor d_activated = Whole(s.d_activated_TF).Cols(0, cols);
        const Tensor d_gate_up = Whole(s.d_gate_up_T2F).Cols(0, 2 * cols);
        device_.LinearBackwardInput(stream_, d_activated, d_out, q.down.In(flat), false);
        device_.SwiGluBackward(stream_, d_gate_up, activated, d_activated, gate_up);
        device_.LinearBackwardWeight(stream_, q.down.In(gradients), d_out, activated);
        if (q.down_bias) device_.BiasBackward(stream_, q.down_bias.In(gradients), d_out);
        device_.LinearBackwardWeight(stream_, q.gate_up.In(gradients), d_gate_up, normed);
        if (q.gate_up_bias) device_.BiasBackward(stream_, q.gate_up_bias.In(gradients), d_gate_up);
        device_.LinearBackwardInput(stream_, partial, d_gate_up, q.gate_up.In(flat), false);
      });
  BackwardNorm(g, p.post_attention_norm, w.post_attention_norm, d_x, d_normed, Mine(t.x_mid_tD));
}

// d_x arrives as the gradient of x_mid and leaves as that of x_in.
void TensorParallelPass::BackwardAttention(Gradients& g, int64_t layer) {
  State& s = *state_;
  const Layer& t = s.layers[layer];
  const LayerParameters& p = g.layout.layers[layer];
  const LayerWeights& w = g.weights.layers[layer];
  const Tensor d_x = Mine(s.d_x_tD);
  const Tensor d_out = group_.GatherRows(s.rows_of_rank, s.d_x_TD, d_x);
  const Tensor normed = GatherNorm(t.x_in_tD, w.input_norm);
  const Tensor d_normed = group_.SumLeaves(
      s.rows_of_rank, s.sums_TD, s.reduced_tD, [&](int64_t leaf, const Tensor& partial) {
        const LeafParameters& q = p.leaves[leaf - group_.leaves().begin];
        const Tensor attention = Whole(t.leaves[leaf - group_.leaves().begin].attention_TE);
        const Tensor d_attention = Whole(s.d_attention_TE).Cols(0, attention.cols);
        device_.LinearBackwardWeight(stream_, q.o.In(g.unit.gradients), d_out, attention);
        if (q.o_bias) device_.BiasBackward(stream_, q.o_bias.In(g.unit.gradients), d_out);
        device_.LinearBackwardInput(stream_, d_attention, d_out, q.o.In(g.unit.flat_weights),
                                    false);
        BackwardHeads(g, layer, leaf);
        BackwardProjection(g, layer, leaf, normed, partial);
      });
  BackwardNorm(g, p.input_norm, w.input_norm, d_x, d_normed, Mine(t.x_in_tD));
}

// From d_attention_TE to d_qkv_TE: attention, rotation and the norms of heads.
void TensorParallelPass::BackwardHeads(Gradients& g, int64_t layer, int64_t leaf) {
  State& s = *state_;
  const LeafSlice& slice = Slice(leaf);
  const int64_t i = leaf - group_.leaves().begin, C = config().head_dim;
  const int64_t q_cols = slice.num_heads * C, kv_cols = slice.num_kv_heads * C;
  const LeafTensors& t = s.layers[layer].leaves[i];
  const Tensor d_qkv = Whole(s.d_qkv_TE).Cols(0, q_cols + 2 * kv_cols);
  const Tensor d_qk = config().qk_norm ? Whole(s.d_qk_TE).Cols(0, q_cols + kv_cols) : d_qkv;
  const Tensor d_q = d_qk.Cols(0, q_cols), d_k = d_qk.Cols(q_cols, kv_cols);
  const Tensor d_v = d_qkv.Cols(q_cols + kv_cols, kv_cols);
  for (const HeadRun& run : HeadRuns(leaf)) {
    PackedAttentionBackward a;
    a.forward = AttentionOf(leaf, run, t);
    a.d_out = Whole(s.d_attention_TE).Cols(run.q_head * C, run.num_heads * C);
    a.d_q = d_q.Cols(run.q_head * C, run.num_heads * C);
    a.d_k = d_k.Cols(run.kv_head * C, run.num_kv_heads * C);
    a.d_v = d_v.Cols(run.kv_head * C, run.num_kv_heads * C);
    device_.AttentionBackward(stream_, a);
  }
  const Tensor positions = s.positions_T.Cols(0, s.num_rows);
  for (const auto& [d, heads] :
       {std::pair{d_q, slice.num_heads}, std::pair{d_k, slice.num_kv_heads}}) {
    device_.Rope(stream_, d, positions, transformer_.cos_PC(), transformer_.sin_PC(), heads,
                 /*inverse=*/true);
  }
  if (!config().qk_norm) return;
  const LayerParameters& p = g.layout.layers[layer];
  const LayerWeights& w = g.weights.layers[layer];
  const Tensor qkv = Whole(t.qkv_TE);
  device_.RmsNormBackward(stream_, d_qkv.Cols(0, q_cols), g.Partial(s, p.q_norm, i), d_q,
                          qkv.Cols(0, q_cols), w.q_norm, epsilon(), slice.num_heads, false);
  device_.RmsNormBackward(stream_, d_qkv.Cols(q_cols, kv_cols), g.Partial(s, p.k_norm, i), d_k,
                          qkv.Cols(q_cols, kv_cols), w.k_norm, epsilon(), slice.num_kv_heads,
                          false);
}

void TensorParallelPass::BackwardProjection(Gradients& g, int64_t layer, int64_t leaf,
                                            const Tensor& normed, const Tensor& d_normed) {
  State& s = *state_;
  const LeafSlice& slice = Slice(leaf);
  const int64_t i = leaf - group_.leaves().begin, C = config().head_dim;
  const int64_t q_cols = slice.num_heads * C, kv_cols = slice.num_kv_heads * C;
  const LeafParameters& p = g.layout.layers[layer].leaves[i];
  const Tensor d_qkv = Whole(s.d_qkv_TE).Cols(0, q_cols + 2 * kv_cols);
  const Tensor d_own = p.k ? d_qkv.Cols(0, q_cols) : d_qkv;
  device_.LinearBackwardWeight(stream_, p.qkv.In(g.unit.gradients), d_own, normed);
  if (p.qkv_bias) device_.BiasBackward(stream_, p.qkv_bias.In(g.unit.gradients), d_own);
  device_.LinearBackwardInput(stream_, d_normed, d_own, p.qkv.In(g.unit.flat_weights), false);
  if (!p.k) return;
  const auto shared = [&](const ParameterView& weight, const ParameterView& bias, const Tensor& d) {
    device_.LinearBackwardWeight(stream_, g.Partial(s, weight, i), d, normed);
    if (bias) device_.BiasBackward(stream_, g.Partial(s, bias, i), d);
    device_.LinearBackwardInput(stream_, d_normed, d, weight.In(g.unit.flat_weights), true);
  };
  shared(p.k, p.k_bias, d_qkv.Cols(q_cols, kv_cols));
  shared(p.v, p.v_bias, d_qkv.Cols(q_cols + kv_cols, kv_cols));
}

void TensorParallelPass::BackwardEmbedding(Gradients& g) {
  State& s = *state_;
  const Tensor mine = Mine(s.d_norm_tD);
  device_.GatherRows(stream_, mine, Mine(s.d_x_tD), s.departures_t.Cols(0, s.my_rows));
  const Tensor rows = group_.ExchangeRows(s.rows_received, s.rows_sent, s.sums_TD[0], mine);
  for (const State::Lookup& look : s.lookups) {
    device_.EmbeddingBackward(
        stream_, g.layout.embedding_leaves[look.leaf - group_.leaves().begin].In(g.unit.gradients),
        rows.Rows(look.begin, look.count), s.lookups_T.Cols(look.begin, look.count));
  }
}
}  // namespace stretto::engine
