// Memory and forward direction of the training face.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/model/packed_state.h"

namespace stretto::engine {
namespace {
struct Wish {
  Tensor* tensor;
  DType dtype;
  int64_t rows, cols;
};

absl::Status Grant(Device& device, DeviceMemory& memory, const std::vector<Wish>& wishes) {
  for (const Wish& w : wishes) {
    ASSIGN_OR_RETURN(*w.tensor, memory.Make(device, w.dtype, w.rows, w.cols));
  }
  return absl::OkStatus();
}

// What the backward pass reads of a layer, beside its input and the MLP's first product.
std::vector<Wish> AttentionTensors(const ModelConfig& c, DType dtype, int64_t T, LayerTensors& t) {
  const int64_t C = c.head_dim, H = c.num_heads, G = c.num_kv_heads;
  std::vector<Wish> wishes = {{&t.qkv_TE, dtype, T, (H + 2 * G) * C},
                              {&t.attention_TE, dtype, T, H * C},
                              {&t.x_mid_TD, dtype, T, c.hidden_size}};
  if (c.qk_norm) wishes.push_back({&t.qk_TE, dtype, T, (H + G) * C});
  return wishes;
}
}  // namespace

LayerTensors FirstRows(const LayerTensors& t, int64_t rows) {
  LayerTensors r = t;
  for (Tensor* x : {&r.x_in_TD, &r.normed_TD, &r.qkv_TE, &r.qk_TE, &r.attention_TE, &r.branch_TD,
                    &r.x_mid_TD, &r.gate_up_T2F, &r.activated_TF, &r.x_out_TD}) {
    if (*x) *x = x->Rows(0, rows);
  }
  return r;
}

absl::StatusOr<Checkpointing> ParseCheckpointing(absl::string_view name) {
  if (name == "none") return Checkpointing::kNone;
  if (name == "selective") return Checkpointing::kSelective;
  if (name == "full") return Checkpointing::kFull;
  return absl::InvalidArgumentError(
      absl::StrCat("checkpointing '", name, "': expected none, selective or full"));
}

int32_t PackedBatch::AddSegment(absl::Span<const int32_t> ids, int32_t parent) {
  STRETTO_CHECK(!ids.empty() && parent < segments.num_segments());
  const auto segment = static_cast<int32_t>(segments.num_segments());
  segments.row_begin.push_back(static_cast<int32_t>(num_rows()));
  segments.num_rows.push_back(static_cast<int32_t>(ids.size()));
  segments.parent.push_back(parent);
  const auto start = static_cast<int32_t>(segments.StartPosition(segment));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids_T.push_back(ids[i]);
    positions_T.push_back(start + static_cast<int32_t>(i));
  }
  return segment;
}

size_t HeadRowBytes(const ModelConfig& config, DType dtype, const PackedPassOptions& options) {
  const auto V = static_cast<size_t>(config.num_outputs()),
             D = static_cast<size_t>(config.hidden_size);
  size_t of_residual = 2 * SizeOf(dtype);
  if (options.train) of_residual += 2 * sizeof(float);
  return V * sizeof(float) + D * of_residual + 7 * sizeof(float);
}

PackedPass::PackedPass(const Transformer& transformer, const PackedPassOptions& options)
    : transformer_(transformer), options_(options), state_(std::make_unique<State>()) {}
PackedPass::~PackedPass() = default;

size_t PackedPass::bytes() const { return state_->memory.bytes(); }

absl::StatusOr<std::unique_ptr<PackedPass>> PackedPass::Create(const Transformer& transformer,
                                                               const PackedPassOptions& options) {
  if (options.max_rows <= 0 || options.max_targets <= 0 || !(options.temperature > 0)) {
    return absl::InvalidArgumentError(
        "packed pass: max_rows, max_targets and temperature must be positive");
  }
  if (options.gradient_dtype != DType::kF32 && transformer.options().dtype != DType::kBF16) {
    return absl::InvalidArgumentError("packed pass: gradients of bf16 want weights of bf16");
  }
  if (options.train && transformer.options().k_leaves != 1) {
    return absl::InvalidArgumentError("packed pass: a model in leaves is trained by another one");
  }
  std::unique_ptr<PackedPass> pass(new PackedPass(transformer, options));
  RETURN_IF_ERROR(pass->AllocateActivations());
  if (options.train) RETURN_IF_ERROR(pass->AllocateGradients());
  return pass;
}

absl::Status PackedPass::AllocateActivations() {
  State& s = *state_;
  Device& device = transformer_.device();
  const ModelConfig& c = transformer_.config();
  const DType dtype = transformer_.options().dtype;
  const int64_t T = options_.max_rows, N = options_.max_targets, D = c.hidden_size;
  const auto fitting =
      static_cast<int64_t>(options_.logits_bytes / HeadRowBytes(c, dtype, options_));
  const int64_t R = s.chunk_rows = std::clamp<int64_t>(fitting, 1, N);
  LayerTensors shared;
  std::vector<Wish> wishes = {{&s.ids_T, DType::kI32, 1, T},
                              {&s.positions_T, DType::kI32, 1, T},
                              {&s.target_rows_N, DType::kI32, 1, N},
                              {&s.targets_N, DType::kI32, 1, N},
                              {&s.last_RD, dtype, R, D},
                              {&s.normed_RD, dtype, R, D},
                              {&s.logits_RV, DType::kF32, R, c.num_outputs()},
                              {&s.logprobs_R, DType::kF32, 1, R},
                              {&s.entropy_R, DType::kF32, 1, R},
                              {&s.x_last_TD, dtype, T, D},
                              {&shared.normed_TD, dtype, T, D},
                              {&shared.branch_TD, dtype, T, D},
                              {&shared.activated_TF, dtype, T, c.intermediate_size}};
  const auto gate_up = [&](LayerTensors& t) {
    return Wish{&t.gate_up_T2F, dtype, T, 2 * c.intermediate_size};
  };
  const bool keep_attention = options_.train && options_.checkpointing != Checkpointing::kFull;
  const bool keep_gate_up = options_.train && options_.checkpointing == Checkpointing::kNone;
  if (!keep_attention) {
    for (const Wish& w : AttentionTensors(c, dtype, T, shared)) wishes.push_back(w);
  }
  if (!keep_gate_up) wishes.push_back(gate_up(shared));
  const int64_t k_leaves = transformer_.options().k_leaves;
  s.leaf_sums_TD.resize(static_cast<size_t>(NumLeafSums(k_leaves)));
  for (Tensor& sum : s.leaf_sums_TD) wishes.push_back({&sum, DType::kF32, T, D});
  ASSIGN_OR_RETURN(s.vocabulary, VocabularyLeaves::Create(device, k_leaves, R));
  RETURN_IF_ERROR(Grant(device, s.memory, wishes));
  s.layers.assign(c.num_layers, shared);
  for (int64_t l = 0; l < c.num_layers; ++l) {
    LayerTensors& t = s.layers[l];
    if (options_.train) {
      ASSIGN_OR_RETURN(t.x_in_TD, s.memory.Make(device, dtype, T, D));
    } else {
      t.x_in_TD = t.x_mid_TD = s.x_last_TD;
    }
    if (keep_attention) {
      RETURN_IF_ERROR(Grant(device, s.memory, AttentionTensors(c, dtype, T, t)));
    }
    if (keep_gate_up) RETURN_IF_ERROR(Grant(device, s.memory, {gate_up(t)}));
    if (l > 0) s.layers[l - 1].x_out_TD = t.x_in_TD;
  }
  s.layers.back().x_out_TD = s.x_last_TD;
  return absl::OkStatus();
}

absl::Status PackedPass::AllocateGradients() {
  State& s = *state_;
  const ModelConfig& c = transformer_.config();
  const int64_t T = options_.max_rows, R = s.chunk_rows, D = c.hidden_size;
  const int64_t F = c.intermediate_size, C = c.head_dim, H = c.num_heads, G = c.num_kv_heads;
  std::vector<Wish> wishes = {{&s.d_x_TD, DType::kF32, T, D},
                              {&s.d_normed_TD, DType::kF32, T, D},
                              {&s.d_qkv_TE, DType::kF32, T, (H + 2 * G) * C},
                              {&s.d_attention_TE, DType::kF32, T, H * C},
                              {&s.d_gate_up_T2F, DType::kF32, T, 2 * F},
                              {&s.d_activated_TF, DType::kF32, T, F},
                              {&s.d_last_RD, DType::kF32, R, D},
                              {&s.d_normed_RD, DType::kF32, R, D},
                              {&s.stats_R3, DType::kF32, R, 3},
                              {&s.d_logprobs_R, DType::kF32, 1, R},
                              {&s.d_entropy_R, DType::kF32, 1, R}};
  if (c.qk_norm) wishes.push_back({&s.d_qk_TE, DType::kF32, T, (H + G) * C});
  if (options_.gradient_dtype == DType::kBF16) {
    wishes.push_back({&s.d_rounded, DType::kBF16, 1, T * std::max({2 * F, (H + 2 * G) * C, D})});
  }
  return Grant(transformer_.device(), s.memory, wishes);
}

void CheckPackedBatch(const Transformer& transformer, const PackedPassOptions& options,
                      const PackedBatch& b) {
  const int64_t T = b.num_rows(), N = b.num_targets();
  const ModelConfig& c = transformer.config();
  STRETTO_CHECK(T > 0 && T <= options.max_rows && N <= options.max_targets);
  STRETTO_CHECK(b.positions_T.size() == b.ids_T.size());
  STRETTO_CHECK(b.target_rows_N.size() == b.targets_N.size());
  for (int64_t t = 0; t < T; ++t) {
    STRETTO_CHECK(b.ids_T[t] >= 0 && b.ids_T[t] < c.vocab_size);
    STRETTO_CHECK(b.positions_T[t] >= 0);
    STRETTO_CHECK(b.positions_T[t] < transformer.options().max_sequence_length);
  }
  for (int64_t n = 0; n < N; ++n) {
    STRETTO_CHECK(b.target_rows_N[n] >= 0 && b.target_rows_N[n] < T);
    STRETTO_CHECK(b.targets_N[n] >= 0 && b.targets_N[n] < c.vocab_size);
  }
  int64_t rows = 0;
  for (int64_t s = 0; s < b.segments.num_segments(); ++s) {
    STRETTO_CHECK(b.segments.row_begin[s] == rows && b.segments.parent[s] < s);
    rows += b.segments.num_rows[s];
  }
  STRETTO_CHECK(rows == T);
}

LayerContext PackedPass::Context(Stream& stream, int64_t rows) const {
  return {transformer_.device(), stream,
          transformer_.config(), state_->positions_T.Cols(0, rows),
          transformer_.cos_PC_,  transformer_.sin_PC_,
          state_->leaf_sums_TD};
}

PackedAttention PackedPass::AttentionOf(const LayerTensors& t) const {
  const Qkv in = AttentionInputs(transformer_.config(), t);
  return {
      transformer_.attention_shape(), &state_->batch->segments, in.q, in.k, in.v, t.attention_TE};
}

void PackedPass::Forward(Stream& stream, const ModelWeights& weights, const PackedBatch& batch,
                         absl::Span<float> logprobs_N, absl::Span<float> entropy_N) {
  CheckPackedBatch(transformer_, options_, batch);
  State& s = *state_;
  Device& device = transformer_.device();
  s.batch = &batch;
  const int64_t T = batch.num_rows(), N = batch.num_targets();
  STRETTO_CHECK(static_cast<int64_t>(logprobs_N.size()) == N);
  STRETTO_CHECK(entropy_N.empty() || static_cast<int64_t>(entropy_N.size()) == N);
  device.Upload(stream, s.ids_T.Cols(0, T), batch.ids_T.data());
  device.Upload(stream, s.positions_T.Cols(0, T), batch.positions_T.data());
  if (N > 0) {
    device.Upload(stream, s.target_rows_N.Cols(0, N), batch.target_rows_N.data());
    device.Upload(stream, s.targets_N.Cols(0, N), batch.targets_N.data());
  }
  const LayerContext c = Context(stream, T);
  ParameterUnits* units = options_.units;
  const auto last_unit = static_cast<int64_t>(s.layers.size()) + 1;
  if (units != nullptr) units->BeforeForward(0);
  device.Embedding(stream, s.layers[0].x_in_TD.Rows(0, T), weights.embedding, s.ids_T.Cols(0, T));
  if (units != nullptr) units->AfterForward(0);
  for (int64_t l = 0; l + 1 < last_unit; ++l) {
    if (units != nullptr) units->BeforeForward(1 + l);
    const LayerTensors t = FirstRows(s.layers[l], T);
    RunProjections(c, weights.layers[l], t);
    device.Attention(stream, AttentionOf(t));
    RunAttentionOutput(c, weights.layers[l], t);
    RunGateUp(c, weights.layers[l], t);
    RunMlpOutput(c, weights.layers[l], t);
    if (units != nullptr) units->AfterForward(1 + l);
  }
  if (units != nullptr) units->BeforeForward(last_unit);
  // The last first: the backward pass finds the logits of the first chunk where it begins.
  const int64_t num_chunks = (N + s.chunk_rows - 1) / s.chunk_rows;
  for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * s.chunk_rows, count = std::min(s.chunk_rows, N - begin);
    RunHeadChunk(c, weights, begin, count);
    if (c.config.value_head) {
      device.Download(stream, s.logits_RV.Rows(0, count), &logprobs_N[begin]);
      continue;
    }
    const Tensor logprobs = s.logprobs_R.Cols(0, count);
    const Tensor entropy = entropy_N.empty() ? Tensor{} : s.entropy_R.Cols(0, count);
    const Tensor logits = s.logits_RV.Rows(0, count), targets = s.targets_N.Cols(begin, count);
    if (options_.train) {
      s.stats_have_entropy = static_cast<bool>(entropy);
      device.LogProbs(stream, logprobs, entropy, logits, targets, options_.temperature,
                      s.stats_R3.Rows(0, count));
    } else {
      s.vocabulary->LogProbs(stream, logprobs, entropy, logits, targets, options_.temperature);
    }
    device.Download(stream, logprobs, &logprobs_N[begin]);
    if (entropy) device.Download(stream, entropy, &entropy_N[begin]);
  }
  if (c.config.value_head) std::fill(entropy_N.begin(), entropy_N.end(), 0.0f);
  if (units != nullptr) units->AfterForward(last_unit);
  device.Synchronize(stream);
}

void PackedPass::RunHeadChunk(const LayerContext& c, const ModelWeights& weights, int64_t begin,
                              int64_t count) {
  State& s = *state_;
  const int64_t T = s.batch->num_rows();
  c.device.GatherRows(c.stream, s.last_RD.Rows(0, count), s.x_last_TD.Rows(0, T),
                      s.target_rows_N.Cols(begin, count));
  RunHead(c, weights, s.last_RD.Rows(0, count), s.normed_RD.Rows(0, count),
          s.logits_RV.Rows(0, count));
}
}  // namespace stretto::engine
