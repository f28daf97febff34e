// One transformer for every supported architecture (Llama, SmolLM2, Mistral, Qwen2, Qwen3), with
// two faces: inference over a paged KV cache (here) and training over packed sequences
// (packed_pass.h). Both issue the same operations in the same order, and every operation's rows are
// pure functions of themselves; so a token's log-prob has the same bits from either face, however
// its prefix was cut into chunks and whatever shares the batch.
//
// Activations have the weights' dtype (bf16, or f32 for gradient checks), logits are f32.
// Legend: T rows, D columns of the residual stream, H/G query and key/value heads, C head size,
// F MLP width, V vocabulary, S sequences, M blocks in a block table, R rows with logits.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device/device.h"
#include "engine/formats/model_config.h"
#include "engine/model/memory.h"
#include "engine/model/weights.h"

namespace stretto::engine {
struct LayerContext;
struct LayerTensors;

struct TransformerOptions {
  DType dtype = DType::kBF16;  // of weights, activations and KV cache
  // Positions that exist: [0, max_sequence_length). RoPE of type `dynamic` is computed as for a
  // sequence of exactly this length, so that a token stays a function of its prefix alone: all
  // members of a run must be given the same number.
  int64_t max_sequence_length = 0;
  // In how many leaves sums over inputs of o and down and over the vocabulary are made
  // (leaf_layout.h): a part of the numeric profile, the same for all members of a run. For
  // inference; a model that is trained in leaves has a pass of its own.
  int64_t k_leaves = 1;
  // kInt8 or kFp8: the paged face keeps keys and values quantised. Its log-probs are then not those
  // of training.
  WeightFormat kv_format = WeightFormat::kPlain;
};

// Rows of any number of sequences, host arrays that are read before ForwardPaged returns. Rows of
// one sequence that are new to the cache stand in order of position; sequences in any order.
struct PagedBatch {
  absl::Span<const int32_t> ids_T;
  absl::Span<const int32_t> positions_T;
  absl::Span<const int32_t> row_sequence_T;    // row of block_tables_SM
  absl::Span<const int32_t> context_length_T;  // positions + 1 unless a cache is not rewritten
  absl::Span<const int32_t> slots_T;           // block * kBlockTokens + offset; −1: not stored
  absl::Span<const int32_t> block_tables_SM;   // S × M, row-major; entries past the context: any
  int64_t num_sequences = 0;                   // S
  absl::Span<const int32_t> logits_rows_R;     // rows whose logits are wanted, any order
  // LogitsOfRows will be asked for other rows, too. Otherwise the last layer is finished for
  // logits_rows_R alone: of the others only keys and values are ever read again.
  bool finish_all_rows = false;
};

struct WorkspaceLimits {
  int64_t max_rows = 0;                 // T
  int64_t max_logits_rows = 0;          // R
  int64_t max_sequences = 0;            // S
  int64_t max_blocks_per_sequence = 0;  // M
  int64_t k_leaves = 1;                 // of the transformer
};

// Scratch memory of the paged face, allocated once. One pass at a time.
class Workspace {
 public:
  static absl::StatusOr<std::unique_ptr<Workspace>> Create(Device& device,
                                                           const ModelConfig& config, DType dtype,
                                                           const WorkspaceLimits& limits);
  const WorkspaceLimits& limits() const { return limits_; }
  size_t bytes() const { return memory_.bytes(); }

 private:
  friend class Transformer;
  WorkspaceLimits limits_;
  DeviceMemory memory_;
  Tensor ids_, positions_, row_sequence_, context_length_, slots_, block_tables_, logits_rows_;
  Tensor x_, normed_, qkv_, qk_, attention_, branch_, gate_up_, activated_;
  std::vector<Tensor> leaf_sums_;  // of more than one leaf
  Tensor last_, last_normed_, last_q_, last_sequence_, last_context_, logits_;
  std::vector<int32_t> host_;  // values that are about to be uploaded
  bool all_rows_finished_ = false;
};

// Immutable after creation; any number of threads may use it with streams and workspaces of their
// own. `device` outlives it.
class Transformer {
 public:
  // InvalidArgument when the options contradict the model.
  static absl::StatusOr<std::unique_ptr<Transformer>> Create(Device& device,
                                                             const ModelConfig& config,
                                                             const TransformerOptions& options);

  // Logits [R, V] f32 of the rows asked for, in their order: a view into `workspace`, valid until
  // its next pass; no tensor when R is 0. The new rows' keys and values are stored in `cache` layer
  // by layer before the layer's attention, so rows of one call see one another. Allocates nothing.
  // The same call serves decode (all S sequences one row each), prefill in chunks of any size, and
  // scoring of given text (every row's logits, then Device::LogProbs).
  // The batch is checked (STRETTO_CHECK): sizes, limits, ids in [0, V), positions in range.
  Tensor ForwardPaged(Stream& stream, const ModelWeights& weights, const PagedBatch& batch,
                      KvCache& cache, Workspace& workspace) const;

  // Logits of other rows of the pass with finish_all_rows that `workspace` has just made, up to
  // max_logits_rows of them; they take the place of those before.
  Tensor LogitsOfRows(Stream& stream, const ModelWeights& weights, absl::Span<const int32_t> rows_R,
                      Workspace& workspace) const;

  KvCacheShape CacheShape(int64_t num_blocks) const;
  Device& device() const { return device_; }
  const ModelConfig& config() const { return config_; }
  const TransformerOptions& options() const { return options_; }
  AttentionShape attention_shape() const;
  // Rotary tables [max_sequence_length, C/2] f32.
  const Tensor& cos_PC() const { return cos_PC_; }
  const Tensor& sin_PC() const { return sin_PC_; }

 private:
  friend class PackedPass;
  Transformer(Device& device, const ModelConfig& config, const TransformerOptions& options)
      : device_(device), config_(config), options_(options) {}

  void CheckBatch(const PagedBatch& batch, const WorkspaceLimits& limits) const;
  LayerTensors FirstRows(const Workspace& workspace, int64_t num_rows) const;
  Tensor FinishRows(const LayerContext& c, const ModelWeights& weights, const PagedBatch& batch,
                    const KvCache& cache, const PagedAttention& all_rows,
                    Workspace& workspace) const;

  Device& device_;
  ModelConfig config_;
  TransformerOptions options_;
  DeviceMemory memory_;
  Tensor cos_PC_, sin_PC_;
};
}  // namespace stretto::engine
