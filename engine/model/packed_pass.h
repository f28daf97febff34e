// The training face of the transformer: packed sequences without padding, log-probs of chosen
// tokens, and the backward pass into flat f32 gradients. A group's prompt is one segment that its
// completions share, computed once in each direction. The LM head runs over chunks of rows, so that
// logits of all rows need not exist at once. A model with a value head gives the values of the
// targets' rows where others give log-probs, and takes the gradients by them; entropies are 0.
//
// Legend: T rows, N targets, D residual width, V vocabulary, L layers.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
struct LayerContext;
struct LayerTensors;
class LoraAdapter;
enum class LoraGroup : uint8_t;

// Target n: the token targets_N[n] as the continuation of row target_rows_N[n]. A row may have
// several targets (the last row of a prompt predicts the first token of every completion) or none.
struct PackedBatch {
  std::vector<int32_t> ids_T;
  std::vector<int32_t> positions_T;
  SegmentTable segments;
  std::vector<int32_t> target_rows_N;
  std::vector<int32_t> targets_N;

  int64_t num_rows() const { return static_cast<int64_t>(ids_T.size()); }
  int64_t num_targets() const { return static_cast<int64_t>(targets_N.size()); }
  // Appends `ids` as a segment that continues `parent` (or −1) and returns its index. `ids` is not
  // empty.
  int32_t AddSegment(absl::Span<const int32_t> ids, int32_t parent);
};

// The flat run in units that a pass comes to one after the other: the embedding (0), each layer l
// (1 + l), and last the final norm with the LM head where it is not the embedding. An owner that
// doesn't hold all parameters or gradients at once follows a pass by them: it sees to it that a
// unit's entry of ModelWeights is there before the pass reads it. A pass goes through all units
// upwards (Forward), then downwards (Backward).
class ParameterUnits {
 public:
  // Both are in coordinates of the whole flat run; only the unit's range of them is touched.
  struct Tensors {
    Tensor flat_weights, gradients;
  };
  virtual ~ParameterUnits() = default;
  virtual void BeforeForward(int64_t unit) = 0;
  virtual void AfterForward(int64_t unit) = 0;
  // A tied head is of unit 0, which is asked for before the last unit and is done with at the end.
  virtual Tensors BeforeBackward(int64_t unit) = 0;
  virtual void AfterBackward(int64_t unit) = 0;

  // For owners that send gradients on their way. Of a layer, earlier than AfterBackward: those of
  // the MLP's second product are done, with the biases; then those of its first.
  enum class MlpPart : uint8_t { kDown, kGateUp };
  virtual void AfterMlpBackward(int64_t /*unit*/, MlpPart /*part*/) {}
  // Those of a tied head are done, but for what comes with unit 0, the rows of them that are looked
  // up: piece by piece, in the order of TiedHeadPieces, or of one that has all rows where that is
  // empty.
  using Rows = std::pair<int64_t, int64_t>;  // [first, second)
  virtual std::vector<std::vector<Rows>> TiedHeadPieces() { return {}; }
  virtual void AfterTiedHeadBackward(int64_t /*piece*/) {}
  // Whether the owner adds the gradients of looked-up rows to unit 0's itself, in order of rows.
  virtual bool TakeLookups(const Tensor& /*d_x_TD*/) { return false; }
};

struct PackedPassOptions;
// What only a bug gets wrong in a batch (STRETTO_CHECK).
void CheckPackedBatch(const Transformer& transformer, const PackedPassOptions& options,
                      const PackedBatch& batch);

// Which activations of a layer stay until the backward pass: all that it reads; all but the MLP's
// first product (the largest tensor, and about half of the layer's multiply-adds to have again); or
// its input alone, from which the whole layer is computed again. The bits are the same.
enum class Checkpointing : uint8_t { kNone, kSelective, kFull };
// "none", "selective" or "full"; InvalidArgument for others.
absl::StatusOr<Checkpointing> ParseCheckpointing(absl::string_view name);

struct PackedPassOptions {
  int64_t max_rows = 0;     // T
  int64_t max_targets = 0;  // N
  float temperature = 1.0f;
  // Memory for gradients' sake: without `train` nothing is kept and Backward may not be called.
  bool train = true;
  Checkpointing checkpointing = Checkpointing::kNone;
  // Bytes that rows of the LM head may take at once (HeadRowBytes each). Where all rows of a batch
  // fit, logits are kept for the backward pass, else most are computed again; either way the bits
  // are the same. With 32 MB of panels that a backward product packs on CPUs this makes less than
  // 256 MB.
  size_t logits_bytes = size_t{220} << 20;
  // That products of the backward pass read the gradients of activations in: kBF16 (with weights of
  // bf16) is faster where the processor multiplies bf16. All else of them stays f32.
  DType gradient_dtype = DType::kF32;
  ParameterUnits* units = nullptr;  // outlives the pass
  // The model's parameters are frozen: gradients are the adapter's, in its layout. It outlives the
  // pass.
  LoraAdapter* lora = nullptr;
};

// Of one row of the LM head: logits, whose gradients take their place, and the rows of the residual
// stream with theirs.
size_t HeadRowBytes(const ModelConfig& config, DType dtype, const PackedPassOptions& options);

// Both directions over one batch at a time; not thread-safe.
class TrainingPass {
 public:
  virtual ~TrainingPass() = default;

  // Log-probs (of logits / temperature) of all targets and, unless `entropy_N` is empty, the
  // entropy of the distributions they were taken from. Blocking. The batch is checked
  // (STRETTO_CHECK); it and `weights` stay unchanged until Backward has returned.
  virtual void Forward(Stream& stream, const ModelWeights& weights, const PackedBatch& batch,
                       absl::Span<float> logprobs_N, absl::Span<float> entropy_N) = 0;

  // Adds the gradient of sum_n d_logprobs[n] · logprob[n] + d_entropy[n] · entropy[n] over the
  // batch of the last Forward to `gradients` (f32, flat, in `layout`). `d_entropy_N` may be empty.
  // `flat_weights`: the parameters that `weights` were packed from. Once after each Forward. With
  // `units` both tensors come from there, and these are not read.
  virtual void Backward(Stream& stream, const ModelWeights& weights, const ParameterLayout& layout,
                        const Tensor& flat_weights, const Tensor& gradients,
                        absl::Span<const float> d_logprobs_N,
                        absl::Span<const float> d_entropy_N) = 0;

  virtual size_t bytes() const = 0;  // device memory held
  // Not OK once a pass over several ranks has failed: what it computes means nothing from then on.
  virtual absl::Status status() const { return absl::OkStatus(); }
};

// The whole model on one device. `transformer` outlives it.
class PackedPass final : public TrainingPass {
 public:
  static absl::StatusOr<std::unique_ptr<PackedPass>> Create(const Transformer& transformer,
                                                            const PackedPassOptions& options);
  ~PackedPass() override;

  void Forward(Stream& stream, const ModelWeights& weights, const PackedBatch& batch,
               absl::Span<float> logprobs_N, absl::Span<float> entropy_N) override;
  void Backward(Stream& stream, const ModelWeights& weights, const ParameterLayout& layout,
                const Tensor& flat_weights, const Tensor& gradients,
                absl::Span<const float> d_logprobs_N, absl::Span<const float> d_entropy_N) override;
  size_t bytes() const override;
  const PackedPassOptions& options() const { return options_; }

 private:
  struct State;
  // What the backward pass reads and adds to.
  struct GradientContext {
    const ModelWeights& weights;
    const ParameterLayout& layout;
    ParameterUnits::Tensors unit, head;  // of the layer at hand; of the LM head
  };
  PackedPass(const Transformer& transformer, const PackedPassOptions& options);
  absl::Status AllocateActivations();
  absl::Status AllocateGradients();
  LayerContext Context(Stream& stream, int64_t rows) const;
  // A linear map or group of maps of a layer on the way back: d_x, and what is wanted of the
  // gradients of its weight and bias, or of its adapter.
  struct LinearGroup {
    int64_t layer = 0;
    LoraGroup group;
    const ParameterView &weight, &bias;
  };
  void BackwardLinear(const LayerContext& c, const GradientContext& g, const LinearGroup& map,
                      const Tensor& d_x_TK, const Tensor& d_y_TN, const Tensor& x_TK) const;
  // Its two halves. d_y as products read it, and as it is.
  void BackwardInput(const LayerContext& c, const GradientContext& g, const LinearGroup& map,
                     const Tensor& d_x_TK, const Tensor& d_y_TN) const;
  void BackwardWeight(const LayerContext& c, const GradientContext& g, const LinearGroup& map,
                      const Tensor& d_y_of_products_TN, const Tensor& d_y_TN,
                      const Tensor& x_TK) const;
  // d_y as products read it: itself, or rounded in scratch memory until the next call.
  Tensor ForProducts(const LayerContext& c, const Tensor& d_y_TN) const;
  // Where the gradient of the MLP's first product goes: rounded already, if only products read it.
  Tensor GateUpGradient(const ParameterView& bias, int64_t rows) const;
  // Where the gradient of a norm's weight goes.
  Tensor NormGradient(const GradientContext& g, const ParameterView& norm) const;
  // Where the parameters of a unit are on the way back.
  void Enter(GradientContext& g, int64_t unit) const;
  void Leave(int64_t unit) const;
  void BackwardHead(const LayerContext& c, GradientContext& g, absl::Span<const float> d_logprobs_N,
                    absl::Span<const float> d_entropy_N);
  PackedAttention AttentionOf(const LayerTensors& t) const;
  // Logits of targets [begin, begin + count).
  void RunHeadChunk(const LayerContext& c, const ModelWeights& weights, int64_t begin,
                    int64_t count);
  void BackwardHeadChunk(const LayerContext& c, const GradientContext& g, int64_t begin,
                         int64_t count, const Tensor& d_entropy);
  void BackwardTiedHead(const LayerContext& c, const GradientContext& g, const Tensor& d_logits_RV,
                        const Tensor& normed_RD);
  void BackwardMlp(const LayerContext& c, const GradientContext& g, int64_t layer,
                   const LayerTensors& t);
  void BackwardAttention(const LayerContext& c, const GradientContext& g, int64_t layer,
                         const LayerTensors& t);

  const Transformer& transformer_;
  PackedPassOptions options_;
  std::unique_ptr<State> state_;
};
}  // namespace stretto::engine
