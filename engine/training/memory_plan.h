// What a rank of a trainer will hold at most, by formula, before anything is allocated. Legend: P
// parameters, N ranks, W bytes of a weight (bf16 2, f32 4), D/F/V widths of the residual stream,
// MLP and vocabulary, E = (H + 2G)·C columns of queries, keys and values, T rows of a micro-batch,
// L layers.
#pragma once

#include <cstddef>

#include "engine/training/trainer_engine.h"

namespace stretto::engine {
struct MemoryPlan {
  // Weights W, gradients 4 and masters with moments 12 bytes a parameter, divided by N where the
  // layout divides them (docs/parallel-training.md). With LoRA gradients, masters and moments are
  // the adapter's, and its values in f32 are 4 bytes more. 8-bit moments are 2 bytes and 1/32 of
  // scales instead of 8; of offloaded state 8-bit moments alone stay in memory.
  size_t state = 0;
  // Matrices as products like them, W bytes an element: of all layers and the head, under fsdp of
  // the layers gathered at once and the head. zero2, fsdp: gradients of two layers and the ends,
  // and under fsdp the gathered weights themselves.
  size_t gathered = 0;
  // What the checkpointing keeps of every layer, a row: W·D of its input; unless full
  // W·(E + H·C + D), with norms of queries and keys W·(H + G)·C more; with none W·2F more.
  size_t activations = 0;
  // One layer's other tensors with all gradients of activations (f32), and a chunk of logits. Where
  // optimizer state isn't f32 in memory, the window that it passes through.
  size_t workspace = 0;

  size_t total() const { return state + gathered + activations + workspace; }
};
MemoryPlan PlanMemory(const ModelConfig& config, const TrainerOptions& options, int num_ranks);
}  // namespace stretto::engine
