// Memory and forward direction of the pass over leaves.
#include "engine/training/tensor_parallel_pass.h"

#include <algorithm>
#include <numeric>

#include "base/status.h"
#include "engine/training/tensor_parallel_state.h"

namespace stretto::engine {
namespace {
struct Wish {
  Tensor* tensor;
  DType dtype;
  int64_t rows, cols;
};
absl::Status Grant(Device& device, DeviceMemory& memory, const std::vector<Wish>& wishes) {
  for (const Wish& w : wishes) {
    ASSIGN_OR_RETURN(*w.tensor, memory.Make(device, w.dtype, std::max<int64_t>(1, w.rows), w.cols));
  }
  return absl::OkStatus();
}
}  // namespace

TensorParallelPass::TensorParallelPass(const Transformer& transformer,
                                       const PackedPassOptions& options, Stream& stream,
                                       Communicator* group, int64_t num_leaves)
    : transformer_(transformer),
      options_(options),
      device_(transformer.device()),
      stream_(stream),
      group_(device_, stream, group, num_leaves),
      state_(std::make_unique<State>()) {
  for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
    slices_.push_back(SliceOf(config(), num_leaves, leaf));
  }
}
TensorParallelPass::~TensorParallelPass() = default;

size_t TensorParallelPass::bytes() const { return state_->memory.bytes(); }

absl::StatusOr<std::unique_ptr<TensorParallelPass>> TensorParallelPass::Create(
    const Transformer& transformer, const PackedPassOptions& options, Stream& stream,
    Communicator* group, int64_t num_leaves) {
  if (options.max_rows <= 0 || options.max_targets <= 0 || !(options.temperature > 0)) {
    return absl::InvalidArgumentError(
        "tensor-parallel pass: max_rows, max_targets and temperature must be positive");
  }
  RETURN_IF_ERROR(CheckLeaves("tensor-parallel pass", transformer.config(), num_leaves));
  std::unique_ptr<TensorParallelPass> pass(
      new TensorParallelPass(transformer, options, stream, group, num_leaves));
  RETURN_IF_ERROR(pass->Allocate());
  if (options.train) RETURN_IF_ERROR(pass->AllocateGradients());
  return pass;
}

absl::Status TensorParallelPass::MakeLayer(Layer& layer) {
  State& s = *state_;
  const DType dtype = transformer_.options().dtype;
  const int64_t T = options_.max_rows, C = config().head_dim;
  RETURN_IF_ERROR(
      Grant(device_, s.memory, {{&layer.x_mid_tD, dtype, s.max_mine, config().hidden_size}}));
  layer.leaves.resize(group_.leaves().size());
  for (int64_t i = 0; i < group_.leaves().size(); ++i) {
    const LeafSlice& slice = Slice(group_.leaves().begin + i);
    const int64_t q_cols = slice.num_heads * C, kv_cols = slice.num_kv_heads * C;
    LeafTensors& t = layer.leaves[i];
    std::vector<Wish> wishes = {{&t.qkv_TE, dtype, T, q_cols + 2 * kv_cols},
                                {&t.attention_TE, dtype, T, q_cols},
                                {&t.gate_up_T2F, dtype, T, 2 * slice.mlp_cols}};
    if (config().qk_norm) wishes.push_back({&t.qk_TE, dtype, T, q_cols + kv_cols});
    RETURN_IF_ERROR(Grant(device_, s.memory, wishes));
  }
  return absl::OkStatus();
}

absl::Status TensorParallelPass::Allocate() {
  State& s = *state_;
  const DType dtype = transformer_.options().dtype;
  const LeafRange& leaves = group_.leaves();
  const int64_t T = options_.max_rows, N = options_.max_targets, D = config().hidden_size;
  s.max_mine = T * leaves.size() / leaves.num_leaves + 1;
  int64_t mlp_cols = 0, widest = 0;  // all ranks chunk alike: by the widest one's vocabulary
  for (const LeafSlice& slice : slices_) mlp_cols = std::max(mlp_cols, slice.mlp_cols);
  for (int r = 0; r < group_.size(); ++r) {
    const LeafRange theirs = group_.LeavesOf(r);
    const int64_t begin = Slice(theirs.begin).vocab_begin;
    const LeafSlice& last = Slice(theirs.end - 1);
    const int64_t rows = last.vocab_begin + last.vocab_rows - begin;
    widest = std::max(widest, rows);
    if (r != group_.rank()) continue;
    s.vocab_begin = begin;
    s.vocab_rows = rows;
  }
  const auto fitting = static_cast<int64_t>(options_.logits_bytes / sizeof(float)) / widest;
  const int64_t R = s.chunk_rows = std::clamp<int64_t>(fitting, 1, N);
  std::vector<Wish> wishes = {
      {&s.positions_T, DType::kI32, 1, T},
      {&s.target_rows_N, DType::kI32, 1, N},
      {&s.my_target_rows_N, DType::kI32, 1, N},
      {&s.targets_N, DType::kI32, 1, N},
      {&s.lookups_T, DType::kI32, 1, T},
      {&s.arrivals_t, DType::kI32, 1, s.max_mine},
      {&s.departures_t, DType::kI32, 1, s.max_mine},
      {&s.x_last_tD, dtype, s.max_mine, D},
      {&s.norm_tD, dtype, s.max_mine, D},
      // Rows that are looked up for all pass through it as well.
      {&s.norm_TD, dtype, T, D},
      {&s.activated_TF, dtype, T, mlp_cols},
      {&s.rows_RD, dtype, R, D},
      {&s.logits_RV, DType::kF32, R, config().value_head ? 1 : s.vocab_rows},
      {&s.logprobs_R, DType::kF32, 1, R},
      {&s.entropy_R, DType::kF32, 1, R},
      {&s.max_N, DType::kF32, 1, N},
      {&s.sums_N3, DType::kF32, N, 3}};
  s.sums_TD.resize(group_.num_sum_buffers());
  for (Tensor& t : s.sums_TD) wishes.push_back({&t, DType::kF32, std::max(T, R), D});
  s.leaf_sums_R3.resize(leaves.size());
  for (Tensor& t : s.leaf_sums_R3) wishes.push_back({&t, DType::kF32, R, 3});
  if (!group_.alone()) {
    wishes.push_back({&s.reduced_tD, DType::kF32, std::max(s.max_mine, R), D});
  }
  RETURN_IF_ERROR(Grant(device_, s.memory, wishes));
  const bool keep_all = options_.train && options_.checkpointing == Checkpointing::kNone;
  Layer shared;
  if (!keep_all) RETURN_IF_ERROR(MakeLayer(shared));
  s.layers.assign(config().num_layers, shared);
  for (size_t l = 0; l < s.layers.size(); ++l) {
    Layer& layer = s.layers[l];
    if (keep_all) RETURN_IF_ERROR(MakeLayer(layer));
    if (options_.train) {
      RETURN_IF_ERROR(Grant(device_, s.memory, {{&layer.x_in_tD, dtype, s.max_mine, D}}));
    } else {
      layer.x_in_tD = layer.x_mid_tD = s.x_last_tD;
    }
    if (l > 0) s.layers[l - 1].x_out_tD = layer.x_in_tD;
  }
  s.layers.back().x_out_tD = s.x_last_tD;
  return absl::OkStatus();
}

Tensor TensorParallelPass::Mine(const Tensor& rows) const { return rows.Rows(0, state_->my_rows); }
Tensor TensorParallelPass::Whole(const Tensor& rows) const {
  return rows.Rows(0, state_->num_rows);
}

int64_t TensorParallelPass::LeafOfToken(int32_t id) const {
  const auto after =
      std::upper_bound(slices_.begin(), slices_.end(), id,
                       [](int32_t i, const LeafSlice& s) { return i < s.vocab_begin; });
  return after - slices_.begin() - 1;
}

void TensorParallelPass::Begin(const PackedBatch& batch) {
  CheckPackedBatch(transformer_, options_, batch);
  State& s = *state_;
  s.batch = &batch;
  s.num_rows = batch.num_rows();
  s.rows_of_rank = group_.RowsOfRanks(s.num_rows);
  s.first_row = group_.RowBegin(s.num_rows, group_.leaves().begin);
  s.my_rows = s.rows_of_rank[group_.rank()];
  const int64_t N = batch.num_targets();
  s.order_N.resize(N);
  std::iota(s.order_N.begin(), s.order_N.end(), 0);
  std::stable_sort(s.order_N.begin(), s.order_N.end(), [&](int32_t a, int32_t b) {
    return batch.target_rows_N[a] < batch.target_rows_N[b];
  });
  s.sorted_target_rows.clear();
  std::vector<int32_t> my_rows, targets;
  for (const int32_t n : s.order_N) {
    s.sorted_target_rows.push_back(batch.target_rows_N[n]);
    my_rows.push_back(batch.target_rows_N[n] - static_cast<int32_t>(s.first_row));
    targets.push_back(batch.targets_N[n]);
  }
  const auto upload = [&](const Tensor& to, const std::vector<int32_t>& values) {
    if (values.empty()) return;
    device_.Upload(stream_, to.Cols(0, static_cast<int64_t>(values.size())), values.data());
  };
  upload(s.positions_T, batch.positions_T);
  upload(s.target_rows_N, s.sorted_target_rows);
  upload(s.my_target_rows_N, my_rows);
  upload(s.targets_N, targets);
  PlanEmbedding(batch);
}

// A rank looks rows up for every rank in turn, leaf by leaf, in order of rows: so the gradient of a
// token adds up in order of rows.
void TensorParallelPass::PlanEmbedding(const PackedBatch& batch) {
  State& s = *state_;
  const int num_ranks = group_.size();
  const auto& ids = batch.ids_T;
  std::vector<int32_t> lookups, departures;
  s.lookups.clear();
  s.rows_sent.assign(num_ranks, 0);
  s.rows_received.assign(num_ranks, 0);
  // Rows of rank `to` whose tokens a leaf has.
  const auto each = [&](int to, int64_t leaf, const auto& visit) {
    int64_t begin = 0;
    for (int r = 0; r < to; ++r) begin += s.rows_of_rank[r];
    for (int64_t t = begin; t < begin + s.rows_of_rank[to]; ++t) {
      if (LeafOfToken(ids[t]) == leaf) visit(t);
    }
  };
  const LeafRange& mine = group_.leaves();
  for (int r = 0; r < num_ranks; ++r) {
    for (int64_t leaf = mine.begin; leaf < mine.end; ++leaf) {
      const auto begin = static_cast<int64_t>(lookups.size());
      each(r, leaf, [&](int64_t t) {
        lookups.push_back(ids[t] - static_cast<int32_t>(Slice(leaf).vocab_begin));
      });
      const auto count = static_cast<int64_t>(lookups.size()) - begin;
      s.rows_sent[r] += count;
      if (count > 0) s.lookups.push_back({leaf, begin, count});
    }
    const LeafRange theirs = group_.LeavesOf(r);
    for (int64_t leaf = theirs.begin; leaf < theirs.end; ++leaf) {
      each(group_.rank(), leaf, [&](int64_t t) {
        departures.push_back(static_cast<int32_t>(t - s.first_row));
        ++s.rows_received[r];
      });
    }
  }
  std::vector<int32_t> arrivals(departures.size());
  for (size_t i = 0; i < departures.size(); ++i) arrivals[departures[i]] = static_cast<int32_t>(i);
  for (const auto& [to, values] :
       {std::pair{&s.lookups_T, &lookups}, std::pair{&s.arrivals_t, &arrivals},
        std::pair{&s.departures_t, &departures}}) {
    if (values->empty()) continue;
    device_.Upload(stream_, to->Cols(0, static_cast<int64_t>(values->size())), values->data());
  }
}

void TensorParallelPass::ForwardEmbedding(const ModelWeights& weights) {
  State& s = *state_;
  int64_t looked_up = 0;
  for (const State::Lookup& look : s.lookups) {
    device_.Embedding(stream_, s.norm_TD.Rows(look.begin, look.count),
                      weights.embedding_leaves[look.leaf - group_.leaves().begin],
                      s.lookups_T.Cols(look.begin, look.count));
    looked_up += look.count;
  }
  const Tensor rows =
      group_.ExchangeRows(s.rows_sent, s.rows_received, s.norm_tD, s.norm_TD.Rows(0, looked_up));
  device_.GatherRows(stream_, Mine(s.layers[0].x_in_tD), rows, s.arrivals_t.Cols(0, s.my_rows));
}

Tensor TensorParallelPass::GatherNorm(const Tensor& x, const Tensor& weight) {
  State& s = *state_;
  const Tensor mine = group_.alone() ? Whole(s.norm_TD) : Mine(s.norm_tD);
  device_.RmsNorm(stream_, mine, Mine(x), weight, epsilon(), 1);
  return group_.GatherRows(s.rows_of_rank, s.norm_TD, mine);
}

std::vector<TensorParallelPass::HeadRun> TensorParallelPass::HeadRuns(int64_t leaf) const {
  const LeafSlice& slice = Slice(leaf);
  if (!LeavesShareKv(config(), group_.leaves().num_leaves)) {
    return {{0, slice.num_heads, 0, slice.num_kv_heads}};
  }
  const int64_t heads_per_kv = config().num_heads / config().num_kv_heads;
  std::vector<HeadRun> runs;
  for (int64_t g = 0; g < slice.num_kv_heads; ++g) {
    const int64_t kv = slice.kv_begin + g;
    const int64_t begin = std::max(slice.head_begin, kv * heads_per_kv);
    const int64_t end = std::min(slice.head_begin + slice.num_heads, (kv + 1) * heads_per_kv);
    runs.push_back({begin - slice.head_begin, end - begin, g, 1});
  }
  return runs;
}

PackedAttention TensorParallelPass::AttentionOf(int64_t leaf, const HeadRun& run,
                                                const LeafTensors& t) const {
  const LeafSlice& slice = Slice(leaf);
  const int64_t C = config().head_dim, q_cols = slice.num_heads * C;
  const int64_t kv_cols = slice.num_kv_heads * C;
  const Tensor qk = Whole(config().qk_norm ? t.qk_TE : t.qkv_TE);
  PackedAttention a;
  a.shape = transformer_.attention_shape();
  a.shape.num_heads = run.num_heads;
  a.shape.num_kv_heads = run.num_kv_heads;
  a.segments = &state_->batch->segments;
  a.q = qk.Cols(run.q_head * C, run.num_heads * C);
  a.k = qk.Cols(q_cols + run.kv_head * C, run.num_kv_heads * C);
  a.v = Whole(t.qkv_TE).Cols(q_cols + kv_cols + run.kv_head * C, run.num_kv_heads * C);
  a.out = Whole(t.attention_TE).Cols(run.q_head * C, run.num_heads * C);
  return a;
}

// q, k and v of a leaf, turned.
void TensorParallelPass::ProjectLeaf(const LeafWeights& w, const LayerWeights& shared, int64_t leaf,
                                     const Tensor& normed, const LeafTensors& t) {
  const LeafSlice& slice = Slice(leaf);
  const int64_t C = config().head_dim, q_cols = slice.num_heads * C;
  const int64_t kv_cols = slice.num_kv_heads * C;
  const Tensor qkv = Whole(t.qkv_TE);
  if (w.k == nullptr) {
    device_.Linear(stream_, qkv, normed, *w.qkv, w.qkv_bias);
  } else {
    device_.Linear(stream_, qkv.Cols(0, q_cols), normed, *w.qkv, w.qkv_bias);
    device_.Linear(stream_, qkv.Cols(q_cols, kv_cols), normed, *w.k, w.k_bias);
    device_.Linear(stream_, qkv.Cols(q_cols + kv_cols, kv_cols), normed, *w.v, w.v_bias);
  }
  const Tensor qk = Whole(config().qk_norm ? t.qk_TE : t.qkv_TE);
  const Tensor q = qk.Cols(0, q_cols), k = qk.Cols(q_cols, kv_cols);
  if (config().qk_norm) {
    device_.RmsNorm(stream_, q, qkv.Cols(0, q_cols), shared.q_norm, epsilon(), slice.num_heads);
    device_.RmsNorm(stream_, k, qkv.Cols(q_cols, kv_cols), shared.k_norm, epsilon(),
                    slice.num_kv_heads);
  }
  const Tensor positions = state_->positions_T.Cols(0, state_->num_rows);
  for (const auto& [x, heads] : {std::pair{q, slice.num_heads}, std::pair{k, slice.num_kv_heads}}) {
    device_.Rope(stream_, x, positions, transformer_.cos_PC(), transformer_.sin_PC(), heads,
                 /*inverse=*/false);
  }
}

void TensorParallelPass::AttendLeaf(int64_t leaf, const LeafTensors& t) {
  for (const HeadRun& run : HeadRuns(leaf)) device_.Attention(stream_, AttentionOf(leaf, run, t));
}

// x_mid = x_in + Σ over leaves of o · attention.
void TensorParallelPass::ForwardAttention(const LayerWeights& w, Layer& layer) {
  State& s = *state_;
  const Tensor normed = GatherNorm(layer.x_in_tD, w.input_norm);
  const Tensor sum = group_.SumLeaves(
      s.rows_of_rank, s.sums_TD, s.reduced_tD, [&](int64_t leaf, const Tensor& partial) {
        const int64_t i = leaf - group_.leaves().begin;
        ProjectLeaf(w.leaves[i], w, leaf, normed, layer.leaves[i]);
        AttendLeaf(leaf, layer.leaves[i]);
        device_.Linear(stream_, partial, Whole(layer.leaves[i].attention_TE), *w.leaves[i].o,
                       w.leaves[i].o_bias);
      });
  device_.Add(stream_, Mine(layer.x_mid_tD), Mine(layer.x_in_tD), sum);
}

void TensorParallelPass::ForwardGateUp(const LayerWeights& w, Layer& layer) {
  const Tensor normed = GatherNorm(layer.x_mid_tD, w.post_attention_norm);
  for (size_t i = 0; i < layer.leaves.size(); ++i) {
    device_.Linear(stream_, Whole(layer.leaves[i].gate_up_T2F), normed, *w.leaves[i].gate_up,
                   w.leaves[i].gate_up_bias);
  }
}

// x_out = x_mid + Σ over leaves of down · activated.
void TensorParallelPass::ForwardDown(const LayerWeights& w, Layer& layer) {
  State& s = *state_;
  const Tensor sum = group_.SumLeaves(
      s.rows_of_rank, s.sums_TD, s.reduced_tD, [&](int64_t leaf, const Tensor& partial) {
        const int64_t i = leaf - group_.leaves().begin;
        const Tensor activated = Whole(s.activated_TF).Cols(0, Slice(leaf).mlp_cols);
        device_.SwiGlu(stream_, activated, Whole(layer.leaves[i].gate_up_T2F));
        device_.Linear(stream_, partial, activated, *w.leaves[i].down, w.leaves[i].down_bias);
      });
  device_.Add(stream_, Mine(layer.x_out_tD), Mine(layer.x_mid_tD), sum);
}

void TensorParallelPass::Forward(Stream& stream, const ModelWeights& weights,
                                 const PackedBatch& batch, absl::Span<float> logprobs_N,
                                 absl::Span<float> entropy_N) {
  STRETTO_CHECK(&stream == &stream_);
  const auto N = static_cast<size_t>(batch.num_targets());
  STRETTO_CHECK(logprobs_N.size() == N && (entropy_N.empty() || entropy_N.size() == N));
  Begin(batch);
  State& s = *state_;
  ParameterUnits* units = options_.units;
  const auto last_unit = static_cast<int64_t>(s.layers.size()) + 1;
  if (units != nullptr) units->BeforeForward(0);
  ForwardEmbedding(weights);
  if (units != nullptr) units->AfterForward(0);
  for (int64_t l = 0; l + 1 < last_unit; ++l) {
    if (units != nullptr) units->BeforeForward(1 + l);
    ForwardAttention(weights.layers[l], s.layers[l]);
    ForwardGateUp(weights.layers[l], s.layers[l]);
    ForwardDown(weights.layers[l], s.layers[l]);
    if (units != nullptr) units->AfterForward(1 + l);
  }
  if (units != nullptr) units->BeforeForward(last_unit);
  ForwardHead(weights, logprobs_N, entropy_N);
  if (units != nullptr) units->AfterForward(last_unit);
  device_.Synchronize(stream_);
}

// Logits of this rank's tokens for targets [begin, begin + count), from the final norm's rows,
// which stay in norm_TD until the backward pass is done with them.
void TensorParallelPass::RunLogits(const ModelWeights& weights, int64_t begin, int64_t count) {
  State& s = *state_;
  const Tensor rows = s.rows_RD.Rows(0, count);
  device_.GatherRows(stream_, rows, Whole(s.norm_TD), s.target_rows_N.Cols(begin, count));
  for (int64_t i = 0; i < group_.leaves().size(); ++i) {
    const LeafSlice& slice = Slice(group_.leaves().begin + i);
    device_.Linear(
        stream_,
        s.logits_RV.Rows(0, count).Cols(slice.vocab_begin - s.vocab_begin, slice.vocab_rows), rows,
        *weights.lm_head_leaves[i], Tensor{});
  }
}

void TensorParallelPass::RunValues(const ModelWeights& weights, int64_t begin, int64_t count) {
  State& s = *state_;
  const Tensor rows = s.rows_RD.Rows(0, count);
  device_.GatherRows(stream_, rows, Whole(s.norm_TD), s.target_rows_N.Cols(begin, count));
  device_.Linear(stream_, s.logits_RV.Rows(0, count), rows, *weights.lm_head, Tensor{});
}

void TensorParallelPass::ForwardHead(const ModelWeights& weights, absl::Span<float> logprobs_N,
                                     absl::Span<float> entropy_N) {
  State& s = *state_;
  GatherNorm(s.x_last_tD, weights.final_norm);
  const int64_t N = s.batch->num_targets();
  std::vector<float> host(s.chunk_rows);
  if (config().value_head) std::fill(entropy_N.begin(), entropy_N.end(), 0.0f);
  for (int64_t begin = 0; begin < N; begin += s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, N - begin);
    if (config().value_head) {
      RunValues(weights, begin, count);
      device_.Download(stream_, s.logits_RV.Rows(0, count), host.data());
      for (int64_t i = 0; i < count; ++i) logprobs_N[s.order_N[begin + i]] = host[i];
      continue;
    }
    RunLogits(weights, begin, count);
    const Tensor max = s.max_N.Cols(begin, count), sums = s.sums_N3.Rows(begin, count);
    const Tensor logits = s.logits_RV.Rows(0, count);
    device_.VocabularyMax(stream_, max, logits, options_.temperature);
    group_.Max(max);
    std::vector<Tensor> partials;
    for (int64_t i = 0; i < group_.leaves().size(); ++i) {
      const LeafSlice& slice = Slice(group_.leaves().begin + i);
      partials.push_back(s.leaf_sums_R3[i].Rows(0, count));
      device_.VocabularySums(
          stream_, partials[i], logits.Cols(slice.vocab_begin - s.vocab_begin, slice.vocab_rows),
          max, s.targets_N.Cols(begin, count), slice.vocab_begin, options_.temperature);
    }
    group_.SumPartials(partials);
    device_.Copy(stream_, sums, partials[0]);
    const Tensor logprobs = s.logprobs_R.Cols(0, count);
    const Tensor entropy = entropy_N.empty() ? Tensor{} : s.entropy_R.Cols(0, count);
    device_.VocabularyLogProbs(stream_, logprobs, entropy, sums);
    device_.Download(stream_, logprobs, host.data());
    for (int64_t i = 0; i < count; ++i) logprobs_N[s.order_N[begin + i]] = host[i];
    if (!entropy) continue;
    device_.Download(stream_, entropy, host.data());
    for (int64_t i = 0; i < count; ++i) entropy_N[s.order_N[begin + i]] = host[i];
  }
}

std::vector<int64_t> TensorParallelPass::TargetsOfRanks(int64_t begin, int64_t count) const {
  const State& s = *state_;
  std::vector<int64_t> targets;
  const auto first = s.sorted_target_rows.begin() + begin;
  auto from = first;
  int64_t end_row = 0;
  for (const int64_t rows : s.rows_of_rank) {
    end_row += rows;
    const auto to = std::lower_bound(from, first + count, static_cast<int32_t>(end_row));
    targets.push_back(to - from);
    from = to;
  }
  return targets;
}
}  // namespace stretto::engine
