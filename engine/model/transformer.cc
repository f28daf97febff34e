#include "engine/model/transformer.h"

#include <cmath>

#include "base/status.h"
#include "engine/model/layer.h"
#include "engine/model/leaf_layout.h"
#include "engine/model/rope.h"

namespace stretto::engine {
absl::StatusOr<std::unique_ptr<Workspace>> Workspace::Create(Device& device,
                                                             const ModelConfig& config, DType dtype,
                                                             const WorkspaceLimits& limits) {
  if (limits.max_rows <= 0 || limits.max_logits_rows <= 0 || limits.max_sequences <= 0 ||
      limits.max_blocks_per_sequence <= 0) {
    return absl::InvalidArgumentError("workspace: every limit must be at least 1");
  }
  auto w = std::make_unique<Workspace>();
  w->limits_ = limits;
  w->host_.reserve(static_cast<size_t>(limits.max_logits_rows));
  const int64_t T = limits.max_rows, R = limits.max_logits_rows, D = config.hidden_size;
  const int64_t F = config.intermediate_size, C = config.head_dim;
  const int64_t H = config.num_heads, G = config.num_kv_heads;
  struct Wish {
    Tensor* tensor;
    DType dtype;
    int64_t rows, cols;
  };
  std::vector<Wish> wishes = {
      {&w->ids_, DType::kI32, 1, T},
      {&w->positions_, DType::kI32, 1, T},
      {&w->row_sequence_, DType::kI32, 1, T},
      {&w->context_length_, DType::kI32, 1, T},
      {&w->slots_, DType::kI32, 1, T},
      {&w->block_tables_, DType::kI32, 1, limits.max_sequences * limits.max_blocks_per_sequence},
      {&w->logits_rows_, DType::kI32, 1, R},
      {&w->x_, dtype, T, D},
      {&w->normed_, dtype, T, D},
      {&w->qkv_, dtype, T, (H + 2 * G) * C},
      {&w->attention_, dtype, T, H * C},
      {&w->branch_, dtype, T, D},
      {&w->gate_up_, dtype, T, 2 * F},
      {&w->activated_, dtype, T, F},
      {&w->last_, dtype, R, D},
      {&w->last_normed_, dtype, R, D},
      {&w->last_q_, dtype, R, H * C},
      {&w->last_sequence_, DType::kI32, 1, R},
      {&w->last_context_, DType::kI32, 1, R},
      {&w->logits_, DType::kF32, R, config.vocab_size}};
  if (config.qk_norm) wishes.push_back({&w->qk_, dtype, T, (H + G) * C});
  w->leaf_sums_.resize(static_cast<size_t>(NumLeafSums(limits.k_leaves)));
  for (Tensor& sum : w->leaf_sums_) wishes.push_back({&sum, DType::kF32, T, D});
  for (const Wish& wish : wishes) {
    ASSIGN_OR_RETURN(*wish.tensor, w->memory_.Make(device, wish.dtype, wish.rows, wish.cols));
  }
  return w;
}

absl::StatusOr<std::unique_ptr<Transformer>> Transformer::Create(
    Device& device, const ModelConfig& config, const TransformerOptions& options) {
  if (options.dtype != DType::kF32 && options.dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("model dtype must be f32 or bf16, not ", Name(options.dtype)));
  }
  if (options.max_sequence_length <= 0 || options.max_sequence_length > (int64_t{1} << 24)) {
    return absl::InvalidArgumentError(absl::StrCat("max_sequence_length must be in [1, 2^24], not ",
                                                   options.max_sequence_length));
  }
  RETURN_IF_ERROR(ValidateConfig("model", config));
  // One leaf is every model's; some can't be divided.
  if (options.k_leaves != 1) RETURN_IF_ERROR(CheckLeaves("model", config, options.k_leaves));
  std::unique_ptr<Transformer> t(new Transformer(device, config, options));
  const int64_t P = options.max_sequence_length, half = config.head_dim / 2;
  ASSIGN_OR_RETURN(t->cos_PC_, t->memory_.Make(device, DType::kF32, P, half));
  ASSIGN_OR_RETURN(t->sin_PC_, t->memory_.Make(device, DType::kF32, P, half));
  const RopeTables tables = ComputeRopeTables(config, P);
  const std::unique_ptr<Stream> stream = device.CreateStream();
  device.Upload(*stream, t->cos_PC_, tables.cos.data());
  device.Upload(*stream, t->sin_PC_, tables.sin.data());
  return t;
}

KvCacheShape Transformer::CacheShape(int64_t num_blocks) const {
  return {config_.num_layers, num_blocks,     config_.num_kv_heads,
          config_.head_dim,   options_.dtype, options_.kv_format};
}

AttentionShape Transformer::attention_shape() const {
  return {config_.num_heads, config_.num_kv_heads, config_.head_dim,
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim))),
          config_.sliding_window};
}

void Transformer::CheckBatch(const PagedBatch& b, const WorkspaceLimits& limits) const {
  const size_t rows = b.ids_T.size();
  STRETTO_CHECK(rows > 0 && static_cast<int64_t>(rows) <= limits.max_rows);
  STRETTO_CHECK(b.positions_T.size() == rows && b.row_sequence_T.size() == rows);
  STRETTO_CHECK(b.context_length_T.size() == rows && b.slots_T.size() == rows);
  STRETTO_CHECK(b.num_sequences > 0 && b.num_sequences <= limits.max_sequences);
  STRETTO_CHECK(b.block_tables_SM.size() % b.num_sequences == 0);
  const auto blocks = static_cast<int64_t>(b.block_tables_SM.size()) / b.num_sequences;
  STRETTO_CHECK(blocks > 0 && blocks <= limits.max_blocks_per_sequence);
  STRETTO_CHECK(static_cast<int64_t>(b.logits_rows_R.size()) <= limits.max_logits_rows);
  for (size_t t = 0; t < rows; ++t) {
    STRETTO_CHECK(b.ids_T[t] >= 0 && b.ids_T[t] < config_.vocab_size);
    STRETTO_CHECK(b.positions_T[t] >= 0 && b.positions_T[t] < options_.max_sequence_length);
    STRETTO_CHECK(b.row_sequence_T[t] >= 0 && b.row_sequence_T[t] < b.num_sequences);
    STRETTO_CHECK(b.context_length_T[t] > 0 && b.context_length_T[t] <= blocks * kBlockTokens);
  }
  for (int32_t row : b.logits_rows_R) STRETTO_CHECK(row >= 0 && row < static_cast<int64_t>(rows));
}

namespace {
Tensor UploadInts(Device& device, Stream& stream, const Tensor& buffer,
                  absl::Span<const int32_t> values) {
  const Tensor t = buffer.Cols(0, static_cast<int64_t>(values.size()));
  device.Upload(stream, t, values.data());
  return t;
}

}  // namespace

LayerTensors Transformer::FirstRows(const Workspace& w, int64_t num_rows) const {
  LayerTensors t;
  t.x_in_TD = t.x_mid_TD = t.x_out_TD = w.x_.Rows(0, num_rows);
  t.normed_TD = w.normed_.Rows(0, num_rows);
  t.qkv_TE = w.qkv_.Rows(0, num_rows);
  if (config_.qk_norm) t.qk_TE = w.qk_.Rows(0, num_rows);
  t.attention_TE = w.attention_.Rows(0, num_rows);
  t.branch_TD = w.branch_.Rows(0, num_rows);
  t.gate_up_T2F = w.gate_up_.Rows(0, num_rows);
  t.activated_TF = w.activated_.Rows(0, num_rows);
  return t;
}

Tensor Transformer::ForwardPaged(Stream& stream, const ModelWeights& weights,
                                 const PagedBatch& batch, KvCache& cache, Workspace& w) const {
  CheckBatch(batch, w.limits_);
  STRETTO_CHECK(weights.dtype() == options_.dtype && w.limits_.k_leaves == options_.k_leaves);
  STRETTO_CHECK(weights.k_leaves() == options_.k_leaves);
  const auto T = static_cast<int64_t>(batch.ids_T.size());
  const auto upload = [&](const Tensor& buffer, absl::Span<const int32_t> values) {
    return UploadInts(device_, stream, buffer, values);
  };
  const Tensor ids_T = upload(w.ids_, batch.ids_T);
  const Tensor slots_T = upload(w.slots_, batch.slots_T);
  const LayerContext c{device_, stream,  config_,     upload(w.positions_, batch.positions_T),
                       cos_PC_, sin_PC_, w.leaf_sums_};
  const LayerTensors t = FirstRows(w, T);
  const Qkv in = AttentionInputs(config_, t);
  PagedAttention attention;
  attention.shape = attention_shape();
  attention.out = t.attention_TE;
  attention.q = in.q;
  attention.row_sequence_T = upload(w.row_sequence_, batch.row_sequence_T);
  attention.context_length_T = upload(w.context_length_, batch.context_length_T);
  attention.block_tables_SM =
      upload(w.block_tables_, batch.block_tables_SM).Reshape(batch.num_sequences);

  w.all_rows_finished_ =
      batch.finish_all_rows || static_cast<int64_t>(batch.logits_rows_R.size()) >= T;
  device_.Embedding(stream, t.x_in_TD, weights.embedding, ids_T);
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    RunProjections(c, weights.layers[l], t);
    device_.WriteKv(stream, cache, l, in.k, in.v, slots_T);
    attention.layer = l;
    if (l + 1 == config_.num_layers && !w.all_rows_finished_) {
      return FinishRows(c, weights, batch, cache, attention, w);
    }
    device_.Attention(stream, cache, attention);
    RunAttentionOutput(c, weights.layers[l], t);
    RunGateUp(c, weights.layers[l], t);
    RunMlpOutput(c, weights.layers[l], t);
  }
  return LogitsOfRows(stream, weights, batch.logits_rows_R, w);
}

// The last layer from its attention on, and the head, for the rows whose logits are wanted.
Tensor Transformer::FinishRows(const LayerContext& c, const ModelWeights& weights,
                               const PagedBatch& batch, const KvCache& cache,
                               const PagedAttention& all_rows, Workspace& w) const {
  const absl::Span<const int32_t> rows_R = batch.logits_rows_R;
  const auto R = static_cast<int64_t>(rows_R.size());
  if (R == 0) return Tensor{};
  const Tensor rows = UploadInts(device_, c.stream, w.logits_rows_, rows_R);
  LayerTensors t = FirstRows(w, R);
  t.x_in_TD = t.x_mid_TD = t.x_out_TD = w.last_.Rows(0, R);
  device_.GatherRows(c.stream, t.x_in_TD, w.x_, rows);
  PagedAttention attention = all_rows;
  attention.q = w.last_q_.Rows(0, R);
  device_.GatherRows(c.stream, attention.q, all_rows.q, rows);
  attention.out = t.attention_TE;
  const auto pick = [&](const Tensor& buffer, absl::Span<const int32_t> values_T) {
    w.host_.clear();
    for (int32_t row : rows_R) w.host_.push_back(values_T[row]);
    return UploadInts(device_, c.stream, buffer, w.host_);
  };
  attention.row_sequence_T = pick(w.last_sequence_, batch.row_sequence_T);
  attention.context_length_T = pick(w.last_context_, batch.context_length_T);
  device_.Attention(c.stream, cache, attention);
  RunAttentionOutput(c, weights.layers.back(), t);
  RunGateUp(c, weights.layers.back(), t);
  RunMlpOutput(c, weights.layers.back(), t);
  const Tensor logits_RV = w.logits_.Rows(0, R);
  RunHead(c, weights, t.x_out_TD, w.last_normed_.Rows(0, R), logits_RV);
  return logits_RV;
}

Tensor Transformer::LogitsOfRows(Stream& stream, const ModelWeights& weights,
                                 absl::Span<const int32_t> rows_R, Workspace& w) const {
  const auto R = static_cast<int64_t>(rows_R.size());
  if (R == 0) return Tensor{};
  STRETTO_CHECK(R <= w.limits_.max_logits_rows && w.all_rows_finished_);
  const Tensor rows = UploadInts(device_, stream, w.logits_rows_, rows_R);
  const Tensor last_RD = w.last_.Rows(0, R), logits_RV = w.logits_.Rows(0, R);
  device_.GatherRows(stream, last_RD, w.x_, rows);
  RunHead({device_, stream, config_, Tensor{}, cos_PC_, sin_PC_}, weights, last_RD,
          w.last_normed_.Rows(0, R), logits_RV);
  return logits_RV;
}
}  // namespace stretto::engine
