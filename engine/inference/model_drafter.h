// Drafts written by a second, smaller model over the same vocabulary, with keys and values of its
// own. It draws with the policy's parameters and with the very random numbers that the policy's
// tokens will be drawn with: where the two models' distributions agree, so do the tokens.
//
// Its keys and values follow the completion: what was accepted stays, what was rejected is written
// again. A completion that hasn't been drafted for a while is caught up with in chunks. When blocks
// run out, the completion that has waited longest for a draft loses its own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/inference/batch_builder.h"
#include "engine/inference/block_pool.h"
#include "engine/inference/drafter.h"
#include "engine/inference/sampler.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
struct ModelDrafterOptions {
  int32_t num_blocks = 0;     // of keys and values
  int32_t max_sequences = 0;  // requests of one Propose
  int32_t max_rows = 0;       // of a forward pass; at least max_sequences
  std::vector<int32_t> eos_ids;
  double cost = 0;  // see Drafter; positive
};

class ModelDrafter final : public Drafter {
 public:
  // `model` outlives the drafter. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<ModelDrafter>> Create(
      const Transformer& model, std::shared_ptr<const ModelWeights> weights,
      const ModelDrafterOptions& options);

  void Propose(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts) override;
  void Forget(uint64_t id) override;
  double cost() const override { return options_.cost; }

  // All blocks are free once every completion has been forgotten.
  const BlockPool& pool() const { return pool_; }

 private:
  struct State {
    std::vector<int32_t> blocks;
    int32_t num_computed = 0;      // positions with keys and values
    std::vector<int32_t> guessed;  // the last of these positions' tokens, not known to be true
    uint64_t last_call = 0;
  };
  // A request that this call drafts for.
  struct Active {
    size_t request = 0;
    State* state = nullptr;
    std::vector<int32_t> text;  // the request's tokens and its draft
    int64_t constraint_state = 0;
  };
  ModelDrafter(const Transformer& model, std::shared_ptr<const ModelWeights> weights,
               const ModelDrafterOptions& options)
      : model_(model), weights_(std::move(weights)), options_(options), pool_(options.num_blocks) {}

  absl::Status Allocate();
  void CatchUp(absl::Span<const DraftRequest> requests);
  bool Reserve(State& state, int32_t num_tokens);
  bool EvictOldest();
  void Release(State& state);
  void DrawNext(absl::Span<const DraftRequest> requests, absl::Span<Draft> drafts);

  const Transformer& model_;
  std::shared_ptr<const ModelWeights> weights_;
  ModelDrafterOptions options_;
  BlockPool pool_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Sampler> sampler_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<State>> states_;  // by request
  uint64_t call_ = 0;

  // Of the current call; reused.
  BatchBuilder batch_;
  std::vector<Active> active_;
  std::vector<SampleRequest> sample_requests_;
  std::vector<Sampled> sampled_;
};
}  // namespace stretto::engine
